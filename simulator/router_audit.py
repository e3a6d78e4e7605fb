"""One life of the router, counted from outside and compared with its own counters. Checks I9 (requests that can never
fit), I10 (counters) and I12 (the path of a request).
"""

from collections import Counter
from typing import NamedTuple

from protocol.block_hash import chain_hashes, root_hash
from protocol.clock import VirtualClock
from protocol.errors import InvalidRequest, RequestError, RequestFailed
from protocol.messages import Address, EngineRequest, Envelope, Hello, StepTokens
from router.request import Ended
from router.router import Router
from simulator.replica import LAYOUT
from simulator.scenario import Client, Scenario
from simulator.violation import Violation

ROUNDING_S = 1e-6


class _Attempt(NamedTuple):
    """The newest attempt of a request."""

    number: int
    decode: Address
    colocated: bool


class RouterAudit:
    """Every method raises Violation if an invariant does not hold."""

    def __init__(self, scenario: Scenario, clock: VirtualClock, router: Router) -> None:
        self._scenario, self._clock, self._router = scenario, clock, router
        self._counted: Counter[str] = Counter()
        """What was counted, by the name of the router's own counter. The router has `attempts` only in two parts."""
        self._accepted_at: dict[str, float] = {}
        """When each open request was accepted, by request id."""
        self._due_at: dict[str, float] = {}
        """The deadline of each open request that has one, by request id."""
        self._request_numbers: dict[int, str] = {}
        """Request id by request number."""
        self._attempts: dict[str, _Attempt] = {}
        """The newest attempt by request id."""
        self._prefill_greeted = False
        """True once the router has heard of a prefill engine."""
        self._decode_spoke: set[tuple[str, int]] = set()
        """(request id, attempt) of attempts for which the decode engine has sent tokens."""

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            raise Violation(self._scenario.seed, self._clock.now, what)

    # ---- at the client's border

    def accepted(self, client: Client) -> None:
        name = client.request.request_id
        self._require(self._fits(client), f"I9: {name} was accepted and can never fit")
        self._accepted_at[name] = self._clock.now
        if client.request.deadline_s is not None:
            self._due_at[name] = self._clock.now + client.request.deadline_s
        self._counted.update(accepted=1, prompt_tokens=len(client.request.prompt_token_ids))

    def refused(self, client: Client, error: RequestError) -> None:
        if isinstance(error, InvalidRequest):
            self._require(not self._fits(client), f"I9: {client.request.request_id} fits and was refused: {error}")

    def _fits(self, client: Client) -> bool:
        """True if the engines of its path could ever hold the request, computed from the scenario alone."""
        scenario, request = self._scenario, client.request
        num_prompt, max_len = len(request.prompt_token_ids), scenario.decode.max_model_len
        if not 0 < num_prompt < max_len:
            return False
        mode, prefill, decode = scenario.router.disaggregation, scenario.prefill, scenario.decode
        num_tokens = num_prompt + min(request.max_tokens or 0, max_len - num_prompt) - 1
        colocated, split = (num_prompt <= pool.max_prompt_tokens(pool.num_blocks) for pool in (decode, prefill))
        if num_tokens > (decode.num_blocks - 1) * decode.block_size:
            return False
        if mode == "strict":
            return split and num_tokens <= min((prefill.num_blocks - 1) * prefill.block_size, prefill.max_model_len - 1)
        return colocated or (split and self._prefill_greeted and mode == "auto")

    def ended(self, client: Client, event: Ended, num_delivered: int) -> None:
        """I10: a request's stages add up to its time, and it is billed for the tokens that came. I12: its path is the
        one that it took.
        """
        name, counted = client.request.request_id, self._counted
        seconds, booked = self._clock.now - self._accepted_at.pop(name), sum(event.stages.values())
        self._due_at.pop(name, None)
        adds_up = abs(booked - seconds) < ROUNDING_S and min(event.stages.values(), default=0.0) > -ROUNDING_S
        self._require(adds_up, f"I10: {name} took {seconds:.6f} s, its stages say {booked:.6f}: {event.stages}")
        num_tokens = event.usage.completion_tokens
        self._require(
            num_tokens == num_delivered,
            f"I10: {name} is billed {num_tokens} tokens, {num_delivered} came",
        )
        num_cached, num_prompt = event.usage.cached_tokens, len(client.request.prompt_token_ids)
        self._require(
            num_cached < num_prompt or not num_cached,
            f"I10: {num_cached} of the {num_prompt} prompt tokens of {name} were cached",
        )
        counted.update(delivered_tokens=num_tokens, attempts=event.attempts)
        if event.error is not None:
            tried = not isinstance(event.error, RequestFailed) or event.attempts >= self._scenario.router.max_attempts
            self._require(tried, f"{name} failed after {event.attempts} attempts: {event.error}")
            return
        last = self._attempts[name]
        split = "disaggregated" if (name, last.number) in self._decode_spoke else "prefill_only"
        path = "colocated" if last.colocated else split
        self._require(event.path == path, f"I12: {name} ran {path}, the router says {event.path}")

    def ticked(self) -> None:
        """I4: the router has looked at all deadlines, wherever their requests are."""
        late = [name for name, due_at in self._due_at.items() if due_at < self._clock.now]
        self._require(not late, f"I4: the deadlines of {late} have passed unseen")

    # ---- at the wire

    def dispatched(self, receiver: Address, message: EngineRequest) -> None:
        name = message.key.request_id
        if message.role == "prefill":
            self._counted["disaggregated"] += 1
            self._require(
                self._scenario.router.disaggregation != "colocated",
                f"I12: {name} is disaggregated, and disaggregation is colocated",
            )
            return
        if message.role == "colocated":
            self._counted["colocated"] += 1
            self._check_fallback(receiver, message)
        self._request_numbers[message.request_number] = name
        self._attempts[name] = _Attempt(message.key.attempt, receiver, message.role == "colocated")

    def _check_fallback(self, receiver: Address, message: EngineRequest) -> None:
        """I12: a decode engine serves a request colocated only because it was asked to, because the prompt is short
        there, or because no other engine can.
        """
        config, num_tokens = self._scenario.router, len(message.prompt_token_ids)
        if config.disaggregation == "colocated":
            return
        short = config.min_disaggregated_tokens
        if short and num_tokens - self._num_cached(receiver, message) < short:
            return
        prefill = [r for r in self._router.replicas() if r.hello.role == "prefill"]
        pool = self._scenario.prefill
        longest = pool.max_prompt_tokens(pool.num_blocks)
        if message.offset:
            longest = min((pool.num_blocks - 1) * pool.block_size, pool.max_model_len - 1)
        able = [r for r in prefill if r.state == "up"] if num_tokens <= longest else []
        reason = config.disaggregation == "auto" and not able
        self._require(
            reason, f"I12: {message.key.request_id} falls back to {receiver.replica_id} colocated without a reason"
        )

    def _num_cached(self, receiver: Address, message: EngineRequest) -> int:
        """Tokens of the prompt that the decode engine holds already, as its statuses told the router."""
        size = self._scenario.decode.block_size
        shown = next(r for r in self._router.replicas() if r.address == receiver).hashes
        hashes = chain_hashes(root_hash(LAYOUT, message.cache_salt), message.prompt_token_ids, size)
        return size * next((index for index, name in enumerate(hashes) if name not in shown), len(hashes))

    def hears(self, envelope: Envelope) -> None:
        """The router is about to handle a message."""
        message = envelope.message
        if not isinstance(message, StepTokens) or message.router_epoch != self._router.address.epoch:
            return
        for request_number, number in zip(message.request_numbers.tolist(), message.attempts.tolist(), strict=True):
            name = self._request_numbers[request_number]
            if self._attempts[name].number == number and self._attempts[name].decode == envelope.sender:
                self._decode_spoke.add((name, number))

    def heard(self, envelope: Envelope) -> None:
        """The router has handled a message. It ignores the greeting of an engine that is dead by then."""
        message = envelope.message
        if isinstance(message, Hello) and message.role == "prefill":
            self._prefill_greeted |= any(replica.address == envelope.sender for replica in self._router.replicas())

    # ---- the end

    def check(self) -> None:
        """At the end of the router's life, or of the run, the router's counters must say what happened."""
        told, counted, num_open = self._router.counters, self._counted, self._router.num_open
        for name in ("accepted", "prompt_tokens", "disaggregated", "colocated"):
            self._require(
                told[name] == counted[name], f"I10: the router counts {told[name]:g} {name}, {counted[name]} were"
            )
        self._require(
            num_open == len(self._accepted_at),
            f"I10: the router has {num_open} open requests, {len(self._accepted_at)} are",
        )
        if not num_open:
            for name, count in (
                ("delivered_tokens", told["delivered_tokens"]),
                ("attempts", told["disaggregated"] + told["colocated"]),
            ):
                self._require(count == counted[name], f"I10: the router counts {count:g} {name}, {counted[name]} were")
