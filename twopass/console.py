"""What is printed is printed as it is: paths, errors and answers may hold brackets and colons that mean something to
rich.
"""

from rich.console import Console


def plain_console(*, stderr: bool = False) -> Console:
    """Without markup and emoji codes. On standard error lines are never wrapped: what is in them can be copied, and
    filtered.
    """
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=stderr)
