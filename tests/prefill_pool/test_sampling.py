"""The first token is sampled here; its logprobs go to the router and, with the last handoff, to decode."""

from engine.runners.arithmetic_model import expected_logprobs, expected_tokens
from protocol.messages import KVHandoff, Logprobs, SamplingParams, StepTokens
from tests.pool_world import PrefillWorld

FIRST = expected_tokens(range(1, 11), 1, seed=99)[0]


def test_the_first_token_is_sampled_and_its_logprobs_go_both_ways() -> None:
    world = PrefillWorld()
    world.generate(sampling=SamplingParams(temperature=0.5, seed=99, logprobs=1))
    world.step()
    world.step()
    sent = [message for _, message in world.sent()]
    handoffs = [message for message in sent if isinstance(message, KVHandoff)]
    assert (handoffs[0].first_token_id, handoffs[0].first_logprobs) == (None, None)
    assert (handoffs[1].first_token_id, handoffs[1].first_logprobs) == (FIRST, expected_logprobs(FIRST, 1))
    (tokens,) = [message for message in sent if isinstance(message, StepTokens)]
    assert (tokens.token_ids.tolist(), tokens.logprobs) == ([FIRST], (Logprobs(7, 1, 0, expected_logprobs(FIRST, 1)),))
