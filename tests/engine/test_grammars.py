"""Requests under a grammar wait for it in both pools and hold up nobody; what cannot be served under it ends alone."""

import pytest

from engine.grammars import Grammars
from engine.runner import Batch
from protocol.grammar import Grammar
from protocol.messages import EngineRequest, SamplingParams
from tests.pool_world import ROUTER, D, DecodeWorld, P, PrefillWorld, World, key

GRAMMAR = Grammar("regex", "a+")
GUIDED = SamplingParams(grammar=GRAMMAR)


class SlowGrammars(Grammars):
    """A grammar is compiled when the test says so."""

    def __init__(self) -> None:
        self.held: list[Grammar] = []
        self.faults: dict[Grammar, str] = {}
        self._ended: list[Grammar] = []

    def hold(self, grammar: Grammar) -> bool:
        self.held.append(grammar)
        return grammar in self.faults

    def release(self, grammar: Grammar) -> None:
        self.held.remove(grammar)

    def fault(self, grammar: Grammar) -> str:
        return self.faults[grammar]

    def compiled(self) -> list[Grammar]:
        ended, self._ended = self._ended, []
        return ended

    def end(self, fault: str = "") -> None:
        self.faults[GRAMMAR] = fault
        self._ended.append(GRAMMAR)


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
    assert case.grammars.held == [GRAMMAR]


def test_others_do_not_wait_for_it(case: Case) -> None:
    case.ask("guided")
    case.ask("free", SamplingParams())
    assert case.step() == ["free"]


def test_a_compiled_grammar_is_not_waited_for(case: Case) -> None:
    case.grammars.end()
    case.world.service.tick()
    case.ask("guided")
    assert case.step() == ["guided"]


@pytest.mark.parametrize("known", [False, True])
def test_a_fault_ends_the_request_for_good(case: Case, known: bool) -> None:
    if known:
        case.grammars.end("unclosed group")
    case.ask("guided")
    if not known:
        case.grammars.end("unclosed group")
    case.world.service.tick()
    (end,) = case.world.ends()
    assert end.kind == "invalid" and "unclosed group" in end.error
    assert case.grammars.held == [] and not case.world.service.keys()
    case.world.service.check_idle()


def test_whoever_leaves_while_it_waits_releases_its_grammar(case: Case) -> None:
    case.ask("guided")
    case.world.drain(1.0)
    assert [end.kind for end in case.world.ends()] == ["returned"]
    assert case.grammars.held == []
    case.grammars.end()
    case.world.service.tick()
    case.world.service.check_idle()


def test_an_engine_without_grammars_says_so() -> None:
    world = PrefillWorld()
    world.generate(sampling=GUIDED)
    (end,) = world.ends()
    assert end.kind == "invalid" and "no tokenizer" in end.error


def test_who_cannot_go_on_ends_alone(case: Case) -> None:
    case.grammars.end()
    case.world.service.tick()
    for name in ("bad", "good"):
        case.ask(name)
    batch = case.schedule()
    assert batch is not None and set(batch.request_ids) == {"bad", "good"}
    output = case.world.runner.execute(batch)
    output.failures[batch.request_ids.index("bad")] = "a limit is exceeded"
    case.world.service.commit(output)
    errors = [(end.kind, end.error) for end in case.world.ends() if end.error]
    assert errors == [("invalid", "a limit is exceeded")]
    assert case.world.service.keys() == {key("good")}
    assert case.grammars.held == [GRAMMAR]
