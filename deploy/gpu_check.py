"""Checks and measures this machine's GPUs with the project's own kernels, runner and transports.

    python deploy/gpu_check.py --json FILE

It needs torch, Triton, numpy, safetensors and an NVIDIA GPU, but no installation and no network. It takes less than 10
minutes. `--rehearse` runs the same code without a GPU. docs/gpu/README.md describes the sections.
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    if "--rehearse" in sys.argv:
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported
        # torch reads this when it is imported. With more threads, several engines would compete for the cores.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    from bench.gpu.run import main

    sys.exit(main())
