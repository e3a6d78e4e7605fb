"""What all tests share: one Hypothesis profile, how they are divided between workers, and the small real model."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

from cluster.fetch import demo_model_dir
from protocol.errors import ModelError

settings.register_profile("twopass", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("twopass")

WITH_PROCESSES = ("bench", "cluster", "deploy", "e2e", "kv_transfer")
"""Folders whose tests start and kill processes, or look for what these left behind: `make test` gives them all to one of its workers."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A file stays together, for the fixtures of its module."""
    for item in items:
        folder = item.path.relative_to(config.rootpath / "tests").parts[0]
        item.add_marker(pytest.mark.xdist_group("processes" if folder in WITH_PROCESSES else str(item.path)))


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """SmolLM2-135M-Instruct, fetched once into the cache folder. Where it cannot be had the test is skipped, but never in CI."""
    try:
        return demo_model_dir(print)
    except ModelError as error:
        if "CI" in os.environ:
            raise
        pytest.skip(str(error))
