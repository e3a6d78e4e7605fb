"""What a decode engine tells the router of a preemption. Five blocks of 4 tokens: a grows to 17 tokens, b goes with 7
computed ones.
"""

from typing import Any, get_args

from engine.config import Knob
from engine.runners.arithmetic_model import expected_tokens
from protocol.messages import ReplicaStatus, RouterStatus, StepTokens
from protocol.preemption import MODE_COUNTERS, REASON_COUNTERS
from tests.pool_world import ROUTER, DecodeWorld, key


def pressed(**knobs: Any) -> DecodeWorld:
    world = DecodeWorld(**({"num_blocks": 6, "enable_prefix_caching": False} | knobs))
    ask(world)
    return world


def ask(world: DecodeWorld) -> None:
    for name, request_number, num_prompt, max_tokens in (("a", 1, 8, 10), ("b", 2, 4, 12)):
        message = world.request(
            num_prompt,
            key=key(name),
            request_number=request_number,
            role="colocated",
            peer=None,
            max_tokens=max_tokens,
            cache_salt=name,
        )
        world.say(ROUTER, message)


def hear_room(world: DecodeWorld, num_blocks: int) -> None:
    world.say(ROUTER, RouterStatus(router_epoch=3, seq=2, prefill_room_blocks=num_blocks, prefill_max_tokens=99))


def run(world: DecodeWorld) -> tuple[dict[int, list[int]], list[tuple[int, str, str]]]:
    """(tokens, ends) by request_number, in order of arrival."""
    while world.step():
        pass
    tokens: dict[int, list[int]] = {1: [], 2: []}
    ends = []
    for _, message in world.sent(StepTokens):
        at = 0
        for request_number, count in zip(message.request_numbers.tolist(), message.counts.tolist(), strict=True):
            tokens[request_number] += message.token_ids[at : at + count].tolist()
            at += count
        ends += [(end.request_number, end.kind, end.error) for end in message.ends]
    return tokens, ends


def counted(world: DecodeWorld) -> dict[str, float]:
    """Of preemption, what is not 0."""
    world.pass_time(1.0)
    status: ReplicaStatus = world.sent(ReplicaStatus)[-1][1]
    names = ("preempt", "swap", "recomputed")
    return {name: value for name, value in status.counters.items() if value and name.startswith(names)}


def test_a_swap_is_counted_and_nobody_notices() -> None:
    world = pressed(preemption="swap", num_host_blocks=2)
    tokens, ends = run(world)
    assert tokens == {1: expected_tokens(range(1, 9), 10), 2: expected_tokens(range(1, 5), 12)}
    assert ends == [(1, "finished", ""), (2, "finished", "")]
    counters = counted(world)
    assert counters.pop("swap_seconds") > 0
    assert counters == {"preemptions_swap": 1, "preemption_reason_configured": 1, "swapped_bytes": 2 * 2 * 32}
    world.service.check_idle()


def test_a_full_host_pool_is_a_reason() -> None:
    world = pressed(preemption="swap", num_host_blocks=1)
    run(world)
    assert counted(world) == {"preemptions_recompute": 1, "preemption_reason_host_full": 1, "recomputed_tokens": 7}


def test_a_request_is_given_back_while_the_prefill_pool_has_room() -> None:
    world = pressed(preemption="remote")
    hear_room(world, 2)
    tokens, ends = run(world)
    assert ends == [(2, "returned", "preempted"), (1, "finished", "")]
    assert tokens[2] == expected_tokens(range(1, 5), 12)[:4], "all that was sampled, before the end"
    assert counted(world) == {"preemptions_remote": 1, "preemption_reason_configured": 1}
    assert world.service.idle
    world.service.check_idle()


def test_without_room_it_is_computed_here() -> None:
    for room in (0, 1):
        world = pressed(preemption="remote")
        hear_room(world, room)
        _, ends = run(world)
        assert [kind for _, kind, _ in ends] == ["finished", "finished"]
        assert counted(world) == {"preemptions_recompute": 1, "preemption_reason_no_room": 1, "recomputed_tokens": 7}


def test_what_a_router_said_of_room_ends_with_it() -> None:
    world = DecodeWorld(num_blocks=6, enable_prefix_caching=False, preemption="remote")
    hear_room(world, 9)
    world.service.router_gone()
    ask(world)
    run(world)
    assert counted(world)["preemption_reason_no_room"] == 1


def test_a_failed_copy_costs_the_others_nothing() -> None:
    """The step that was to copy b out fails: a ends with it, b computes its KV again."""
    world = pressed(preemption="swap", num_host_blocks=2)
    while world.scheduler.num_running < 2 or not world.scheduler.swapped:
        batch = world.service.schedule()
        assert batch is not None
        if batch.swap_out is None:
            world.service.commit(world.runner.execute(batch))
        else:
            world.service.step_failed("out of order")
            break
    tokens, ends = run(world)
    assert ends == [(1, "failed", "out of order"), (2, "finished", "")]
    assert tokens[2] == expected_tokens(range(1, 5), 12)
    assert counted(world)["recomputed_tokens"] == 7


def test_every_mode_and_every_reason_has_its_counter() -> None:
    counters = DecodeWorld().service.counters
    names = [*MODE_COUNTERS.values(), *REASON_COUNTERS.values()]
    assert [name for name in counters if name.startswith("preemption")] == names
    assert set(get_args(Knob)) == {*MODE_COUNTERS, "auto"}
