"""How a step's budget is shared when sequences have drafts. The figures can be worked out by hand."""

import pytest

from engine.runners.arithmetic_model import expected_tokens
from protocol.arrays import Int32
from protocol.messages import RequestKey
from tests.engine.scheduler.timed_engine import Engine


class Guesses:
    """A proposer whose drafts are all right or all wrong. Prompts have 8 tokens where drafts are right."""

    def __init__(self, *, right: bool) -> None:
        self._right = right

    def propose(self, key: RequestKey, token_ids: Int32, max_num_drafts: int) -> list[int]:
        if not self._right:
            return [0] * max_num_drafts
        num_prompt = 8
        num_known = len(token_ids) - num_prompt
        return expected_tokens(token_ids[:num_prompt], num_known + max_num_drafts)[num_known:]


def test_num_speculative_tokens_saves_steps_when_right_and_eats_budget_when_wrong() -> None:
    num_steps, prompt_tokens = {}, {}
    for name, count, right in (("off", 0, True), ("right", 4, True), ("wrong", 4, False)):
        engine = Engine(max_num_batched_tokens=256, num_speculative_tokens=count, proposer=Guesses(right=right))
        engine.add_many(32, 8, 41)
        engine.step()
        engine.add("prompt", 2000)
        prompt_tokens[name] = engine.step()["prompt"]
        num_steps[name] = engine.run() + 2
    assert num_steps["right"] < num_steps["off"] < num_steps["wrong"] + 1
    assert prompt_tokens == {"off": 256 - 32, "right": 256 - 5 * 32, "wrong": 256 - 5 * 32}


@pytest.mark.parametrize(("budget", "tokens"), [(512, [8] * 64), (500, [8] * 52 + [7] * 12), (64, [1] * 64)])
def test_everybody_has_a_token_before_anybody_has_a_draft(budget: int, tokens: list[int]) -> None:
    """64 answers of 71 tokens with 8 wrong drafts each want 576 tokens. 500 = 64 + 6 x 64 + 52."""
    engine = Engine(
        max_num_batched_tokens=budget, max_num_seqs=64, num_speculative_tokens=8, proposer=Guesses(right=False)
    )
    engine.add_many(64, 1, 71)
    assert list(engine.step().values()) == [1] * 64
    for _ in range(62):
        assert list(engine.step().values()) == tokens
    engine.run()
    assert engine.num_steps == 71


@pytest.mark.parametrize(
    ("budget", "num_scheduled"),
    [(20, [5, 4, 4, 4, 3]), (45, [9, 9, 9, 9, 9]), (60, [9, 9, 9, 9, 24]), (5, [2, 1, 1, 1, 0])],
)
def test_drafts_and_a_prompt_share_what_the_answers_leave(budget: int, num_scheduled: list[int]) -> None:
    """Each of 4 answers gets one token; then all get one more, round by round. The prompt gets what drafts leave."""
    engine = Engine(
        max_num_batched_tokens=budget, max_num_seqs=5, num_speculative_tokens=8, proposer=Guesses(right=False)
    )
    engine.add_many(4, 1, 50)
    engine.add("prompt", 300)
    assert list(engine.step().values()) == [1, 1, 1, 1, budget - 4]
    names = [*(f"r{index}" for index in range(4)), "prompt"]
    assert list((dict.fromkeys(names, 0) | engine.step()).values()) == num_scheduled


@pytest.mark.parametrize(("chunked", "steps"), [(True, [(9, 8, 1), (7, 6, 5)]), (False, [(6, 6, 6), (6, 6, 6)])])
def test_drafts_let_newcomers_in(chunked: bool, steps: list[tuple[int, ...]]) -> None:
    """Two answers with 8 drafts each want the whole budget. Without chunks, a prompt needs all its tokens at once."""
    knobs = {"max_num_batched_tokens": 18, "max_num_seqs": 4, "enable_chunked_prefill": chunked}
    engine = Engine(num_speculative_tokens=8, proposer=Guesses(right=False), **knobs)
    engine.add_many(2, 1, 50)
    engine.step()
    assert engine.step() == {"r0": 9, "r1": 9}
    engine.add("late", 6, 50)
    assert tuple(engine.step().values()) == steps[0]
    assert tuple(engine.step().values()) == steps[1]


def test_a_prompt_that_does_not_fit_beside_the_answers_takes_nothing_from_drafts() -> None:
    knobs = {"max_num_batched_tokens": 18, "max_num_seqs": 4, "enable_chunked_prefill": False}
    engine = Engine(num_speculative_tokens=8, proposer=Guesses(right=False), **knobs)
    engine.add_many(2, 1, 50)
    engine.step()
    engine.add("long", 17)
    assert engine.step() == {"r0": 9, "r1": 9}
