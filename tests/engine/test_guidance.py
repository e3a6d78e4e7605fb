"""Answers under a grammar: the mask is part of the choice, and an answer does not depend on how it is computed."""

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from engine.guidance import Guidance
from engine.models.loading import build_model
from engine.runners.drafts import accept
from engine.runners.step_plan import plan_step
from engine.runners.torch_cpu import TorchCPURunner
from engine.sampling import sample_tokens
from engine.sampling_metadata import Contexts, Masks, SamplingMetadata
from engine.scheduler.proposer import NGramProposer
from protocol.errors import TwopassError
from protocol.grammar import Grammar
from protocol.llguidance_grammars import Matcher, compile_grammar, fault, load_tokenizer
from protocol.messages import RequestKey, SamplingParams
from tests.engine.runner_driver import make_batch
from tests.engine.test_sampling_flow import BLOCK_SIZE, NUM_BLOCKS, PROMPT, Engine
from tests.engine.tiny_llama import TINY, random_tensors
from tests.hang import HANG_S
from tests.router.small_tokenizer import write_model_dir

VOCAB_SIZE, EOS = 420, 2
SCHEMA = Grammar(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "colour": {"enum": ["red", "größer", "日本"]},
                "size": {"type": "integer", "minimum": 0, "maximum": 999},
                "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
            },
            "required": ["colour", "size", "tags"],
            "additionalProperties": False,
        }
    ),
)
DIGITS = Grammar("regex", "[0-9]{3}")
ENDLESS = Grammar("regex", "(a{1,300}){1,300}")
"""Compiles, and exceeds a limit soon."""
KEY = RequestKey(8, "mine", 1)


class Served:
    """A tiny model with a tokenizer of `VOCAB_SIZE` logits, of which the last few are padding, and its guidance."""

    def __init__(self, path: Path) -> None:
        self.tokenizer: Tokenizer = write_model_dir(path)
        self.woken = threading.Semaphore(0)
        self.guidance = Guidance(path, VOCAB_SIZE, (EOS,), self.woken.release)
        config = replace(TINY, vocab_size=VOCAB_SIZE)
        self.model = build_model(config, "float32", random_tensors(config).__getitem__)

    def compile(self, key: RequestKey, grammar: Grammar) -> None:
        self.guidance.begin(key, grammar)
        assert self.woken.acquire(timeout=HANG_S)
        assert self.guidance.ended() == [(key, "")]

    def engine(self, **how: Any) -> "GuidedEngine":
        config = self.model.config
        elements = NUM_BLOCKS * config.num_layers * 2 * config.num_kv_heads * BLOCK_SIZE * config.head_dim
        cache = torch.zeros(elements).view(torch.uint8)
        runner = TorchCPURunner(self.model, cache, block_size=BLOCK_SIZE, num_threads=1, masker=self.guidance)
        return GuidedEngine(self, runner, eos=(EOS,), **how)

    def text(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))


class GuidedEngine(Engine):
    def __init__(self, served: Served, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self._served = served

    def add(self, name: str, sampling: SamplingParams, **fields: Any) -> RequestKey:
        key = super().add(name, sampling, **fields)
        if sampling.grammar is not None:
            self._served.guidance.forget(key)  # an earlier engine's
            self._served.compile(key, sampling.grammar)
        return key


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("model"))
    yield served
    served.guidance.close()


PARAMS = [
    SamplingParams(grammar=SCHEMA),
    SamplingParams(grammar=SCHEMA, temperature=1.5, seed=3),
    SamplingParams(
        grammar=SCHEMA, temperature=2.0, seed=9, top_p=0.9, repetition_penalty=1.3, frequency_penalty=0.5,
        logit_bias=((EOS, 100.0), (5, -100.0)), min_tokens=200, logprobs=5,
    ),
]  # fmt: skip


def answers(served: Served, **how: Any) -> list[list[int]]:
    """Of all `PARAMS`, and of an answer without a grammar between them. Every answer parses and ends with the token
    that ends answers."""
    engine = served.engine(**how)
    for i, params in enumerate(PARAMS):
        engine.add(f"r{i}", params, max_tokens=100)
    engine.add("free", SamplingParams(temperature=1.0, seed=4), max_tokens=20)
    engine.run()
    engine.scheduler.check_idle()
    found = [engine.answer(f"r{i}") for i in range(len(PARAMS))]
    for i, token_ids in enumerate(found):
        assert engine.reasons[f"r{i}"] == "stop" and token_ids[-1] == EOS
        value = json.loads(served.text(token_ids))
        assert value.keys() == {"colour", "size", "tags"} and 0 <= value["size"] <= 999 and len(value["tags"]) <= 3
    return [*found, engine.answer("free")]


@pytest.mark.parametrize(
    "how",
    [
        {"max_num_batched_tokens": 5},
        {"depth": 2},
        {"proposer": NGramProposer(), "num_speculative_tokens": 3},
        {"max_num_seqs": 1},
    ],
    ids=["chunks", "two in flight", "drafts", "one at a time"],
)
def test_an_answer_parses_and_does_not_depend_on_how_it_is_computed(served: Served, how: dict[str, Any]) -> None:
    assert answers(served, **how) == answers(served)


