"""`--timings` shows the phases of all processes as one story."""

from rich.console import Console

from cluster.timings import timings_table
from protocol.start_times import Phase


def test_phases_of_all_processes_are_in_order_and_count_from_the_first() -> None:
    console = Console(width=80)
    with console.capture() as shown:
        console.print(
            timings_table(
                {
                    "command": [Phase("process", 100.0, 100.5, 0.4), Phase("Ray", 100.5, 102.0, 0.1)],
                    "prefill-0": [Phase("process", 101.0, 101.25, 0.2), Phase("weights", 102.0, 103.0, 2.0)],
                }
            )
        )
    rows = [line.split() for line in shown.get().splitlines() if "." in line]
    assert rows == [
        ["command", "process", "0.00", "0.50", "0.50", "0.40"],
        ["command", "Ray", "0.50", "2.00", "1.50", "0.10"],
        ["prefill-0", "process", "1.00", "1.25", "0.25", "0.20"],
        ["prefill-0", "weights", "2.00", "3.00", "1.00", "2.00"],
    ]
