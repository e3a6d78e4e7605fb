"""What all tests share: one Hypothesis profile, the small real model, and which tests may run side by side."""

import jit.openmp  # noqa: F401  before torch

# isort: split
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from cluster.fetch import demo_model_dir
from protocol.errors import ModelError

settings.register_profile("twopass", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("twopass")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """SmolLM2-135M-Instruct, fetched once into the cache folder. If that fails, the test is skipped, except in CI."""
    try:
        return demo_model_dir(print)
    except ModelError as error:
        if "CI" in os.environ:
            raise
        pytest.skip(str(error))


ALONE = (
    "tests/bench",
    "tests/cluster/test_private_folder.py",
    "tests/deploy",
    "tests/e2e",
    "tests/kv_transfer",
    "tests/simulator/test_fault_schedules.py",
)
"""Tests that must run one after the other: they start deployments, take every core, or look at what processes leave."""


class TwoLanes(LoadScopeScheduling):  # type: ignore[misc]
    """One process runs the tests in `ALONE`; the other one takes the remaining files in turn."""

    def _split_scope(self, nodeid: str) -> str:
        return "alone" if nodeid.startswith(ALONE) else nodeid.partition("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> TwoLanes:
    return TwoLanes(config, log)
