"""`--timings`: where the time of a deployment's start and end went, as a table."""

from collections.abc import Mapping, Sequence

from rich import box
from rich.table import Table

from protocol.start_times import Phase

COMMAND = "command"
"""Name of the supervisor's own process."""


def timings_table(times: Mapping[str, Sequence[Phase]]) -> Table:
    """Phases by process, in the order in which they began. Seconds count from the first phase of all."""
    rows = sorted((phase.began_at, process, phase) for process, phases in times.items() for phase in phases)
    table = Table(title="Timings (s)", title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    table.add_column("process", style="bold cyan", overflow="fold")
    table.add_column("phase", overflow="fold")
    for name in ("from", "until", "took"):
        table.add_column(name, justify="right")
    for began_at, process, phase in rows:
        seconds = (began_at - rows[0][0], phase.ended_at - rows[0][0], phase.ended_at - began_at)
        table.add_row(process, phase.name, *(f"{value:.2f}" for value in seconds))
    return table
