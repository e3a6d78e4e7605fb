"""Pages about the whole, and what keeps their tables equal to the code."""
