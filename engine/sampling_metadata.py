"""How the tokens of each running sequence are chosen: arrays by row, shared by the scheduler's table and the runner."""

from typing import NamedTuple, Protocol

import numpy as np

from engine.grammars import Guide
from protocol.arrays import Bool, Float32, Int32, Int64, UInt64
from protocol.messages import RequestKey, SamplingParams

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
        self.guides: dict[int, Guide] = {}
        """By row whose sequence runs under a grammar."""

    def put(
        self,
        row: int,
        params: SamplingParams,
        *,
        base: int,
        eos_token_ids: tuple[int, ...],
        key: RequestKey | None = None,
    ) -> None:
        """A sequence takes `row`, with `base` as its entry in `answer_bases`. `key`: of its request; it matters only
        under a grammar.
        """
        self.temperatures[row] = params.temperature
        self.seeds[row] = (params.seed or 0) % 2**64
        self.answer_bases[row] = base
        special = (
            params.temperature >= GREEDY_BELOW
            or params.min_tokens > 0
            or params.logprobs is not None
            or bool(params.logit_bias)
            or params.grammar is not None
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
        if params.grammar is not None:
            assert key is not None
            self.guides[row] = Guide(key)
        token_ids = [token_id for token_id, _ in params.logit_bias]
        self.biases[row] = np.array(token_ids, np.int32), np.array([bias for _, bias in params.logit_bias], np.float32)

    def left(self, row: int) -> None:
        """The sequence of `row` no longer runs. Steps in flight may still read the row."""
        self.num_special -= int(self.special[row])
        self.guides.pop(row, None)  # and with it the matcher; what such a step chooses is dropped

    def too_short(self, rows: Int32, num_known: Int32, final: Bool | None) -> Bool:
        """Which of S answers must not end yet; arrays [S] as in `Contexts` and `Masks`, `final` None without masks."""
        short: Bool = self.answer_bases[rows] + num_known < self.min_tokens[rows]
        return short if final is None else short & ~final


class Contexts(NamedTuple):
    """The sequences whose next token is chosen, S of them."""

    rows: Int32
    """[S] rows of the shared arrays."""
    num_known: Int32
    """[S] tokens before the one to be chosen."""
    token_ids: Int32
    """[num_rows, max_model_len] known tokens of every row; of the last one `last` is used instead: it may not be here
    yet.
    """
    last: Int32
    """[S]"""


class Masks(NamedTuple):
    """What grammars allow, of S sequences."""

    which: Int64
    """[G] indices in S of those under a grammar."""
    allowed: Int32
    """[G, ceil(vocab / 32)] a bit for each token, the lowest first."""
    final: Bool
    """[S] True where only tokens that end the answer are allowed."""
    errors: dict[int, str]
    """By index in S, why a sequence cannot go on under its grammar. What is chosen for it must not be used."""


class Masker(Protocol):
    def masks(self, sampling: SamplingMetadata, contexts: Contexts) -> Masks | None:
        """None where no sequence has a grammar. Called for each step once, in their order."""
        ...
