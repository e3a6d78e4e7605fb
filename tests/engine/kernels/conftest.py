"""Kernels are interpreted in the process that runs the tests.

Triton decides that when `@triton.jit` runs, for its own library when it is first imported, so the variable is set
around that import. After it the mode is a knob of this process alone: programs that tests start inherit nothing, and
`compile_ahead.py` compiles in one of them.
"""

import sys

import pytest
import torch

assert "triton" not in sys.modules, "Triton was imported before its mode could be chosen"
with pytest.MonkeyPatch.context() as environment:
    environment.setenv("TRITON_INTERPRET", "1")
    import triton

triton.knobs.propagate_env = False
triton.knobs.runtime.interpret = True


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    torch.manual_seed(0)