def test_a_later_attempt_and_a_preempted_sequence_go_on_where_they_were(served: Served) -> None:
    whole = answers(served)[1]
    engine = served.engine()
    engine.add("again", PARAMS[1], prompt=PROMPT + whole[:7], offset=7, max_tokens=93)
    engine.run()
    assert engine.answer("again") == whole[7:]
    scarce = served.engine(enable_prefix_caching=False)
    for i in range(4):
        scarce.add(f"r{i}", PARAMS[1], prompt=[i + 5] * 55, max_tokens=60)
    scarce.run()
    alone = served.engine()
    for i in range(4):
        alone.add(f"r{i}", PARAMS[1], prompt=[i + 5] * 55, max_tokens=60)
        alone.run()
    assert scarce.scheduler.num_recomputed_tokens > 0
    assert all(scarce.answer(f"r{i}") == alone.answer(f"r{i}") for i in range(4))


def test_the_mask_comes_before_all_else(served: Served) -> None:
    """Tokens are those of logits in which what is forbidden is -inf; logprobs are shared among what is allowed."""
    tokenizer = served.tokenizer
    digits = [token_id for token_id in range(400) if tokenizer.decode([token_id]).strip("0123456789") == ""]
    digits = [token_id for token_id in digits if 1 <= len(tokenizer.decode([token_id])) <= 3]
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(3, VOCAB_SIZE)).astype(np.float32))
    token_ids = np.zeros((3, 8), np.int32)
    tables = []
    for grammar in (DIGITS, None):
        table = SamplingMetadata(3)
        for row, temperature in enumerate((0.0, 0.0, 1.0)):
            params = SamplingParams(temperature=temperature, seed=row, logprobs=20, grammar=grammar if row else None)
            key = RequestKey(8, f"row {row}", 1)
            table.put(row, params, base=-8, eos_token_ids=(EOS,), key=key)
            if params.grammar is not None:
                served.compile(key, params.grammar)
        tables.append(table)
    contexts = Contexts(np.arange(3, dtype=np.int32), np.full(3, 8, np.int32), token_ids, np.zeros(3, np.int32))
    masks = served.guidance.masks(tables[0], contexts)
    assert masks is not None and masks.which.tolist() == [1, 2] and not masks.final.any() and not masks.errors
    masked = logits.clone()
    forbidden = [token_id for token_id in range(VOCAB_SIZE) if token_id not in digits]
    masked[1:, forbidden] = -torch.inf
    tokens, reports = sample_tokens(logits.clone(), tables[0], contexts, masks)
    expected, _ = sample_tokens(masked, tables[1], contexts)
    assert tokens.tolist() == expected.tolist() and set(tokens[1:].tolist()) <= set(digits)
    assert set(reports[1].top_token_ids) <= set(digits)
    assert sum(np.exp(reports[1].top)) == pytest.approx(1, abs=1e-5)
    assert len(reports[0].top) == 20


def test_an_answer_that_may_only_end_ends_however_long_it_should_be(served: Served) -> None:
    engine = served.engine()
    engine.add("r", SamplingParams(grammar=DIGITS, min_tokens=50), max_tokens=60)
    engine.run()
    assert len(served.text(engine.answer("r"))) == 3 and engine.reasons["r"] == "stop"


def test_a_matcher_lives_as_long_as_its_seat(served: Served) -> None:
    engine = served.engine()
    key = engine.add("r", PARAMS[0], max_tokens=100)
    batch = engine.scheduler.schedule()
    assert batch is not None and batch.sampling is not None
    engine.scheduler.commit(engine.runner.execute(batch))
    (guide,) = batch.sampling.guides.values()
    assert isinstance(guide.matcher, Matcher)
    engine.scheduler.abort(key)
    assert not batch.sampling.guides


def test_who_exceeds_a_limit_is_named_and_harms_nobody(served: Served) -> None:
    engine = served.engine()
    bad = engine.add("bad", SamplingParams(grammar=ENDLESS, min_tokens=100), max_tokens=110)
    engine.add("same grammar", SamplingParams(grammar=ENDLESS), max_tokens=2)
    engine.add("good", PARAMS[0], max_tokens=100)
    failures: list[tuple[RequestKey, str]] = []
    while not failures:
        batch = engine.scheduler.schedule()
        assert batch is not None
        output = engine.runner.execute(batch)
        if failures := engine.scheduler.failures(output):
            engine.scheduler.abort(bad)
        engine.take(engine.scheduler.commit(output))
    ((key, error),) = failures
    assert key == bad and "lexer error" in error
    engine.run()
    engine.scheduler.check_idle()
    assert set(served.text(engine.answer("bad"))) == {"a"}
    assert served.text(engine.answer("same grammar")) and json.loads(served.text(engine.answer("good")))


