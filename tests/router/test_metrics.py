"""What the router exports, without engines: messages go in by hand, samples come out."""

import asyncio
import contextlib

import pytest

from protocol.errors import Overloaded, RequestError
from protocol.messages import Address, EngineRequest, StageSeconds
from protocol.preemption import MODE_COUNTERS, REASON_COUNTERS
from router.call_request import CallRequest, Prompt, SamplingOptions
from router.metrics import METRICS, PREFIX
from tests.hang import HANG_S
from tests.router.measured import Measured
from tests.router.router_world import D, P


def test_names_are_written_once_and_in_base_units() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert not metric.name.endswith(("_total", "_ms", "_us", "_count")), metric.name
        assert metric.help.endswith(".")
        if metric.kind == "histogram":
            assert metric.name.endswith(("_seconds", "_tokens"))


def test_every_series_names_its_model_and_the_engines_their_pool_and_replica() -> None:
    world = Measured()
    world.status(D, pulls=1)
    world.status(P, consumed=1)
    by_name = {PREFIX + metric.name: metric for metric in METRICS}
    for family in world.collector.collect():
        for sample in family.samples:
            assert {"model_name", *by_name[family.name].labels} == set(sample.labels) - {"le"}, sample


def test_the_life_of_a_request_is_counted_once() -> None:
    world = Measured()

    def begins() -> None:
        assert (world.value("requests_accepted_total"), world.value("accepted_prompt_tokens_total")) == (1, 3)
        world.tokens(P, 0, [40])

    def goes_on() -> None:
        world.clock.advance_to(0.2)
        world.tokens(D, 0, [40, 41])

    def ends() -> None:
        world.clock.advance_to(0.5)
        world.tokens(D, 2, [42, 43], ("finished", "length"), stages=(StageSeconds(0, 1, {"decode": 0.5}, 2),))

    world.answer(begins, goes_on, ends, max_tokens=4)
    assert (world.value("delivered_tokens_total"), world.value("repeated_tokens_total")) == (4, 1)
    assert world.value("requests_ended_total", reason="length") == 1
    assert world.value("requests_by_path_total", path="disaggregated") == 1
    assert world.value("inter_token_latency_seconds_count") == 3
    assert world.value("inter_token_latency_seconds_sum") == pytest.approx(0.5)
    assert world.value("inter_token_latency_seconds_bucket", le="0.001") == 1  # two tokens of one step
    assert world.value("inter_token_latency_seconds_bucket", le="0.2") == 2


@pytest.mark.parametrize(("prefill", "sender", "path"), [(True, P, "prefill_only"), (False, D, "colocated")])
def test_a_request_counts_where_it_really_ran(prefill: bool, sender: Address, path: str) -> None:
    world = Measured(prefill=prefill)
    world.answer(lambda: world.tokens(sender, 0, [40], ("finished", "stop")))
    assert world.value("requests_by_path_total", path=path) == 1
    assert world.value("requests_by_path_total", path="disaggregated") == 0


def test_a_retry_counts_as_one_and_its_gap_as_the_client_saw_it() -> None:
    world = Measured()

    def comes_again() -> None:
        world.clock.advance_to(2.0)
        world.tokens(D, 1, [41], ("finished", "stop"), attempt=2)

    world.answer(
        lambda: world.tokens(D, 0, [40]), lambda: world.tokens(D, 0, [], ("failed", None, "broken")), comes_again
    )
    assert world.value("request_retries_total") == 1
    assert world.value("requests_ended_total", reason="stop") == 1
    assert world.value("inter_token_latency_seconds_count") == 1
    assert world.value("inter_token_latency_seconds_sum") == 2.0


def test_the_queue_has_a_length_and_an_age() -> None:
    world = Measured(prefill=False)
    for index in range(2 + 8 + 3):  # 2 seats, 8 dispatched ahead, 3 that wait
        world.submit(f"r{index}")
    world.clock.advance_to(7.0)
    assert world.value("requests_waiting", pool="router", replica="router", reason="engines_full") == 3
    assert world.value("queue_oldest_seconds") == 7.0
    assert world.value("requests_in_flight", pool="decode", replica="decode-0") == 10


def test_blocks_add_up_to_the_pool() -> None:
    world = Measured()
    world.status(D)
    states = {
        state: world.value("kv_blocks", pool="decode", replica="decode-0", state=state)
        for state in ("used", "held", "cached", "blank")
    }
    assert states == {"used": 8, "held": 1, "cached": 20, "blank": 70}  # of 99 blocks


def test_an_engine_reports_how_much_it_thrashes() -> None:
    world = Measured()
    assert world.value("thrash_ratio", pool="decode", replica="decode-0") == 0
    world.status(D)
    assert world.value("thrash_ratio", pool="decode", replica="decode-0") == 0.5


def test_counters_outlive_an_engine_and_gauges_do_not() -> None:
    """Prometheus would take a falling counter for a restart of the router."""
    world = Measured()
    labels = {"pool": "decode", "replica": "decode-0"}
    world.status(D, steps=3, pulls=5, preemptions_recompute=2)
    world.router.replica_down(D)
    assert world.value("transfers_total", transport="shared_memory", **labels) == 5
    assert world.value("requests_running", **labels) is None
    assert world.value("replica_epoch", **labels) is None
    assert world.value("replicas", pool="decode", state="up") == 0
    reborn = Address("decode-0", 9)
    world.hello(reborn, "decode")
    assert world.value("transfers_total", transport="shared_memory", **labels) == 5
    assert world.value("replica_epoch", **labels) == 9
    world.status(reborn, steps=2, step_s=0.5, pulls=1, preemptions_recompute=0)
    assert world.value("preemptions_total", mode="recompute", **labels) == 2
    assert world.value("step_seconds_count", **labels) == 5
    assert world.value("step_seconds_sum", **labels) == pytest.approx(1.75)


