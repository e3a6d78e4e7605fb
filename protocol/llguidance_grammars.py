"""Grammars as llguidance compiles them. Nothing else imports that library.

All limits are llguidance's own or tighter: they bound what a grammar may cost, in memory and per token. What exceeds
them while an answer is written is an error of that answer. Compiling releases the interpreter's lock, as computing a
mask does, and took 0.6 s at worst in trials; so it belongs into a thread.

Between the parts of a JSON text one blank may stand and no more: a small model that may write whitespace for ever does.
"""

import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path

import llguidance
import numpy as np

from protocol.arrays import Int32
from protocol.errors import TwopassError
from protocol.grammar import Grammar

LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    step_max_items=25_000,
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
MAX_ERROR_CHARACTERS = 300
NUM_CHECKED = 256
"""Refusals and approvals that a process remembers."""


class GrammarError(TwopassError):
    """The grammar cannot be compiled, or the answer cannot go on under it. The text is for the client."""


@functools.lru_cache(maxsize=NUM_CHECKED)
def fault(grammar: Grammar) -> str:
    """Why no answer can be written under the grammar; "" if nothing speaks against it. It needs no model: bytes are the
    tokens."""
    try:
        Matcher(compile_grammar(grammar, _bytes())).allowed()
    except GrammarError as error:
        return str(error)
    return ""


def load_tokenizer(model_dir: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> llguidance.LLTokenizer:
    """Takes about half a second. `vocab_size`: how many logits the model has. Raises GrammarError."""
    try:
        text = (model_dir / "tokenizer.json").read_text(encoding="utf-8")
        return llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_token_ids))
    except Exception as error:  # the library raises nothing narrower
        raise GrammarError(f"the model's tokenizer does not serve for grammars: {error}") from error


def compile_grammar(grammar: Grammar, tokenizer: llguidance.LLTokenizer) -> llguidance.LLMatcher:
    """A matcher at the beginning of an answer, to copy. Raises GrammarError."""
    matcher = llguidance.LLMatcher(tokenizer, _source(grammar), log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise GrammarError(_shown(matcher.get_error()))
    return matcher


class Matcher:
    """One answer's place in its grammar. One thread at a time may use it."""

    def __init__(self, compiled: llguidance.LLMatcher) -> None:
        self._matcher = compiled.deep_copy()
        self._taken: list[int] = []
        """The answer's tokens so far."""

    def follow(self, token_ids: Int32) -> bool:
        """Goes to the place behind these tokens of the answer, int32 [n], from wherever it was. Returns False if the
        grammar does not allow one of them; it stays before the first such token.
        """
        known, taken = token_ids.tolist(), self._taken
        common = 0
        if known[: len(taken)] == taken:
            common = len(taken)
        else:
            while common < min(len(known), len(taken)) and known[common] == taken[common]:
                common += 1
        if common < len(taken):
            self._matcher.rollback(len(taken) - common)
        count = self._matcher.try_consume_tokens(known[common:])
        self._taken = known[: common + count]
        return len(self._taken) == len(known)

    def allowed(self) -> Int32:
        """Which tokens may come next, a bit for each: int32 [ceil(vocab_size / 32)], the lowest bit first. Raises
        GrammarError if there is none or a limit is exceeded.
        """
        bits: Int32 = np.frombuffer(self._matcher.compute_bitmask(), np.int32)
        if self._matcher.is_error():
            raise GrammarError(_shown(self._matcher.get_error()))
        if not bits.any():
            raise GrammarError("no token is allowed here")
        return bits


@functools.cache
def _bytes() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer("byte")


def _source(grammar: Grammar) -> str:
    """The grammar in llguidance's own form. Raises GrammarError."""
    if grammar.kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "choice":
        choices = json.loads(grammar.text)
        return llguidance.LLMatcher.grammar_from_regex("|".join(map(_escaped, choices)))
    schema = '{"type": "object"}' if grammar.kind == "json_object" else grammar.text
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(
            schema, overrides={"whitespace_flexible": False, "whitespace_pattern": " ?", "lenient": False}
        )
    except ValueError as error:
        raise GrammarError(_shown(str(error))) from None


def _escaped(text: str) -> str:
    """A regular expression of Rust's kind for the text itself."""
    return re.sub(r"[\\.+*?()|\[\]{}^$#&\-~]", r"\\\g<0>", text)


def _shown(error: str) -> str:
    line = " ".join(error.replace("<non-verbose/>", "").replace("NoExtensionBias", "no text satisfies it").split())
    return line if len(line) <= MAX_ERROR_CHARACTERS else f"{line[:MAX_ERROR_CHARACTERS]}..."
