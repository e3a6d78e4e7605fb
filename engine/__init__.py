"""One engine: scheduler, block manager, runners, models, loop. It knows no pool and no phase."""
