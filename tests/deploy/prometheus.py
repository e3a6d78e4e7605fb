"""Prometheus for tests: the path of its programs, and a server in a folder of its own."""

import json
import math
import os
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.hang import HANG_S

DEPLOY = Path(__file__).parents[2] / "deploy"
ALERT = r"^(.*) (==|>|<) ([0-9.]+)$"
"""Matches the expression of an alert, each of which ends in a threshold."""


@cache
def program(name: str) -> str:
    """Path of `prometheus` or `promtool`. If it is missing, root on Debian installs it. Elsewhere the test is skipped,
    except in CI, where it fails.
    """
    path = shutil.which(name)
    if path is None and os.geteuid() == 0 and shutil.which("apt-get"):
        for command in (["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", "prometheus"]):
            subprocess.run(command, capture_output=True, check=False)
        path = shutil.which(name)
    if path is None and "CI" not in os.environ:
        pytest.skip(f"{name} is not installed and cannot be: on Debian, apt-get install prometheus")
    assert path is not None, f"{name} is not installed"
    return path


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    dashboard = json.loads((DEPLOY / "grafana" / "twopass.json").read_text())
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def dashboard_expressions() -> list[tuple[str, str]]:
    """Pairs (title of the panel, expression that Grafana sends when all variables are at "All")."""
    variables = {"$__rate_interval": "1m", "$model": ".*", "$pool": ".*", "$replica": ".*"}
    found = []
    for panel in panels():
        for target in panel["targets"]:
            expression = target["expr"]
            for name, value in variables.items():
                expression = expression.replace(name, value)
            found.append((panel["title"], expression))
    return found


class Prometheus:
    """A running Prometheus server."""

    def __init__(self, port: int, process: "subprocess.Popen[bytes]") -> None:
        self._port, self._process = port, process

    def query(self, expression: str) -> list[float]:
        """Current values of all series except NaN. The list is empty while the server is starting."""
        url = f"http://127.0.0.1:{self._port}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        try:
            with urllib.request.urlopen(url, timeout=HANG_S) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            if error.code == 503:
                return []
            raise AssertionError(f"{expression}: {error.read().decode()}") from error
        except urllib.error.URLError:
            assert self._process.poll() is None, "prometheus has ended"
            return []
        values = [float(series["value"][1]) for series in answer["data"]["result"]]
        return [value for value in values if not math.isnan(value)]


@contextmanager
def running(folder: Path, target: str, port: int) -> Iterator[Prometheus]:
    """Runs a server with the shipped configuration, but with `target` ("host:port") and an interval of one second."""
    for name in ("prometheus.yml", "rules.yml"):
        shutil.copy(DEPLOY / "prometheus" / name, folder)
    config = yaml.safe_load((folder / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [program("prometheus"), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        yield Prometheus(port, process)
    finally:
        process.terminate()
        process.wait()
