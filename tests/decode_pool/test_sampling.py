"""Logprobs of a handed-off answer: the first token's come with the handoff, and go out once, with that token."""

from engine.runners.arithmetic_model import expected_logprobs, expected_tokens
from protocol.messages import Logprobs, SamplingParams, StepTokens
from tests.pool_world import DecodeWorld

SAMPLED = SamplingParams(temperature=0.5, seed=99, logprobs=1)
ANSWER = expected_tokens(range(1, 11), 4, seed=99)


def test_a_sampled_answer_goes_on_after_the_handoff() -> None:
    world = DecodeWorld()
    world.generate(sampling=SAMPLED)
    world.handoff(first_token_id=ANSWER[0], first_logprobs=expected_logprobs(ANSWER[0], 1))
    world.step()
    world.finish_pulls()
    for _ in range(3):
        world.step()
    messages = [message for _, message in world.sent(StepTokens)]
    assert [token for message in messages for token in message.token_ids.tolist()] == ANSWER
    entries = sorted(entry for message in messages for entry in message.logprobs)
    assert entries == [Logprobs(7, 1, index, expected_logprobs(token, 1)) for index, token in enumerate(ANSWER)]
    assert {entry.offset for entry in messages[0].logprobs} == {0, 1}
