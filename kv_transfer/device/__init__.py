"""A GPU as transfers see it: the few calls it must answer, the driver and a fake that answer them, the pool that peers
map.
"""
