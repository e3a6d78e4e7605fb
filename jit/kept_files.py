"""Files of the cache: a digest, then data. Each can be made again, so whatever is wrong with one is a miss."""

import errno
import hashlib
import secrets
from contextlib import suppress
from pathlib import Path

_DIGEST_BYTES = 16


def digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def read_kept(path: Path) -> bytes | None:
    """What `keep` wrote; None if there is no such file. Raises OSError if it cannot be read or holds anything else."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    kept = data[_DIGEST_BYTES:]
    if digest(kept) != data[:_DIGEST_BYTES]:
        raise OSError(errno.EBADMSG, "damaged", str(path))
    return kept


def keep(path: Path, data: bytes) -> None:
    """Writes a file, whole or not at all, in a folder that need not exist. Raises OSError, and then leaves nothing."""
    written = path.with_suffix(f".{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        written.write_bytes(digest(data) + data)
        written.replace(path)
    except OSError:
        with suppress(OSError):
            written.unlink(missing_ok=True)
        raise
