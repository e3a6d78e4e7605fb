"""A private Ray has the processes that a deployment needs, and no others."""

import os
import subprocess
import sys
from concurrent.futures import wait

import pytest

from cluster import private_ray
from cluster.ray_cluster import RayCluster
from cluster.ray_parts import PrivateParts

# isort: split
import ray
from ray._private import node

from tests.e2e.leftovers import descendants, none_left

NEEDED = ("/gcs_server ", "/raylet ", "sleep infinity", "default_worker.py", "ray::")


def test_the_parts_of_a_ray_that_starts_at_once_are_watched() -> None:
    cluster = RayCluster("twopass-test-quick", "twopass-test-quick-")

    def until_it_has_started() -> None:
        assert cluster._call is not None
        wait([cluster._call])

    try:
        cluster.open(num_cpus=1, num_gpus=0, meanwhile=until_it_has_started)
        assert isinstance(cluster._parts, PrivateParts)
        assert sorted(name for name, _ in cluster._parts._found.values()) == ["gcs_server", "raylet"]
    finally:
        cluster.close()


def test_a_private_ray_starts_no_process_that_nobody_asks() -> None:
    cluster = RayCluster("twopass-test-lean", "twopass-test-lean-")
    before = descendants(os.getpid())
    with none_left():
        try:
            cluster.open(num_cpus=2, num_gpus=0)
            started = [command for pid, command in descendants(os.getpid()).items() if pid not in before]
        finally:
            cluster.close()
    assert [command for command in started if not any(part in command for part in NEEDED)] == []
    assert sum("/raylet " in command for command in started) == 1
    assert sum(command.startswith("sleep ") for command in started) == 2  # the raylet ends if it has no agents


@pytest.mark.parametrize(("version", "lean"), [("2.60.0", True), ("2.99.0", False)])
def test_a_ray_that_was_not_tried_starts_all_of_its_own(
    monkeypatch: pytest.MonkeyPatch, version: str, lean: bool
) -> None:
    nodes: list[object] = []
    monkeypatch.setattr(ray, "__version__", version)
    monkeypatch.setattr(ray, "init", lambda **options: nodes.append(node.Node))
    private_ray.start()
    assert [kind is private_ray._LeanNode for kind in nodes] == [lean]


FAILING = """
from cluster.ray_cluster import RayCluster

def fail():
    raise ValueError("while it starts")

cluster = RayCluster("twopass-test-fails", "twopass-test-fails-")
try:
    cluster.open(num_cpus=1, num_gpus=0, meanwhile=fail)
except ValueError as error:
    cluster.close()
    print(error)
"""


def test_an_error_of_what_is_done_while_it_starts_ends_it() -> None:
    with none_left():
        result = subprocess.run([sys.executable, "-c", FAILING], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "while it starts\n"), result.stderr
