"""The decision which tokens of which sequences run in the next step, and in which blocks. It is made without devices;
scheduler.py is the pass.
"""
