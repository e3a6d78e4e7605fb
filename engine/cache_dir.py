"""The one folder in a user's home that twopass writes to: converted models and compiled kernels."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """`TWOPASS_CACHE` if set, else ~/.cache/twopass; not made yet."""
    return Path(os.environ.get("TWOPASS_CACHE") or Path.home() / ".cache" / "twopass")
