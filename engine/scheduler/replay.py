"""Replays a recorded load through the scheduler with made-up tokens, to see or to compare every decision.

Step t aborts the requests with `abort_step` t, adds those with `arrival_step` t, schedules and commits. Tokens are a
function of (`gen_seed`, position), so no model is needed and two schedulers can be compared step for step.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from engine.config import EngineConfig
from engine.runner import Batch, StepOutput
from engine.scheduler.outcome import Committed, Events
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequence import Request
from protocol.arrays import Int32
from protocol.messages import RequestKey, SamplingParams

Record = dict[str, Any]

VOCAB_SIZE = 32000
MASK = 2**64 - 1
TOKEN, ACCEPT, DRAFTS = 0xA5A5A5A5A5A5A5A5, 0x5EC0DE5EC0DE5EC0, 0xD4AF7D4AF7D4AF70


def mix(value: int) -> int:
    """Scrambles 64 bits as the generator splitmix64 does."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def generated_token(gen_seed: int, position: int) -> int:
    """The token that the model says at `position` of a sequence, counted from the start of the prompt."""
    return mix(((gen_seed << 32) | position) ^ TOKEN) % VOCAB_SIZE


def prompt_tokens(segments: list[dict[str, int]]) -> Int32:
    """Puts a prompt together. A segment is fresh tokens {seed, len} or a piece of another request's answer
    {gen, start, len}.
    """
    tokens: list[int] = []
    for segment in segments:
        if "seed" in segment:
            tokens.extend(mix((segment["seed"] << 32) | index) % VOCAB_SIZE for index in range(segment["len"]))
        else:
            tokens.extend(generated_token(segment["gen"], segment["start"] + index) for index in range(segment["len"]))
    return np.array(tokens, np.int32)


class TraceModel:
    """Samples, accepts and proposes as the trace prescribes."""

    def __init__(self, trace: dict[str, Any]) -> None:
        self._seeds: dict[str, int] = {request["id"]: request["gen_seed"] for request in trace["requests"]}
        self._num_drafts: int = trace.get("spec_k", 0)
        self._vary: bool = trace.get("spec_vary", False)

    def execute(self, batch: Batch) -> StepOutput:
        num_drafts = batch.num_drafts if batch.num_drafts is not None else np.zeros(len(batch.rows), np.int32)
        counts = np.zeros(len(batch.rows), np.int32)
        token_ids = np.zeros((len(batch.rows), int(num_drafts.max()) + 1), np.int32)
        for index, request_id in enumerate(batch.request_ids):
            if not batch.sample[index]:
                continue
            seed, drafts = self._seeds[request_id], int(num_drafts[index])
            position = int(batch.num_computed[index] + batch.num_scheduled[index]) - drafts
            accepted = mix(((seed << 32) | position) ^ ACCEPT) % (drafts + 1) if drafts else 0
            counts[index] = accepted + 1
            token_ids[index, : accepted + 1] = [
                generated_token(seed, position + ahead) for ahead in range(accepted + 1)
            ]
        return StepOutput(token_ids=token_ids, counts=counts)

    def propose(self, key: RequestKey, token_ids: Int32, max_num_drafts: int) -> list[int]:
        """Proposes zeros, since the drafts themselves do not matter, and ignores `max_num_drafts`, as the recorded
        implementation did.
        """
        count = self._num_drafts
        if self._vary:
            count = mix(((self._seeds[key.request_id] << 32) | len(token_ids)) ^ DRAFTS) % (count + 1)
        return [0] * count


def config_of(trace: dict[str, Any]) -> EngineConfig:
    return EngineConfig(
        max_num_batched_tokens=trace["max_num_batched_tokens"],
        max_num_seqs=trace["max_num_seqs"],
        max_model_len=trace["max_model_len"],
        block_size=trace["block_size"],
        num_blocks=trace["num_blocks"],
        enable_chunked_prefill=trace.get("chunked_prefill", True),
        long_prefill_token_threshold=trace.get("long_prefill_token_threshold", 0),
        enable_prefix_caching=trace.get("prefix_caching", True),
        scheduling_policy=trace.get("policy", "fcfs"),
        prompt_reservation="check" if trace.get("reserve_full_isl", True) else "none",
        watermark=trace.get("watermark", 0.0),
        priority_aging_s=0,
        num_speculative_tokens=trace.get("spec_k", 0),
    )


def replay(trace: dict[str, Any]) -> list[Record]:
    """Returns one record per step, until every request has ended. tests/data/scheduler/README.md lists the fields."""
    return list(_records(trace))


