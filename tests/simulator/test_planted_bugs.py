"""A check that cannot fail checks nothing: each planted bug must be caught by the simulator within 200 seeds."""

from collections.abc import Callable

import pytest

from simulator.seeds import run_seeds
from simulator.violation import Violation
from tests.simulator import door_bugs, engine_bugs, router_bugs

Patch = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (engine_bugs.free_at_abort_while_a_pull_runs, ":"),
        (engine_bugs.release_ignored, ":"),
        (router_bugs.router_does_not_deduplicate, "I13"),
        (engine_bugs.lease_word_not_read, ":"),
        (engine_bugs.hashes_visible_before_verification, "I8"),
        (engine_bugs.release_sent_twice, "I6"),
        (engine_bugs.lease_not_renewed, ":"),
        (engine_bugs.offer_to_a_replica_that_was_replaced, ":"),
        (router_bugs.counter_not_decremented_on_reject, "I5"),
        (engine_bugs.deadline_only_checked_when_busy, ":"),
        (router_bugs.retry_after_the_terminal_event, "I10|I13"),
        (router_bugs.deadline_not_kept_in_the_routers_queue, "I4"),
        (engine_bugs.lease_ended_without_an_answer, "I6"),
        (engine_bugs.refused_after_it_was_consumed, "I6"),
        (engine_bugs.arrived_ones_wait_behind_the_line, "I9"),
        (engine_bugs.arrived_ones_get_what_prompts_and_drafts_leave, "I9"),
        (engine_bugs.destination_without_the_next_tokens_slot, "I9"),
        (router_bugs.what_can_never_fit_is_accepted, "I9"),
        (router_bugs.retry_counted_as_accepted, "I10"),
        (router_bugs.seconds_booked_twice, "I10"),
        (engine_bugs.failed_steps_counted, "I10"),
        (router_bugs.strict_falls_back, "I12"),
        (router_bugs.everything_counts_as_disaggregated, "I12"),
        (engine_bugs.drafts_before_the_next_answers_token, "I14"),
        (engine_bugs.checksums_not_compared, ":"),
        (engine_bugs.pull_without_a_timer_once_its_request_has_ended, "not quiet"),
        (engine_bugs.refused_early_handoff_told_by_nobody, "told by nobody"),
        (engine_bugs.keys_of_a_silent_router_end_in_silence, "told by nobody|not quiet"),
        (engine_bugs.prefill_judges_how_long_the_answer_may_be, "I7"),
        (router_bugs.no_hit_taken_for_not_told, "were cached"),
        (engine_bugs.memory_of_the_dead_is_kept, "successors"),
        (engine_bugs.memory_of_those_who_died_without_a_router_is_kept, "successors"),
        (engine_bugs.peer_that_opens_after_its_death_is_kept, "successors"),
        (engine_bugs.pull_from_a_peer_given_up_while_it_opened, "let go of"),
        (router_bugs.drained_engine_gets_more, "I17"),
        (router_bugs.order_ends_with_the_engine, "I17"),
        (router_bugs.order_ends_with_the_router, "I17"),
        (door_bugs.calls_of_a_dead_door_go_on, "I15"),
        (door_bugs.successor_gets_what_was_for_the_dead, "I15"),
        (door_bugs.joined_step_dropped, "I15"),
        (door_bugs.end_overtakes_the_last_tokens, "I15"),
        (door_bugs.batches_without_bound, "I16"),
        (door_bugs.full_door_is_not_held, "I16"),
        (door_bugs.requests_of_a_held_door_begin, "I16"),
        (door_bugs.end_of_the_core_told_to_nobody, "not quiet"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_planted_bug_is_caught(plant: Patch, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`found` is in the text of the violation: the invariant that has to find the bug, or ":" for any."""
    plant(monkeypatch)
    with pytest.raises(Violation, match=found) as caught:
        run_seeds(1, 200)
    print(f"\n{plant.__name__}: {caught.value}")
