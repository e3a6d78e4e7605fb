"""Machine code: compiled once by numba, kept on disk, and never trusted without a digest."""
