"""Which version runs here."""

import importlib.metadata


def version() -> str:
    """Version of the installed package, or "" where the server runs from a source tree."""
    try:
        return importlib.metadata.version("twopass")
    except importlib.metadata.PackageNotFoundError:
        return ""
