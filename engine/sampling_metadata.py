"""How the tokens of each running sequence are chosen: arrays by row, shared by the scheduler's table and the runner."""

import numpy as np

from protocol.arrays import Bool, Float32, Int32, UInt64
from protocol.messages import SamplingParams

GREEDY_BELOW = 1e-5
"""Temperatures below it choose the likeliest token: dividing by them would overflow."""


class SamplingMetadata:
    """Arrays [num_rows]. A row is written when a sequence takes it, and not changed until the next sequence does."""

    def __init__(self, num_rows: int) -> None:
        self.special: Bool = np.zeros(num_rows, np.bool_)
        """Rows that need more than the likeliest token. In other rows only `temperatures`, `seeds` and `answer_bases`
        are up to date.
        """
        self.num_special = 0
        """How many sequences that run now have special rows."""
        self.temperatures: Float32 = np.zeros(num_rows, np.float32)
        self.seeds: UInt64 = np.zeros(num_rows, np.uint64)
        self.answer_bases: Int32 = np.zeros(num_rows, np.int32)
        """The token at position p of a row has index `answer_bases[row] + p` in the whole answer. If that is below 0,
        the token belongs to the prompt.
        """
        self.top_ks: Int32 = np.zeros(num_rows, np.int32)
        self.top_ps: Float32 = np.ones(num_rows, np.float32)
        self.min_ps: Float32 = np.zeros(num_rows, np.float32)
        self.presences: Float32 = np.zeros(num_rows, np.float32)
        self.frequencies: Float32 = np.zeros(num_rows, np.float32)
        self.repetitions: Float32 = np.ones(num_rows, np.float32)
        self.min_tokens: Int32 = np.zeros(num_rows, np.int32)
        self.num_logprobs: Int32 = np.full(num_rows, -1, np.int32)
        """How many likeliest tokens are reported beside the chosen one; -1 if log probabilities are not."""
        self.ending: dict[int, Int32] = {}
        """By special row, the tokens that would end its answer."""
        self.biases: dict[int, tuple[Int32, Float32]] = {}
        """By special row, token ids and what is added to their logits."""

    def put(self, row: int, params: SamplingParams, *, base: int, eos_token_ids: tuple[int, ...]) -> None:
        """A sequence takes `row`, with `base` as its entry in `answer_bases`."""
        self.temperatures[row] = params.temperature
        self.seeds[row] = (params.seed or 0) % 2**64
        self.answer_bases[row] = base
        special = (
            params.temperature >= GREEDY_BELOW
            or params.min_tokens > 0
            or params.logprobs is not None
            or bool(params.logit_bias)
        )
        special = (
            special or params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1
        )
        self.special[row] = special
        if not special:
            return
        self.num_special += 1
        self.top_ks[row], self.top_ps[row], self.min_ps[row] = params.top_k, params.top_p, params.min_p
        self.presences[row], self.frequencies[row] = params.presence_penalty, params.frequency_penalty
        self.repetitions[row], self.min_tokens[row] = params.repetition_penalty, params.min_tokens
        self.num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self.ending[row] = np.array([*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)], np.int32)
        token_ids = [token_id for token_id, _ in params.logit_bias]
        self.biases[row] = np.array(token_ids, np.int32), np.array([bias for _, bias in params.logit_bias], np.float32)

    def left(self, row: int) -> None:
        """The sequence of `row` no longer runs. Steps in flight may still read the row."""
        self.num_special -= int(self.special[row])
