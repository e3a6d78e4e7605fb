"""Names of what happens to a running sequence that loses its KV blocks. Engines count under them, the router shows
them.
"""

from typing import Literal, get_args

PreemptionMode = Literal["recompute", "swap", "remote"]
"""How the sequence gets its KV back."""
PreemptionReason = Literal["configured", "host_full", "no_room", "unmeasured", "cheapest"]
"""Why that mode was chosen. `host_full`, `no_room`: what the configuration asks for was not to be had. `unmeasured`: to
learn what it costs.
"""

MODE_COUNTERS: dict[str, str] = {mode: f"preemptions_{mode}" for mode in get_args(PreemptionMode)}
REASON_COUNTERS: dict[str, str] = {reason: f"preemption_reason_{reason}" for reason in get_args(PreemptionReason)}
"""Counters in `ReplicaStatus`, by mode and by reason."""
