"""The scheduler's properties in every preemption mode. Beyond those of every load, each host block has one owner and
holds the right KV.

The model copies when a batch executes, which is as late as possible. A transfer writes into its destination as soon as
that is reserved.
"""

from typing import Any, get_args

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from engine.config import Knob
from tests.engine.scheduler.chain_model import step_kv
from tests.engine.scheduler.test_scheduler_properties import SchedulerMachine


class PreemptionMachine(SchedulerMachine):
    def preemption_knobs(self, draw: Any) -> dict[str, Any]:
        self.copy_block_s = draw(st.sampled_from([0.0001, 0.1]), "copy_block_s")
        return {
            "preemption": draw(st.sampled_from([knob for knob in get_args(Knob) if knob != "recompute"]), "preemption"),
            "num_host_blocks": draw(st.sampled_from([3, 10, 40]), "num_host_blocks"),
        }

    @rule(room=st.sampled_from([0, 3, 100]))
    def hear_of_the_prefill_pool(self, room: int) -> None:
        self.model.copy_block_s = self.copy_block_s
        self.scheduler.set_prefill_room(room, 999)

    @invariant()
    def what_was_swapped_is_safe(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        swapped, size = self.scheduler.swapped, self.config.block_size
        owned = [block for _, blocks in swapped for block in blocks]
        assert len(owned) == len(set(owned)) == self.config.num_host_blocks - self.scheduler.num_free_host_blocks
        coming = {
            block for batch in self.batches if batch.swap_out is not None for block in batch.swap_out[:, 1].tolist()
        }
        assert len(self.batches) < 2 or not coming, "nothing is scheduled before blocks are copied out"
        for tokens, blocks in swapped:
            if coming.isdisjoint(blocks):
                kv = 0
                for position, token_id in enumerate(tokens.tolist()):
                    kv = step_kv(kv, token_id, position)
                    assert self.model.host[blocks[position // size], position % size] == kv


TestPreemption = PreemptionMachine.TestCase
TestPreemption.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
