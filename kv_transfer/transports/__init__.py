"""How blocks move: a file for each transport, the thread and the copy loop that they share, staging/ for host_staged
alone.
"""
