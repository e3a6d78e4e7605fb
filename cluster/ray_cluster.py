"""Joins a given Ray or starts a private one, and bounds every wait for it: once a part has died, no call hangs."""

import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

# This module must be imported before Ray: it sets variables that Ray reads when it is imported.
from cluster.ray_address import GcsAddress, given_address, is_given

# isort: split
import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from cluster import private_ray
from cluster.keeper import Keeper
from cluster.ray_handles import Actor, PrivateFolder, actor_name
from cluster.ray_parts import GivenPart, GivenParts, Parts, PrivateParts
from cluster.stop_request import STOP_SIGNALS
from protocol.errors import CapacityError, ClusterLost, StartupError
from protocol.messages import Address

_LOOPBACK = "127.0.0.2"
"""Ray replaces 127.0.0.1 by an outward address, but keeps any other address of the loopback network."""
_OBJECT_STORE_BYTES = 80 * 1024 * 1024
"""Size of Ray's object store, close to its minimum: messages are small, and KV does not travel through it."""
_PRIVATE_TIMEOUT_S = 15.0
"""Longest wait for a place in a private Ray, which does not grow."""
_CALL_TIMEOUT_S = 60.0
"""Longest wait for Ray itself to do something."""
_LEAVE_TIMEOUT_S = 2.0
"""Longest wait for Ray's client to leave a private Ray before that Ray is ended."""
_CONNECT_TIMEOUT_S = 10.0
"""Longest wait for a start of Ray that was interrupted, before that Ray is ended."""
_CLOSE_TIMEOUT_S = 10.0
"""Longest wait for Ray's client to close (it takes 5 s where the GCS is gone), and then for the keeper."""
_GIVEN_TIMEOUT_S = 1.0
"""Longest wait for the keeper where a given Ray ends the engines. The keeper then goes on alone."""
_START_TIMEOUT_S = 120.0
"""Longest start of a private Ray. Ray mostly gives up earlier by itself, but not always."""
_CHECK_S = 0.25
"""Interval at which the parts of Ray are looked at while something is waited for."""


class Bundle(NamedTuple):
    """The CPUs and GPUs that one engine takes of a machine."""

    num_cpus: int
    num_gpus: int


