"""One engine: scheduler, block manager, runners, models, loop. Knows no pool and no phase."""
