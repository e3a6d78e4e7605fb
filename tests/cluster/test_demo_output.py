"""The demo prints names, paths and answers as they are, whatever they contain."""

import io

from rich.console import Console

from cluster import demo, demo_prompts, demo_report
from twopass.console import plain_console

FOREIGN = "[/red] [bold]x :warning: /models/of/somebody"


def terminal(width: int) -> tuple[Console, io.StringIO]:
    """A plain console that takes its output for a terminal, and the text that it shows there."""
    console, shown = plain_console(), io.StringIO()
    console.file, console.width = shown, width
    console._force_terminal = True
    return console, shown


def test_progress_beside_the_spinner_is_shown_as_it_is() -> None:
    console, shown = terminal(40)
    with demo._waiting(console) as progress:
        progress(f"model is in {FOREIGN * 4}")
    assert f"model is in {FOREIGN * 4}" in shown.getvalue()


def test_answers_may_say_anything_and_tables_fold() -> None:
    console, shown = terminal(80)
    answer = demo_report.Answer(demo_prompts.Prompt("[/red]", "", 8), text=FOREIGN, token_times_s=[0.1, 0.2])
    console.print(demo_report.answer_table([answer], 60))
    console.print(demo_report.request_table([answer]))
    engine = {
        "replica_id": "decode-0[/red]",
        "num_scheduled_tokens": [{"Z" * 90: 1}],
        "steps": 12345678.0,
        "num_blocks": 5,
        "num_blocks_used": 4,
    }
    console.print(demo_report.engine_table([{**engine, "bytes_moved": 123456789.0, "gb_per_s": 1.5}]))
    text = shown.getvalue()
    assert "…" not in text
    assert FOREIGN[-30:] in text and "decode-0[/red]" in text
    assert text.count("Z") == 90