class RayCluster:
    """The Ray that a deployment runs in: its own, in a private folder, or the one that `RAY_ADDRESS` names.

    One thread makes all calls to Ray. Such a call can take minutes when a part of Ray is gone, and an exception from a
    signal handler must not interrupt `ray.init`; a caller that waits for the thread can still be interrupted. The
    processes of a private Ray are children of that thread: the kernel ends them with it. They inherit its signal mask,
    so a signal to the process group or to the whole cgroup stops none of them.
    """

    def __init__(self, namespace: str, prefix: str) -> None:
        """`prefix` begins the names of the deployment's files in shared memory."""
        self._namespace, self._prefix = namespace, prefix
        self._thread = ThreadPoolExecutor(
            1, "ray", initializer=signal.pthread_sigmask, initargs=(signal.SIG_BLOCK, STOP_SIGNALS)
        )
        self._begun = False
        self._call: Future[Any] | None = None
        """The last call that `do` has made."""
        self._kept = threading.Event()
        """Set once the keeper has started, or has failed to."""
        self._keeper: Keeper | None = None
        self.folder: PrivateFolder | None = None
        """The folder of the private Ray; None for a given Ray, which is not ended here."""
        self._parts: Parts = GivenParts(())
        self._opened = False
        self._group: PlacementGroup | None = None
        self._bundles: Sequence[Bundle] = ()

    def open(self, *, num_cpus: int, num_gpus: int, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Joins the given Ray, or starts a private one with `num_cpus` (declared, not enforced) and, if `num_gpus` is
        not 0, this machine's GPUs. While a private one starts, the caller's thread calls `meanwhile`, during which no
        signal is heard.

        Raises ConfigError, StartupError, CapacityError, ClusterLost. The caller must call `close` in any case.
        """
        given = given_address() if is_given() else None
        self._begun = True
        unblocked = set(STOP_SIGNALS) - signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            if given is not None:
                self._join(given)
            else:
                self._start_private(num_cpus, num_gpus, meanwhile)
            self._opened = True
        finally:
            if self._call is None or self._call.done():
                _take_signals_back()
                signal.pthread_sigmask(signal.SIG_UNBLOCK, unblocked)

    def place(self, bundles: Sequence[Bundle], timeout_s: float = 60.0) -> None:
        """Reserves one bundle per engine, all on one machine, because KV travels through its memory.

        Raises CapacityError if no machine has them in time. The wait is shorter for a private Ray, which does not grow.
        """
        resources = [{"CPU": num_cpus, **({"GPU": num_gpus} if num_gpus else {})} for num_cpus, num_gpus in bundles]
        self._group, self._bundles = self.do(placement_group, resources, strategy="STRICT_PACK"), bundles
        if not self.do(
            self._group.wait, min(timeout_s, _PRIVATE_TIMEOUT_S) if self.folder else timeout_s, timeout_s=2 * timeout_s
        ):
            free = self.do(ray.available_resources)
            num_cpus, num_gpus = (sum(column) for column in zip(*bundles, strict=True))
            raise CapacityError(
                f"no machine has {num_cpus} CPUs and {num_gpus} GPUs free for {len(bundles)} engines; "
                f"Ray has {free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs free in all"
            )

    def spawn(self, kind: type, address: Address, *args: object, bundle: int | None = None) -> Actor:
        """Starts an actor and returns at once; an error of its constructor comes with its first call.

        `bundle` is the index of the actor's bundle; None places it on this machine.
        """
        options: dict[str, Any] = {"name": actor_name(address), "num_cpus": 0, "max_restarts": 0, "max_task_retries": 0}
        if bundle is None:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(
                ray.get_runtime_context().get_node_id(), soft=False
            )
        else:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=bundle
            )
            options["num_cpus"], options["num_gpus"] = self._bundles[bundle]
        return Actor(address, self.do(ray.remote(kind).options(**options).remote, *args), self)

    def check(self) -> None:
        """Raises ClusterLost once a part of Ray or the keeper is dead."""
        if lost := self._parts.lost():
            raise ClusterLost(lost)
        if self._keeper is not None and not self._keeper.alive:
            raise ClusterLost("the deployment's keeper died")

    def ready(self, reference: Any, timeout_s: float) -> bool:
        """Whether the call behind `reference` ends, in success or failure, within `timeout_s`. Raises ClusterLost."""
        until = time.monotonic() + timeout_s
        while True:
            left_s = until - time.monotonic()
            done, _ = ray.wait([reference], timeout=max(0.0, min(left_s, _CHECK_S)))
            if done or left_s <= _CHECK_S:
                return bool(done)
            self.check()

    def result(self, reference: Any, timeout_s: float = 60.0) -> Any:
        """The value that a call returned. An exception of the actor is raised here as the actor raised it.

        Raises ClusterLost, and StartupError if there is no answer within `timeout_s`.
        """
        if not self.ready(reference, timeout_s):
            raise StartupError(f"an actor has not answered within {timeout_s:g} s")
        try:
            return ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None

    def do(self, function: Callable[..., Any], *args: Any, timeout_s: float = _CALL_TIMEOUT_S, **named: Any) -> Any:
        """Calls `function` in the thread that speaks to Ray. Raises ClusterLost when Ray cannot answer any more."""
        return self._result_of(self._begin(function, *args, **named), timeout_s)

    def _begin(self, function: Callable[..., Any], *args: Any, **named: Any) -> "Future[Any]":
        call = self._call = self._thread.submit(function, *args, **named)
        return call

    def _result_of(self, call: "Future[Any]", timeout_s: float) -> Any:
        until = time.monotonic() + timeout_s
        while not wait([call], _CHECK_S).done:
            if not self._opened:
                self._parts.look()
                _let_signals_in()
            self.check()
            if time.monotonic() > until:
                raise ClusterLost(f"Ray has not answered for {timeout_s:g} s")
        return call.result()

    def close(self) -> None:
        """Ends a private Ray and removes its folder; leaves a given Ray as it is. It takes seconds, whatever has died.

        If Ray's client in this process does not end in that time, the keeper stays until the process ends.
        """
        if not self._begun:
            return
        self._begun = False
        self._kept.wait(_CLOSE_TIMEOUT_S)
        if self._call is not None and (self._opened or not self._parts.lost()):
            # Ray's client ends this process if its raylet goes while the client connects.
            wait([self._call], _LEAVE_TIMEOUT_S if self._opened else _CONNECT_TIMEOUT_S)
        stuck = self._call is not None and not self._call.done()
        until = time.monotonic() + (_LEAVE_TIMEOUT_S if self.folder is not None else _CLOSE_TIMEOUT_S)
        shutdown = self._thread.submit(ray.shutdown)
        if not stuck and not self._parts.lost():
            # The wait lasts until Ray's client has left. After that `ray.shutdown` would ask the processes of a private
            # Ray to end, one after the other, and wait for each.
            while (
                not wait([shutdown], 0.02).done
                and time.monotonic() < until
                and (ray.is_initialized() or self.folder is None)
            ):
                continue
        patience_s = _CLOSE_TIMEOUT_S if self.folder is not None else _GIVEN_TIMEOUT_S
        if self._keeper is not None:
            self._keeper.clean(patience_s)
        self._thread.shutdown(wait=False)
        if wait([shutdown], 0 if stuck else _CLOSE_TIMEOUT_S).done and self._keeper is not None:
            self._keeper.end(patience_s)
        self._parts.close()
        if self.folder is not None:
            self.folder.remove()

    def _keep(self, parent: Path | None = None) -> None:
        """Makes a private folder below `parent`, if given, and starts the keeper. It runs in Ray's thread, where no
        signal comes between the two.
        """
        try:
            self.folder = PrivateFolder.create(parent) if parent else None
            self._keeper = Keeper(self._prefix, self.folder.path if self.folder else None)
        finally:
            self._kept.set()

    def _start_private(self, num_cpus: int, num_gpus: int, meanwhile: Callable[[], object]) -> None:
        self._parts = PrivateParts()
        self.do(self._keep, Path("/tmp"))
        assert self.folder is not None
        try:
            starting = self._begin(
                private_ray.start,
                namespace=self._namespace,
                num_cpus=num_cpus,
                num_gpus=None if num_gpus else 0,
                object_store_memory=_OBJECT_STORE_BYTES,
                logging_level="error",
                _node_ip_address=_LOOPBACK,
                _temp_dir=str(self.folder.path),
            )
            meanwhile()
            self._result_of(starting, _START_TIMEOUT_S)
            self._parts.look()  # a start may be too short for a look while it lasts
        except Exception as error:
            if type(error) is not Exception:
                raise
            # Ray raises a plain Exception when its own processes are not up within 30 s.
            raise CapacityError(f"Ray did not start: {error}") from error

    def _join(self, address: GcsAddress) -> None:
        self.do(self._keep)
        try:
            self.do(
                ray.init, address=str(address), namespace=self._namespace, log_to_driver=False, logging_level="error"
            )
        except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
            raise StartupError(
                f"RAY_ADDRESS: cannot join the Ray at {address}: {' '.join(str(error).split())}"
            ) from None
        self._parts = self.do(_given_parts, address)


def _take_signals_back() -> None:
    """Installs Python's handlers again. Ray's client has put its own handler before them, which aborts the process
    three seconds after SIGTERM.
    """
    if threading.current_thread() is threading.main_thread():
        for number in STOP_SIGNALS:
            handler = signal.getsignal(number)
            if handler is not None:
                signal.signal(number, handler)


def _let_signals_in() -> None:
    """Calls Python's handlers for blocked signals that are pending, even if Ray's handlers are installed meanwhile."""
    while threading.current_thread() is threading.main_thread() and (
        waiting := signal.sigpending() & set(STOP_SIGNALS)
    ):
        number = min(waiting)
        handler = signal.getsignal(number)
        if not callable(handler):
            return
        signal.sigwait({number})
        handler(number, None)


def _given_parts(address: GcsAddress) -> GivenParts:
    """The GCS at `address`, and the raylet through which this process speaks to it."""
    mine = ray.get_runtime_context().get_node_id()
    (node,) = [node for node in ray.nodes() if node["NodeID"] == mine]
    raylet = GivenPart("the raylet", node["NodeManagerAddress"], node["NodeManagerPort"])
    return GivenParts((GivenPart("the GCS", *address), raylet))
