"""`--timings`: where the time of a deployment's start and end went, as a table."""

from collections.abc import Mapping, Sequence

from rich import box
from rich.table import Table

from protocol.start_times import Phase

COMMAND = "command"
"""Name of the supervisor's own process."""


def timings_table(times: Mapping[str, Sequence[Phase]]) -> Table:
    """Phases by process, in the order in which they began. Seconds count from the first phase of all.

    The column CPU is what the process computed meanwhile, in all its threads.
    """
    rows = sorted((phase.began_at, process, phase) for process, phases in times.items() for phase in phases)
    table = Table(title="Timings (s)", title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    table.add_column("process", style="bold cyan", overflow="fold")
    table.add_column("phase", overflow="fold")
    for name in ("from", "until", "took", "CPU"):
        table.add_column(name, justify="right")
    for began_at, process, phase in rows:
        start = rows[0][0]
        seconds = (began_at - start, phase.ended_at - start, phase.ended_at - began_at, phase.cpu_s)
        table.add_row(process, phase.name, *(f"{value:.2f}" for value in seconds))
    return table
