"""A GPU as transfers see it: the few calls that it must answer, the driver and a fake that answer them, and the pool
that peers map.
"""
