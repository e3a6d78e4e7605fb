"""`python -m simulator`: fault schedules by seed, or how fast they are played."""

from simulator.seeds import main

main()
