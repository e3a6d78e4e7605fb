"""Who may call: bearer tokens from a file that holds their hashes, and what each of them may use.

The file is YAML, a list of entries; `twopass token NAME` prints one with its token:

    - name: alice                # in metrics and logs
      sha256: 9f86d081884c7d65...
      max_in_flight: 16          # answers at once; no limit without it
      tokens_per_minute: 60000   # of prompts and answers together; no limit without it

It is read again when it changes. A file that has become unusable changes nothing, and is told to the log.
"""

import hashlib
import hmac
import logging
import re
import secrets
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from protocol.errors import ConfigError, Unauthenticated
from router.admission import Account

log = logging.getLogger(__name__)

TOKEN_BYTES = 32
NAME = r"^[\w.@-]{1,64}$"
SCHEME = "bearer "


class _Entry(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=NAME)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    max_in_flight: Annotated[int, Field(ge=1)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None


_ENTRIES = TypeAdapter(list[_Entry])


class Accounts:
    """Those of one file. Raises ConfigError, with the knob's name, if it cannot be used."""

    def __init__(self, path: Path, knob: str = "tokens_file") -> None:
        self._path, self._knob = path, knob
        self._stamp = self._stamp_now()
        self._entries = self._load()

    def authenticate(self, header: str | None) -> Account:
        """Returns whose token an `authorization` header has. Raises Unauthenticated. All entries are compared whatever
        the token is, so the time that it takes says nothing.
        """
        self._renew()
        if header is None:
            raise Unauthenticated("authorization: a bearer token is needed")
        if not header.lower().startswith(SCHEME):
            raise Unauthenticated("authorization: only bearer tokens are known here")
        presented = hashed(header[len(SCHEME) :].strip())
        found = [account for digest, account in self._entries if hmac.compare_digest(digest, presented)]
        if not found:
            raise Unauthenticated("authorization: the token is not known here")
        return found[0]

    def _renew(self) -> None:
        try:
            if (stamp := self._stamp_now()) != self._stamp:
                self._stamp = stamp
                self._entries = self._load()
                log.info("tokens: read again")
        except ConfigError as error:
            log.error("%s; those before stay", error)

    def _stamp_now(self) -> tuple[int, int, int]:
        try:
            stat = self._path.stat()
        except OSError as error:
            raise ConfigError(f"{self._knob}: {self._path}: {error.strerror}") from None
        return stat.st_ino, stat.st_size, stat.st_mtime_ns

    def _load(self) -> list[tuple[str, Account]]:
        try:
            entries = _ENTRIES.validate_python(yaml.safe_load(self._path.read_text()))
        except OSError as error:
            raise ConfigError(f"{self._knob}: {self._path}: {error.strerror}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self._knob}: {self._path}: no YAML: {error}") from None
        except ValidationError as error:
            fault = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, fault["loc"])) or "the file"
            raise ConfigError(f"{self._knob}: {self._path}: {place}: {fault['msg']}") from None
        names = [entry.name for entry in entries]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"{self._knob}: {self._path}: name: {', '.join(sorted(twice))} is there twice")
        return [(entry.sha256, Account(entry.name, entry.max_in_flight, entry.tokens_per_minute)) for entry in entries]


def hashed(token: str) -> str:
    """Tokens are drawn at random, so a plain hash cannot be searched for them."""
    return hashlib.sha256(token.encode()).hexdigest()


def new_token(name: str) -> tuple[str, str]:
    """Returns a fresh token and the entry for the file. Raises ConfigError for a name that the file cannot have."""
    if re.fullmatch(NAME, name) is None:
        raise ConfigError(f"name: {name[:64]!r} is not 1 to 64 letters, digits or any of _ . @ -")
    token = secrets.token_urlsafe(TOKEN_BYTES)
    return token, f"- name: {name}\n  sha256: {hashed(token)}\n"
