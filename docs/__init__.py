"""Pages about the whole project, and the script that keeps their tables equal to the code."""