def _records(trace: dict[str, Any]) -> Iterator[Record]:
    model = TraceModel(trace)
    scheduler = Scheduler(config_of(trace), num_blocks=trace["num_blocks"], proposer=model)
    keys = {request["id"]: RequestKey(1, request["id"], 1) for request in trace["requests"]}
    live: set[str] = set()
    num_added = step = 0
    shown: dict[str, list[str]] = {"running": [], "waiting": []}
    while live or num_added < len(keys):
        asked = [request["id"] for request in trace["requests"] if request.get("abort_step") == step]
        aborted = [request_id for request_id in asked if request_id in live]
        for request_id in aborted:
            scheduler.abort(keys[request_id])
            live.discard(request_id)
        arrived = [request for request in trace["requests"] if request["arrival_step"] == step]
        for request in arrived:
            scheduler.add(_request(request, keys[request["id"]], num_added))
            live.add(request["id"])
            num_added += 1
        record: Record = {"t": step}
        if live:
            _fill(record, "arrived", [request["id"] for request in arrived])
            if asked:
                record["aborted"] = aborted
            _run_step(record, scheduler, model, shown, live, drafts=trace.get("spec_k", 0) > 0)
        else:
            record["idle"] = 1
        yield record
        step += 1


def _request(request: dict[str, Any], key: RequestKey, num_before: int) -> Request:
    """A request of the trace, after `num_before` others. Requests of one step arrive in the order of the list."""
    return Request(
        key=key,
        request_number=num_before,
        prompt_token_ids=prompt_tokens(request["prompt"]),
        max_tokens=request["max_tokens"],
        sampling=SamplingParams(ignore_eos=True),
        priority=request.get("priority", 0),
        arrival=float(num_before),
    )


def _fill(record: Record, name: str, value: list[Any] | dict[str, Any]) -> None:
    if value:
        record[name] = value


def _run_step(
    record: Record,
    scheduler: Scheduler,
    model: TraceModel,
    shown: dict[str, list[str]],
    live: set[str],
    *,
    drafts: bool,
) -> None:
    batch = scheduler.schedule()
    events: Events = scheduler.take_events()
    if batch is not None:
        _fill(record, "sched", [[request_id, num] for request_id, num in batch.num_scheduled_tokens().items()])
    _fill(record, "new", [[key.request_id, cached] for key, cached in events.admitted])
    _fill(record, "resumed", [[key.request_id, cached] for key, cached in events.resumed])
    _fill(record, "preempted", [key.request_id for key in events.preempted])
    if batch is not None and batch.num_drafts is not None:
        num_drafts = zip(batch.request_ids, batch.num_drafts.tolist(), strict=True)
        _fill(record, "spec", {request_id: num for request_id, num in num_drafts if num})
    record["free_s"] = scheduler.num_free_blocks
    for name, ids in (("running", scheduler.running_ids), ("waiting", scheduler.waiting_ids)):
        if shown[name] != ids or record["t"] == 0:
            record[name] = shown[name] = list(ids)
    finished = [key.request_id for key, _ in events.ended]
    if batch is not None:
        committed: Committed = scheduler.commit(model.execute(batch))
        finished += [ended.key.request_id for ended in committed.finished]
        if drafts:
            sampled = [
                request_id
                for request_id, sample in zip(batch.request_ids, batch.sample.tolist(), strict=True)
                if sample
            ]
            record["out"] = dict(zip(sampled, committed.counts.tolist(), strict=True))
    _fill(record, "finished", finished)
    live.difference_update(finished)
    record["free_u"] = scheduler.num_free_blocks


def pretty(trace: dict[str, Any], records: list[Record]) -> str:
    """The records as text: who got how many tokens, how much of the budget and of the blocks is left, who was
    evicted and why.
    """
    budget, usable = trace["max_num_batched_tokens"], trace["num_blocks"] - 1
    lines = []
    for record in records:
        if record.get("idle"):
            lines.append(f"step {record['t']}: idle")
            continue
        scheduled = record.get("sched", [])
        left = budget - sum(num for _, num in scheduled)
        lines.append(f"step {record['t']}: {left} of {budget} tokens and {record['free_s']} of {usable} blocks left")
        lines += [f"  + {request_id} arrives" for request_id in record.get("arrived", [])]
        lines += [f"  - {request_id} is aborted" for request_id in record.get("aborted", [])]
        lines += [f"  ! {reason}" for reason in _evictions(trace, record)]
        cached = {request_id: f", admitted with {num} cached" for request_id, num in record.get("new", [])}
        cached |= {request_id: f", resumed with {num} cached" for request_id, num in record.get("resumed", [])}
        for request_id, num in scheduled:
            drafts = record.get("spec", {}).get(request_id)
            lines.append(
                f"    {request_id}: {num}{f' ({drafts} drafts)' if drafts else ''}{cached.get(request_id, '')}"
            )
        lines += [f"  = {request_id} is complete" for request_id in record.get("finished", [])]
        waiting = record.get("waiting")
        if waiting:
            lines.append(f"  waiting: {' '.join(waiting)}")
    return "\n".join(lines)


def _evictions(trace: dict[str, Any], record: Record) -> list[str]:
    evicted = record.get("preempted", [])
    why = "the newest" if trace.get("policy", "fcfs") == "fcfs" else "the least urgent"
    return [
        f"{request_id} is evicted: a running request found no free block, and this is {why}" for request_id in evicted
    ]
