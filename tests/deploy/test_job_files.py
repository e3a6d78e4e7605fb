"""The job files run a valid configuration, and their limits leave room for its engines and time for its drain."""

import json
import re
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.cli import DRAIN_S
from cluster.config import ClusterConfig, load
from cluster.cores import with_threads
from cluster.ray_address import STOP_S

ROOT = Path(__file__).parents[2]


def options(arguments: list[str], name: str) -> list[str]:
    """Values of an option that may be given several times."""
    return [value for flag, value in pairwise(arguments) if flag == name]


@pytest.fixture(scope="module")
def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / "deploy" / "ray_job.yaml").read_text()))


@pytest.fixture(scope="module")
def job(documents: list[dict[str, Any]]) -> dict[str, Any]:
    spec: dict[str, Any] = documents[0]["spec"]
    return spec


@pytest.fixture(scope="module")
def head(job: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = job["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    return spec


@pytest.fixture(scope="module")
def arguments(job: dict[str, Any]) -> list[str]:
    return shlex.split(job["entrypoint"])


@pytest.fixture(scope="module")
def config(arguments: list[str]) -> ClusterConfig:
    return load(ROOT / options(arguments, "--config")[0], options(arguments, "--set"))


def test_the_entrypoint_opens_the_ports_that_the_pod_and_the_service_name(
    arguments: list[str], config: ClusterConfig, head: dict[str, Any], documents: list[dict[str, Any]]
) -> None:
    assert arguments[:4] == ["python", "-m", "cluster", "serve"]
    named = {port["name"]: port["containerPort"] for port in head["containers"][0]["ports"]}
    router = config.router
    assert tuple(router.ports) == (named["grpc"], named["http"], named["metrics"], 50052)
    assert router.admin_host == "127.0.0.1"  # by `kubectl exec`, as nobody is asked for a token
    assert (router.grpc_host, router.http_host, router.metrics_host) == ("0.0.0.0", "0.0.0.0", "0.0.0.0")
    service = documents[1]["spec"]
    labels = documents[0]["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["metadata"]["labels"]
    assert service["selector"].items() <= labels.items()
    assert {port["targetPort"] for port in service["ports"]} <= named.keys()


def test_the_drain_ends_before_ray_and_the_kubelet_lose_patience(
    job: dict[str, Any], arguments: list[str], head: dict[str, Any]
) -> None:
    (drain_s,) = map(float, options(arguments, "--drain-s"))
    stop_wait_s = int(yaml.safe_load(job["runtimeEnvYAML"])["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"])
    assert drain_s == DRAIN_S
    assert drain_s + STOP_S <= stop_wait_s < head["terminationGracePeriodSeconds"]
    assert head["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1] == job["jobId"]


def test_every_submission_that_people_copy_leaves_time_for_the_drain() -> None:
    for path in (ROOT / "README.md", ROOT / "deploy" / "ray_job.yaml"):
        (submission,) = re.findall(r"^[$#] +ray job submit .*", path.read_text(), re.MULTILINE)
        (runtime_env,) = options(shlex.split(submission.rstrip("\\")), "--runtime-env-json")
        assert int(json.loads(runtime_env)["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) >= DRAIN_S + STOP_S, path


def test_engines_and_their_memory_fit_into_the_pod(
    job: dict[str, Any], config: ClusterConfig, head: dict[str, Any]
) -> None:
    container = head["containers"][0]
    num_cpus = int(container["resources"]["limits"]["cpu"])
    config = with_threads(config, num_cpus)
    assert sum(pool.replicas * pool.threads for pool in (config.prefill, config.decode)) <= num_cpus
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    (shared,) = [volume["emptyDir"]["sizeLimit"] for volume in head["volumes"] if mounts[volume["name"]] == "/dev/shm"]
    object_store_bytes = int(job["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]["object-store-memory"])
    assert (
        config.prefill.replicas * config.prefill.engine.kv_cache_bytes + object_store_bytes
        < int(shared.removesuffix("Gi")) * 1024**3
    )
    assert config.model is not None and config.model.startswith(f"{mounts['models']}/")


def test_four_gpus_are_four_engines() -> None:
    config = load(ROOT / "deploy" / "4xh100.yaml")
    assert [(pool.replicas, pool.num_gpus) for pool in (config.prefill, config.decode)] == [(2, 1), (2, 1)]
    assert config.model is not None and (ROOT / config.model / "config.json").is_file()
    for pool in (config.prefill, config.decode):  # a step is launched while one runs, so no step drafts
        assert pool.engine.async_scheduling and pool.engine.num_speculative_tokens == 0
