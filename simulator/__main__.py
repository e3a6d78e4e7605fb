"""`python -m simulator` plays fault schedules by seed, or measures how fast they are played."""

from simulator.seeds import main

main()
