"""Checks and measures this machine's GPU with the project's own kernels, runner and transports: `python
deploy/gpu_check.py --json FILE`.

Needs torch, Triton, numpy, safetensors and one NVIDIA GPU; no installation, no network; under 8 minutes. `--rehearse`
walks the same path without a GPU. docs/gpu/README.md says what the sections are.
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    if "--rehearse" in sys.argv:
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported
        os.environ.setdefault(
            "OMP_NUM_THREADS", "1"
        )  # torch likewise: several engines at once would fight for the cores
    from bench.gpu.run import main

    sys.exit(main())
