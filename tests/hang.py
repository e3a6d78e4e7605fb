"""How long a test waits for what must come. Deadlines here end what hangs; how fast something is they never judge: a
machine may do ten other things meanwhile. pytest's own (`timeout` in pyproject.toml) is longer, so that whoever waited
says what for.
"""

HANG_S = 600.0
