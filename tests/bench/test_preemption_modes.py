"""Runs the comparison of preemption modes with given costs instead of measured ones."""

from bench.preemption_modes import MeasuredCosts, run_mode

COSTS = MeasuredCosts(step_s=0.02, decode_s=0.001, prompt_token_s=0.002, copy_block_s=0.0001, block_bytes=1000)


def test_each_mode_does_what_it_is_named_for_and_answers_the_same() -> None:
    recompute = run_mode("recompute", COSTS, num_host_blocks=0, num_requests=28)
    swap = run_mode("swap", COSTS, num_host_blocks=240, num_requests=28)
    remote = run_mode("remote", COSTS, num_host_blocks=0, num_requests=28)
    auto = run_mode("auto", COSTS, num_host_blocks=240, num_requests=28)
    assert recompute.preemptions["recompute"] > 5 and recompute.recomputed_tokens > 0
    assert swap.preemptions["swap"] > 5 and swap.swapped_mbytes > 0
    assert remote.preemptions["remote"] > 5
    assert swap.recomputed_tokens == 0
    assert auto.reasons["cheapest"] > 0
    assert swap.itl_p99_ms < recompute.itl_p99_ms
