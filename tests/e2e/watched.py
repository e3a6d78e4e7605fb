"""A deployment in the test's own process that is watched, as `twopass serve` does."""

import threading
from queue import SimpleQueue

from cluster.serve import Deployment
from tests.hang import HANG_S
from twopass import Client


class Running:
    """A deployment, a thread that watches it, and a client of it."""

    def __init__(self, deployment: Deployment, events: "SimpleQueue[str]") -> None:
        self.deployment, self.events = deployment, events
        self.client = Client(f"127.0.0.1:{deployment.ports.grpc_port}", timeout_s=HANG_S)
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()

    def _watch(self) -> None:
        while not self._stopping.is_set():
            self.deployment.watch(0.05)

    def close(self) -> None:
        self._stopping.set()
        self._watcher.join()
        self.client.close()


def await_idle(deployment: Deployment) -> None:
    """Waits until every engine has sent its `Hello` and then two statuses that say it is idle. Between the two it has
    checked that all its blocks are free.
    """
    num_engines = deployment.config.prefill.replicas + deployment.config.decode.replicas
    first: dict[str, int] = {}
    while True:
        loads = deployment.loads()
        for load in loads:
            status = load.status
            if (
                load.in_flight == 0
                and status is not None
                and status.num_waiting + status.num_running + status.num_leases == 0
            ):
                first.setdefault(load.address.replica_id, status.seq)
        settled = [
            load
            for load in loads
            if load.status and load.status.seq > first.get(load.address.replica_id, load.status.seq) + 1
        ]
        if len(settled) == num_engines:
            return
