"""`python -m cluster serve ...`: the server's commands where the console script is not installed."""

from twopass.__main__ import main

main()
