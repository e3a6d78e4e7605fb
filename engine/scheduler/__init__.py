"""Which tokens of which sequences run in the next step, and in which blocks: decided without devices (scheduler.py, the
pass).
"""
