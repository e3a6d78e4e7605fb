"""What the commands share: how they report errors, and consoles that print text unchanged: brackets and colons in
paths, errors and answers mean nothing to them.
"""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

import typer
from rich.console import Console

from twopass.errors import TwopassError

P = ParamSpec("P")


def plain_console(*, stderr: bool = False) -> Console:
    """Returns a console without markup and emoji codes. On standard error it never wraps lines, so that they can be
    copied and filtered.
    """
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=stderr)


def reported(command: Callable[P, None]) -> Callable[P, None]:
    """Turns errors of the client library into one line and exit code 2, and Ctrl-C into exit code 130."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except TwopassError as error:
            plain_console(stderr=True).print(f"{type(error).__name__}: {error}", style="bold red")
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None

    return run
