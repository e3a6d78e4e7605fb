"""The generated code of the gRPC contract is up to date."""

import importlib.metadata
from pathlib import Path

import pytest

from twopass.proto import generate, twopass_pb2_grpc

PINNED = twopass_pb2_grpc.GRPC_GENERATED_VERSION


def test_committed_code_is_what_the_compiler_writes(tmp_path: Path) -> None:
    if importlib.metadata.version("grpcio-tools") != PINNED:
        pytest.skip(f"grpcio-tools is not {PINNED}, the version the committed code was made with")
    generate.generate(tmp_path)
    committed = Path(generate.__file__).parent
    written = sorted(path.name for path in (tmp_path / "twopass" / "proto").iterdir())
    assert written == ["twopass_pb2.py", "twopass_pb2.pyi", "twopass_pb2_grpc.py"]
    for name in written:
        assert (tmp_path / "twopass" / "proto" / name).read_text() == (committed / name).read_text(), (
            f"{name}: run {generate.__name__}"
        )
