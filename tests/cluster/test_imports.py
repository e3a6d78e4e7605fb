"""Processes do not spend time on imports of libraries that they do not use."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("cluster.serve", "torch numba gguf router.actor engine.actor"),
        ("prefill_pool.actor, decode_pool.actor, cluster.build", "torch numba gguf tokenizers"),
        ("router.actor", "torch numba ray engine"),
        ("cluster.demo", "torch numba gguf tokenizers router.actor"),
        ("cluster.plan", "torch ray"),
        ("cluster.cli", "ray numpy"),
        # These modules measure a GPU on machines where little is installed.
        (
            "engine.runners.cuda_memory, engine.loop, prefill_pool.service, decode_pool.service",
            "ray numba pydantic yaml gguf",
        ),
    ],
)
def test_modules_load_nothing_that_they_do_not_use(module: str, absent: str) -> None:
    code = f"import sys, {module}; print(*(name for name in {absent.split()!r} if name in sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (result.stdout.strip(), result.stderr) == ("", "")
