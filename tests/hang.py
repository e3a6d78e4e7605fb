"""How long a test waits for something that must happen.

The deadline ends tests that hang and never judges speed, because the machine may be busy with other work. pytest's own
deadline (`timeout` in pyproject.toml) is longer, so that the failure comes from the code that waited and can say why.
"""

HANG_S = 600.0
