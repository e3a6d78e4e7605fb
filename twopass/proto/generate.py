"""Writes the generated code beside twopass.proto: `python -m twopass.proto.generate [ROOT]`.

The files go to ROOT/twopass/proto; by default ROOT is the folder of this package. The command needs grpcio-tools.
"""

import subprocess
import sys
from pathlib import Path

SOURCE_ROOT = Path(__file__).resolve().parents[2]
PROTO = "twopass/proto/twopass.proto"


def generate(root: Path = SOURCE_ROOT) -> None:
    """Writes below `root`, which must exist. Raises CalledProcessError if the compiler refuses the file."""
    outputs = [f"--{kind}={root}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", f"-I{SOURCE_ROOT}", *outputs, PROTO], check=True, cwd=SOURCE_ROOT
    )


if __name__ == "__main__":
    generate(*(Path(arg) for arg in sys.argv[1:2]))
