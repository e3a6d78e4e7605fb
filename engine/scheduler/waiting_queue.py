"""The queue in front of the batch. Nobody overtakes in it: only its head is ever served."""

import heapq
from typing import Literal

from engine.scheduler.sequence import QueueKey, Sequence


class WaitingQueue:
    """The policy fcfs orders sequences by their `next_key` calls, preempted ones before all others. The policy priority
    puts the lowest (priority, arrival) first, and equals in the order of those calls.

    `priority_aging_s` seconds of waiting are worth one unit of priority; with 0, nobody ages. Since all age alike, the
    order by priority - waited / aging never changes while they wait, and `priority + arrival / aging` gives it.
    """

    def __init__(self, policy: Literal["fcfs", "priority"], priority_aging_s: float) -> None:
        self._by_priority = policy == "priority"
        self._aging_s = priority_aging_s
        self._heap: list[tuple[QueueKey, Sequence]] = []
        self._num_keys = 0
        self._num_preempted = 0

    def __len__(self) -> int:
        return len(self._heap)

    def next_key(self, sequence: Sequence) -> QueueKey:
        """The place of a new sequence; no two are equal. Under the policy priority it also decides who is evicted."""
        self._num_keys += 1
        if not self._by_priority:
            return (float(self._num_keys), 0.0, 0)
        request = sequence.request
        urgency = request.priority + (request.arrival / self._aging_s if self._aging_s else 0.0)
        return (urgency, request.arrival, self._num_keys)

    def push(self, sequence: Sequence) -> None:
        """The sequence joins at the place of its key."""
        sequence.stage = "waiting"
        heapq.heappush(self._heap, (sequence.queue_key, sequence))

    def push_preempted(self, sequence: Sequence) -> None:
        """The sequence joins before all others (fcfs) or at the place of its key (priority)."""
        if not self._by_priority:
            self._num_preempted += 1
            sequence.queue_key = (-float(self._num_preempted), 0.0, 0)
        self.push(sequence)

    def head(self) -> Sequence | None:
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Sequence:
        return heapq.heappop(self._heap)[1]

    def discard(self, sequence: Sequence) -> None:
        """The sequence leaves, wherever it stands."""
        self._heap = [entry for entry in self._heap if entry[1] is not sequence]
        heapq.heapify(self._heap)

    def in_order(self) -> list[Sequence]:
        """All sequences, head first."""
        return [sequence for _, sequence in sorted(self._heap)]
