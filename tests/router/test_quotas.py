"""What accounts may use holds in the long run, whatever the order of their requests."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import Overloaded
from router.admission import Account
from router.quotas import Quotas


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_answers_at_once() -> None:
    quotas, alice, bob = Quotas(Time()), Account("alice", max_in_flight=2), Account("bob")
    quotas.check(alice, 2)
    for _ in range(2):
        quotas.begin(alice, 1)
    with pytest.raises(Overloaded, match="max_in_flight: 2 \\+ 1 answers at once, alice may have 2"):
        quotas.check(alice, 1)
    quotas.check(bob, 64)
    quotas.check(None, 64)
    quotas.end(alice, 5)
    quotas.check(alice, 1)


def test_the_hint_says_when_the_next_request_is_taken() -> None:
    time, alice = Time(), Account("alice", tokens_per_minute=60)
    quotas = Quotas(time)
    quotas.check(alice, 1)
    quotas.begin(alice, 90)
    quotas.end(alice, 10)
    with pytest.raises(Overloaded, match="tokens_per_minute") as raised:
        quotas.check(alice, 1)
    assert raised.value.retry_after_s == 41.0
    time.now += 40.0
    with pytest.raises(Overloaded):
        quotas.check(alice, 1)
    time.now += 1.0
    quotas.check(alice, 1)


def test_an_account_that_gets_a_rate_owes_nothing_from_before() -> None:
    time, before, after = Time(), Account("alice"), Account("alice", tokens_per_minute=60)
    quotas = Quotas(time)
    quotas.begin(before, 10_000)
    time.now += 1.0
    quotas.check(after, 1)
    time.now += 1.0
    quotas.check(after, 1)


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 50), st.integers(0, 50)), max_size=60))
def test_the_long_run_keeps_the_rate(requests: list[tuple[float, int, int]]) -> None:
    """No more is taken than the bucket's size, its inflow and what the last request cost beyond it."""
    time, alice, used, most = Time(), Account("alice", tokens_per_minute=60), 0, 0
    quotas = Quotas(time)
    for wait_s, prompt, answer in requests:
        time.now += wait_s
        try:
            quotas.check(alice, 1)
        except Overloaded:
            continue
        quotas.begin(alice, prompt)
        quotas.end(alice, answer)
        used, most = used + prompt + answer, max(most, prompt + answer)
        assert used <= 60 + time.now + most
