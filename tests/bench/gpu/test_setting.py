"""Tests which GPU a process of the check is shown."""

import os

import pytest

from bench.gpu.setting import VISIBLE, Setting


def test_a_process_sees_one_of_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "2,3")
    Setting(rehearsal=False, seed=1, gpus=("GPU-a", "GPU-b")).see_only(1)
    assert os.environ[VISIBLE] == "GPU-b"


def test_where_there_is_one_gpu_the_environment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice of a GPU is not named by the UUID of the GPU."""
    monkeypatch.setenv(VISIBLE, "MIG-a")
    Setting(rehearsal=False, seed=1, gpus=("GPU-a",)).see_only(0)
    assert os.environ[VISIBLE] == "MIG-a"
