"""Starts a private Ray with only those of its processes that a deployment uses: its GCS, its raylet and the workers.

`ray.init` alone also starts an API server, an autoscaler, a log monitor and two agents of the raylet: five Python
processes. Nobody asks them anything here, but `ray.init` waits for the first, and the raylet starts no worker before
its agents have said on which ports they listen. Ray has no option for that, so its class for a machine is replaced by
one that leaves them out while `ray.init` runs. That is no interface of Ray's: another Ray than those that it was tried
with starts all of its processes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

# This module must be imported before Ray: it sets variables that Ray reads when it is imported.
import cluster.ray_address  # noqa: F401

# isort: split
import ray
from ray._private import node, ray_constants, services, utils

TRIED = ("2.60.",)
"""Beginnings of the versions of Ray that start so."""
_NO_AGENT = "sleep infinity"
"""The raylet wants two agents and ends when one does. These end with the raylet, or by the keeper: the logs that they
inherit are open in them.
"""
_AGENT_OPTIONS = ("--dashboard_agent_command=", "--runtime_env_agent_command=")
_AGENT_PORTS = (
    "DASHBOARD_AGENT_LISTEN_PORT_NAME",
    "METRICS_AGENT_PORT_NAME",
    "METRICS_EXPORT_PORT_NAME",
    "RUNTIME_ENV_AGENT_PORT_NAME",
)
_NOT_SERVED = -1
"""Where the raylet looks for a port: an agent writes that too, for what it does not serve."""


def start(**options: Any) -> None:
    """Calls `ray.init` with `options` for a new Ray. Raises what it raises."""
    lean = {"Node": _LeanNode} if ray.__version__.startswith(TRIED) else {}
    with _replaced(node, **lean):
        ray.init(address="local", include_dashboard=False, log_to_driver=False, **options)


class _LeanNode(node.Node):  # type: ignore[misc]
    """Ray's head without the processes that are named above."""

    def __init__(self, ray_params: Any, **options: Any) -> None:
        ray_params.update(no_monitor=True, include_log_monitor=False)
        super().__init__(ray_params, **options)

    def start_api_server(self, **_: Any) -> None:
        self._webui_url = ""

    def start_raylet(self, *args: Any, **named: Any) -> None:
        for name in _AGENT_PORTS:
            port = getattr(ray._raylet, name)
            ray._raylet.persist_port(self._session_dir, self._node_id, port, _NOT_SERVED)
        begin = services.start_ray_process

        def without_agents(command: list[str], process_type: str, *args: Any, **named: Any) -> Any:
            if process_type == ray_constants.PROCESS_TYPE_RAYLET:
                command = [_without_agent(argument) for argument in command]
            return begin(command, process_type, *args, **named)

        # Ray imports all that a dashboard needs to find out whether its agent could serve it: a third of a second.
        with (
            _replaced(services, start_ray_process=without_agents),
            _replaced(utils, get_dashboard_dependency_error=lambda: ImportError("no dashboard is wanted")),
        ):
            super().start_raylet(*args, **named)


def _without_agent(argument: str) -> str:
    return next((option + _NO_AGENT for option in _AGENT_OPTIONS if argument.startswith(option)), argument)


@contextmanager
def _replaced(module: ModuleType, **attributes: Any) -> Iterator[None]:
    """Sets attributes of a module, and at the end sets them back."""
    before = {name: getattr(module, name) for name in attributes}
    for name, value in attributes.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