def test_drafts_that_the_grammar_forbids_do_not_stand(served: Served) -> None:
    """Row 0 has the drafts "1" and "x" after "2": the first is followed, nothing is asked behind the second."""
    one, two, letter = (served.tokenizer.encode(text).ids[0] for text in ("1", "2", "x"))
    table = SamplingMetadata(1)
    table.put(0, SamplingParams(grammar=DIGITS), base=-1, eos_token_ids=(EOS,), key=KEY)
    served.compile(KEY, DIGITS)
    batch = make_batch([[7, two, one, letter]], [1], [3], [[1]])
    batch.sampling, batch.num_drafts = table, np.array([2], np.int32)
    plan = plan_step(batch, BLOCK_SIZE)
    contexts = Contexts(np.zeros(3, np.int32), np.arange(2, 5, dtype=np.int32), batch.token_ids, np.zeros(3, np.int32))
    masks = served.guidance.masks(table, contexts)
    assert masks is not None and masks.which.tolist() == [0, 1] and not masks.errors
    logits = torch.zeros(3, VOCAB_SIZE)
    logits[0, one], logits[1, letter], logits[1, two] = 1.0, 2.0, 1.0
    chosen, _ = sample_tokens(logits, table, contexts, masks)
    output = accept(plan, chosen, {}, masks.errors)
    assert output.token_ids[0, : output.counts[0]].tolist() == [one, two]
    again = served.guidance.masks(table, contexts._replace(rows=contexts.rows[:1], num_known=contexts.num_known[:1]))
    assert again is not None and (again.allowed[0] == masks.allowed[0]).all()


def test_attempts_under_one_grammar_take_turns_and_share_nothing(served: Served) -> None:
    keys, other = [RequestKey(9, f"r{i}", 1) for i in range(4)], RequestKey(9, "other", 1)
    for key in keys:
        served.guidance.begin(key, ENDLESS)
    served.guidance.begin(other, DIGITS)
    served.guidance.forget(keys[1])
    told: list[RequestKey] = []
    while len(told) < 4:
        assert served.woken.acquire(timeout=HANG_S)
        for key, error in served.guidance.ended():
            assert error == ""
            told.append(key)
    assert told == [keys[0], other, keys[2], keys[3]]
    bad, good = (Matcher(served.guidance._compiled[key]) for key in keys[::2])
    answer = np.zeros(0, np.int32)
    a = served.tokenizer.encode("a").ids[0]
    with pytest.raises(TwopassError, match="lexer error"):  # noqa: PT012
        while bad.follow(answer):
            bad.allowed()
            answer = np.append(answer, np.int32(a))
    assert good.follow(answer[:1]) and good.allowed().any()
    for key in (*keys, other):
        served.guidance.forget(key)
    assert not served.guidance._asked and not {*keys, other} & served.guidance._compiled.keys()


def test_a_grammar_that_does_not_compile_says_why(served: Served) -> None:
    keys = [RequestKey(9, f"r{i}", 1) for i in range(2)]
    for key in keys:
        served.guidance.begin(key, Grammar("regex", "(a"))
    assert served.woken.acquire(timeout=HANG_S)
    told = served.guidance.ended()
    assert [key for key, _ in told] == keys and all("unclosed group" in error for _, error in told)


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (Grammar("json_object"), ""),
        (Grammar("choice", '["a.b|c", "\\"", "ü \\\\ -"]'), ""),
        (Grammar("regex", "(a"), "unclosed group"),
        (Grammar("json_schema", '{"type": "objekt"}'), "objekt"),
        (Grammar("json_schema", '{"type": "string", "format": "foo"}'), "foo"),
        (Grammar("json_schema", '{"enum": []}'), "Unsatisfiable"),
        (Grammar("json_schema", '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}'), "no text satisfies"),
        (Grammar("json_schema", "{"), "EOF"),
    ],
)
def test_faults_are_found_without_a_model(grammar: Grammar, said: str) -> None:
    assert said in fault(grammar) and bool(said) == bool(fault(grammar))


def test_choices_stand_for_themselves(tmp_path: Path) -> None:
    tokenizer = write_model_dir(tmp_path)
    choices = ["a.b|c", '"', "ü \\ -\n[x]", "a.b"]
    compiled = compile_grammar(Grammar("choice", json.dumps(choices)), load_tokenizer(tmp_path, VOCAB_SIZE, [EOS]))
    for text, stands in [*((choice, True) for choice in choices), ("axb", False), ("a.b|", True), ("a.b|d", False)]:
        matcher = Matcher(compiled)
        assert matcher.follow(np.array(tokenizer.encode(text).ids, np.int32)) is stands, text


def test_a_tokenizer_with_more_tokens_than_logits_is_refused(tmp_path: Path) -> None:
    write_model_dir(tmp_path)
    with pytest.raises(TwopassError, match="vocab size too small"):
        load_tokenizer(tmp_path, 300, [EOS])


def test_nothing_is_masked_where_nobody_has_a_grammar(served: Served) -> None:
    table = SamplingMetadata(1)
    table.put(0, SamplingParams(temperature=1.0, seed=1), base=-1, eos_token_ids=())
    none = np.zeros(1, np.int32)
    masks: Masks | None = served.guidance.masks(table, Contexts(none, none + 1, np.zeros((1, 2), np.int32), none))
    assert masks is None
