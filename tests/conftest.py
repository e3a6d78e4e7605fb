"""What all tests share: one Hypothesis profile, and the small real model."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

from cluster.fetch import demo_model_dir
from protocol.errors import ModelError

settings.register_profile("twopass", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("twopass")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """SmolLM2-135M-Instruct, fetched once into the cache folder. Where it cannot be had the test is skipped, but never in CI."""
    try:
        return demo_model_dir(print)
    except ModelError as error:
        if "CI" in os.environ:
            raise
        pytest.skip(str(error))
