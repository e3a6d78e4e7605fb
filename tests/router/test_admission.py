"""The checks of a new request, and the order and bounds of the queue."""

import numpy as np
import pytest

from protocol.errors import DeadlineExceeded, InvalidRequest, Overloaded
from protocol.messages import SamplingParams
from router.admission import AdmissionQueue, ClientRequest, Limits

LIMITS = Limits(max_model_len=100, num_pool_tokens=60, max_prompt_tokens=60)


def request(num_prompt: int, max_tokens: int | None, deadline_s: float | None = None) -> ClientRequest:
    prompt = np.arange(num_prompt, dtype=np.int32)
    return ClientRequest(
        request_id="r", prompt_token_ids=prompt, max_tokens=max_tokens, sampling=SamplingParams(), deadline_s=deadline_s
    )


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "given"), [(10, 5, 5), (10, 51, 51), (60, None, 1), (10, None, 51), (60, 1, 1)]
)
def test_what_fits_is_accepted(num_prompt: int, max_tokens: int | None, given: int) -> None:
    assert LIMITS.check(request(num_prompt, max_tokens)) == given


def test_max_tokens_is_clipped_to_the_model_not_to_the_pool() -> None:
    assert Limits(100, 1000, 99).check(request(90, 50)) == 10


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "field", "limit"),
    [
        (0, 5, "prompt", "at least 1"),
        (5, 0, "max_tokens", "at least 1"),
        (100, 5, "prompt", "99"),
        (61, 5, "prompt", "60"),
        (10, 52, "max_tokens", "60"),
    ],
)
def test_what_never_fits_is_refused_with_field_and_limit(
    num_prompt: int, max_tokens: int, field: str, limit: str
) -> None:
    with pytest.raises(InvalidRequest, match=limit) as caught:
        LIMITS.check(request(num_prompt, max_tokens))
    assert caught.value.field == field


def test_a_deadline_that_has_passed_is_refused() -> None:
    with pytest.raises(DeadlineExceeded):
        LIMITS.check(request(5, 5, deadline_s=0.0))


def test_the_line_is_ordered_by_priority_then_arrival_with_returned_ones_in_front() -> None:
    line = AdmissionQueue(max_queue=10)
    for request_number, priority in enumerate([1, 0, 1, 0]):
        line.push(request_number, priority)
    line.push(9, 1, front=True)
    order = []
    while (head := line.head()) is not None:
        order.append(head)
        line.remove(head)
    assert order == [1, 3, 9, 0, 2]


def test_a_full_line_is_overloaded_but_takes_returned_requests() -> None:
    line = AdmissionQueue(max_queue=2)
    line.push(1, 0)
    line.push(2, 0)
    with pytest.raises(Overloaded, match="max_queue is 2") as caught:
        line.check_room(1, 5)
    assert caught.value.retry_after_s > 0
    line.push(3, 0, front=True)
    assert line.head() == 3
    line.remove(3)
    line.remove(1)
    line.check_room(1, 0)


def test_several_find_room_together_or_not_at_all_and_overtake_nobody() -> None:
    line = AdmissionQueue(max_queue=4)
    line.check_room(14, 10)
    with pytest.raises(
        Overloaded, match="15 answers are asked for, 10 find a place at once, 0 requests are waiting, max_queue is 4"
    ):
        line.check_room(15, 10)
    line.push(1, 0)
    line.check_room(3, 10)
    with pytest.raises(Overloaded):
        line.check_room(4, 10)
