"""The process of one decode engine, under its own name in process lists."""

from engine.actor import EngineActor


class DecodeActor(EngineActor):
    """Takes KV in, or prefills by itself, and writes tokens: an engine loop around
    `decode_pool.service.DecodeService`.
    """
