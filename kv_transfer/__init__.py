"""Moves KV blocks between two engines: layout, lease words, transports, the handoff's transition table. Knows no
scheduler.
"""
