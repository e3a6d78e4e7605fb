"""The one folder in a user's home that twopass writes to: converted models and compiled kernels."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """`TWOPASS_CACHE` if it is set, else ~/.cache/twopass. The folder may not exist yet. Raises FileNotFoundError where
    this user has no home.
    """
    if chosen := os.environ.get("TWOPASS_CACHE"):
        return Path(chosen)
    try:
        home = Path.home()
    except RuntimeError:
        raise FileNotFoundError("no HOME, and none in the list of users: TWOPASS_CACHE can name a folder") from None
    return home / ".cache" / "twopass"
