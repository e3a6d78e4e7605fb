"""KV blocks move between two engines: layout, lease words, transports, the handoff's transition tables. Nothing here
knows a scheduler.
"""
