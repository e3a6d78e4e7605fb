"""Writes the generated code beside twopass.proto: `python -m twopass.proto.generate [ROOT]`.

ROOT is the folder that gets `twopass/proto/*`; default: the one this package lies in. Needs grpcio-tools.
"""

import subprocess
import sys
from pathlib import Path

SOURCE_ROOT = Path(__file__).resolve().parents[2]
PROTO = "twopass/proto/twopass.proto"


def generate(root: Path = SOURCE_ROOT) -> None:
    """Generates below `root`, which must exist. Raises CalledProcessError if the compiler refuses the file."""
    outputs = [f"--{kind}={root}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", f"-I{SOURCE_ROOT}", *outputs, PROTO], check=True, cwd=SOURCE_ROOT
    )


if __name__ == "__main__":
    generate(*(Path(arg) for arg in sys.argv[1:2]))
