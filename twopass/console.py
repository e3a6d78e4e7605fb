"""Consoles that print text unchanged: brackets and colons in paths, errors and answers mean nothing to them."""

from rich.console import Console


def plain_console(*, stderr: bool = False) -> Console:
    """Returns a console without markup and emoji codes. On standard error it never wraps lines, so that they can be
    copied and filtered.
    """
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=stderr)