def test_every_way_and_every_reason_of_preemption_is_shown() -> None:
    world = Measured()
    counted = {counter: 1 + i for i, counter in enumerate([*MODE_COUNTERS.values(), *REASON_COUNTERS.values()])}
    world.status(D, **counted)
    labels = {"pool": "decode", "replica": "decode-0"}
    modes = {counter: world.value("preemptions_total", mode=mode, **labels) for mode, counter in MODE_COUNTERS.items()}
    reasons = {
        counter: world.value("preemption_reasons_total", reason=reason, **labels)
        for reason, counter in REASON_COUNTERS.items()
    }
    assert modes | reasons == counted


def test_an_engine_replaced_without_a_farewell_is_counted_too() -> None:
    world = Measured()
    world.status(D, pulls=5)
    world.hello(Address("decode-0", 9), "decode")
    world.status(Address("decode-0", 9), pulls=1)
    assert world.value("transfers_total", pool="decode", replica="decode-0", transport="") == 6


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (CallRequest(prompt=Prompt(text="<1>"), sampling=SamplingOptions(max_tokens=0)), "invalid"),
        (CallRequest(prompt=Prompt(token_ids=[1] * 90)), "invalid"),
    ],
)
def test_refusals_are_counted_by_reason(asked: CallRequest, reason: str) -> None:
    world = Measured()

    async def ask() -> None:
        with pytest.raises(RequestError):
            await anext(world.door.generate(lambda: asked, deadline_s=None))

    asyncio.run(ask())
    assert world.value("requests_rejected_total", reason=reason) == 1
    world.router.drain(1.0)
    asked = CallRequest(prompt=Prompt(text="<1>"))
    asyncio.run(ask())
    assert world.value("requests_rejected_total", reason="draining") == 1
    assert world.value("requests_accepted_total") == 0


def test_a_request_is_one_answer_whether_it_is_accepted_or_refused() -> None:
    """There is room for 14 answers: 2 seats, 8 dispatched ahead and 4 that wait."""
    world = Measured(prefill=False, max_queue=4)
    asked = CallRequest(prompt=Prompt(text="<1>"), sampling=SamplingOptions(n=15, temperature=1.0, max_tokens=5))

    async def ask() -> None:
        with pytest.raises(Overloaded):
            await anext(world.door.generate(lambda: asked, deadline_s=None))

    asyncio.run(ask())
    assert world.value("requests_rejected_total", reason="queue_full") == 15
    assert world.value("requests_accepted_total") == 0
    assert world.sent(EngineRequest) == [] and world.router.num_open == 0
    assert sum(world.door.totals.ends.values()) == 0

    async def fits() -> None:
        asked = CallRequest(prompt=Prompt(text="<1>"), sampling=SamplingOptions(n=14, temperature=1.0, max_tokens=5))
        async with contextlib.aclosing(world.door.generate(lambda: asked, deadline_s=None)) as answers:
            first = asyncio.ensure_future(anext(answers))
            while not world.router.active():
                await asyncio.sleep(0)
            assert (world.value("requests_accepted_total"), world.value("accepted_prompt_tokens_total")) == (14, 14)
            world.tokens(D, 0, [40])
            world.pump()
            await first

    asyncio.run(asyncio.wait_for(fits(), 30))
    assert world.value("requests_ended_total", reason="cancelled") == sum(world.door.totals.ends.values()) == 14
    assert world.value("requests_rejected_total", reason="queue_full") == sum(world.door.totals.refusals.values()) == 15


def test_stages_add_up_to_the_whole() -> None:
    world = Measured(prefill=False)

    async def main() -> None:
        answer = world.door.generate(lambda: CallRequest(prompt=Prompt(text="<1> <2>")), deadline_s=None)
        first = asyncio.ensure_future(anext(answer))
        while not world.router.active():
            await asyncio.sleep(0)
        world.clock.advance_to(1.0)
        world.tokens(D, 0, [40])
        world.pump()
        await first
        world.clock.advance_to(3.0)
        world.tokens(D, 1, [41], ("finished", "stop"), stages=(StageSeconds(0, 1, {"prefill": 0.75, "decode": 1.5}),))
        world.pump()
        async for _ in answer:
            continue

    asyncio.run(asyncio.wait_for(main(), HANG_S))
    for name, seconds in (("time_to_first_token", 1.0), ("e2e_request_latency", 3.0)):
        assert (world.value(f"{name}_seconds_count"), world.value(f"{name}_seconds_sum")) == (1, seconds)
    stages = {
        dict(labels)["stage"]: value
        for (name, labels), value in world.samples().items()
        if name == PREFIX + "request_stage_seconds_sum"
    }
    assert stages == {"tokenize": 0, "router_queue": 0, "prefill": 0.75, "decode": 1.5, "messages": 0.75, "deliver": 0}


def test_the_table_prints(capsys: pytest.CaptureFixture[str]) -> None:
    from router.metrics import main

    main()
    assert "| `twopass_preemptions_total` | counter | pool, replica, mode |" in capsys.readouterr().out
