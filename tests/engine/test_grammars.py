"""Requests under a grammar wait for it in both pools and hold up nobody; what cannot be served under it ends alone."""

import pytest

from engine.runner import Batch
from protocol.grammar import Grammar
from protocol.messages import EngineRequest, RequestKey, SamplingParams
from tests.pool_world import ROUTER, D, DecodeWorld, P, PrefillWorld, World, key

GRAMMAR = Grammar("regex", "a+")
GUIDED = SamplingParams(grammar=GRAMMAR)


class SlowGrammars:
    """A grammar is compiled when the test says so."""

    def __init__(self) -> None:
        self.asked: dict[RequestKey, Grammar] = {}
        self._ended: list[tuple[RequestKey, str]] = []

    def begin(self, key: RequestKey, grammar: Grammar) -> None:
        self.asked[key] = grammar

    def ended(self) -> list[tuple[RequestKey, str]]:
        ended, self._ended = self._ended, []
        return ended

    def forget(self, key: RequestKey) -> None:
        self.asked.pop(key, None)

    def end(self, fault: str = "") -> None:
        self._ended += [(key, fault) for key in self.asked]


class Case:
    def __init__(self, kind: str) -> None:
        self.grammars = SlowGrammars()
        make = PrefillWorld if kind == "prefill" else DecodeWorld
        self.world: World = make(grammars=self.grammars, max_num_batched_tokens=64)
        self.kind = kind

    def ask(self, name: str, sampling: SamplingParams = GUIDED) -> None:
        role, peer = {"prefill": ("prefill", D), "decode": ("decode", P), "colocated": ("colocated", None)}[self.kind]
        request: EngineRequest = self.world.request(name=name, role=role, peer=peer, sampling=sampling)
        if isinstance(self.world, DecodeWorld) and self.kind == "decode":
            self.world.handoff(name=name)
        self.world.say(ROUTER, request)

    def schedule(self) -> Batch | None:
        """The next batch; decode pulls a prompt before."""
        batch = self.world.service.schedule()
        if batch is None and isinstance(self.world, DecodeWorld):
            self.world.finish_pulls()
            batch = self.world.service.schedule()
        return batch

    def step(self) -> list[str]:
        """Names of the requests in the next batch, which is computed."""
        batch = self.schedule()
        if batch is None:
            return []
        self.world.service.commit(self.world.runner.execute(batch))
        return batch.request_ids


@pytest.fixture(params=["prefill", "decode", "colocated"])
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def test_a_request_joins_the_queue_when_its_grammar_is_compiled(case: Case) -> None:
    case.ask("guided")
    assert case.step() == []
    case.grammars.end()
    case.world.service.tick()
    assert case.step() == ["guided"]
    assert case.grammars.asked == {key("guided"): GRAMMAR}


def test_others_do_not_wait_for_it(case: Case) -> None:
    case.ask("guided")
    case.ask("free", SamplingParams())
    assert case.step() == ["free"]


def test_a_fault_ends_the_request_for_good(case: Case) -> None:
    case.ask("guided")
    case.grammars.end("unclosed group")
    case.world.service.tick()
    (end,) = case.world.ends()
    assert (end.kind, end.error) == ("invalid", "unclosed group")
    assert case.grammars.asked == {} and not case.world.service.keys()
    case.world.service.check_idle()


def test_whoever_leaves_while_it_waits_releases_its_grammar(case: Case) -> None:
    case.ask("guided")
    case.world.drain(1.0)
    assert [end.kind for end in case.world.ends()] == ["returned"]
    assert case.grammars.asked == {}
    case.world.service.check_idle()


def test_an_engine_without_grammars_says_so() -> None:
    world = PrefillWorld()
    world.generate(sampling=GUIDED)
    (end,) = world.ends()
    assert end.kind == "invalid" and "no tokenizer" in end.error


def test_who_cannot_go_on_ends_alone(case: Case) -> None:
    for name in ("bad", "good"):
        case.ask(name)
    case.grammars.end()
    case.world.service.tick()
    batch = case.schedule()
    assert batch is not None and set(batch.request_ids) == {"bad", "good"}
    output = case.world.runner.execute(batch)
    output.failures[batch.request_ids.index("bad")] = "a limit is exceeded"
    case.world.service.commit(output)
    errors = [(end.kind, end.error) for end in case.world.ends() if end.error]
    assert errors == [("invalid", "a limit is exceeded")]
    assert case.world.service.keys() == {key("good")}
    assert case.grammars.asked.keys() == {key("good")}
