"""How a sequence that loses its blocks gets its KV back.

There are three modes: `recompute` it here, `swap` it to host memory and back, or `remote`, a fresh prefill in the
prefill pool. The choice is a pure function of counts and measured speeds. It compares *sequence-seconds*: seconds of
delay times sequences delayed. Recomputing and copying delay every sequence that runs here; a fresh prefill elsewhere
delays the victim alone.
"""

from typing import NamedTuple

import numpy as np

from engine.config import Knob
from engine.runner import Batch, StepOutput
from protocol.preemption import PreemptionMode, PreemptionReason

REMOTE_OVERHEAD_S = 0.1
"""Estimate of what a fresh prefill takes beside computing and copying: messages, two queues, a reservation."""
_WEIGHT = 0.2
"""Weight of the newest measurement in a moving average."""


class Victim(NamedTuple):
    """The sequence that loses its blocks."""

    num_tokens: int
    """Known tokens."""
    num_computed: int
    """Tokens whose KV is computed."""
    num_blocks: int
    """Blocks that hold the computed tokens."""
    num_running: int
    """Sequences in the batch, the victim included."""


class Choice(NamedTuple):
    """The mode and why it was chosen. `host_full` and `no_room` say that the knob's own mode was not to be had,
    `unmeasured` that the choice is to learn what the mode costs.
    """

    mode: PreemptionMode
    reason: PreemptionReason


class Costs:
    """Moving averages of measured seconds: per prompt token, per decode step, and per block copied one way. An average
    is None until the first measurement.
    """

    def __init__(self) -> None:
        self.prompt_token_s: float | None = None
        self.decode_step_s: float | None = None
        self.copy_block_s: float | None = None
        self.recompute_tried = False
        """True once a victim was recomputed. One is enough to learn from: until it runs again, others that
        fit are swapped."""

    def observe(self, batch: Batch, output: StepOutput) -> None:
        """Learns from one executed step. A step without a duration teaches nothing."""
        num_copied = sum(len(pairs) for pairs in (batch.swap_out, batch.swap_in) if pairs is not None)
        if num_copied and output.swap_seconds > 0:
            self.copy_block_s = _average(self.copy_block_s, output.swap_seconds / num_copied)
        seconds = output.seconds - output.swap_seconds
        if seconds <= 0 or not len(batch.rows):
            return
        num_drafts = 0 if batch.num_drafts is None else batch.num_drafts
        num_decodes = int(np.count_nonzero(batch.num_scheduled - num_drafts == 1))
        if num_decodes == len(batch.rows):
            self.decode_step_s = _average(self.decode_step_s, seconds)
            return
        decodes_s = (self.decode_step_s or 0.0) if num_decodes else 0.0
        num_prompt_tokens = batch.num_tokens - num_decodes
        # A prompt token takes at least the step's mean: decodes that went faster than usual do not make prompts free.
        prompts_s = max(seconds - decodes_s, seconds * num_prompt_tokens / batch.num_tokens)
        self.prompt_token_s = _average(self.prompt_token_s, prompts_s / num_prompt_tokens)


def choose_mode(knob: Knob, victim: Victim, costs: Costs, *, num_host_free: int, has_room: bool) -> Choice:
    """Chooses how the victim gets its KV back. `num_host_free` host blocks are free; `has_room` says that the prefill
    pool could take the victim's known tokens now.
    """
    fits_host = victim.num_blocks <= num_host_free
    if knob == "swap":
        return Choice("swap", "configured") if fits_host else Choice("recompute", "host_full")
    if knob == "remote":
        return Choice("remote", "configured") if has_room else Choice("recompute", "no_room")
    if knob == "auto":
        return _cheapest(victim, costs, fits_host=fits_host, has_room=has_room)
    return Choice("recompute", "configured")


def _cheapest(victim: Victim, costs: Costs, *, fits_host: bool, has_room: bool) -> Choice:
    if fits_host and costs.copy_block_s is None:
        return Choice("swap", "unmeasured")
    if costs.prompt_token_s is None:
        return Choice("swap" if fits_host and costs.recompute_tried else "recompute", "unmeasured")
    copy_s = victim.num_blocks * (costs.copy_block_s or 0.0)
    price: dict[PreemptionMode, float] = {"recompute": victim.num_computed * costs.prompt_token_s * victim.num_running}
    if fits_host:
        price["swap"] = 2 * copy_s * victim.num_running
    if has_room:
        price["remote"] = REMOTE_OVERHEAD_S + victim.num_tokens * costs.prompt_token_s + copy_s
    return Choice(min(price, key=price.__getitem__), "cheapest")


def _average(before: float | None, now: float) -> float:
    return now if before is None else before + _WEIGHT * (now - before)
