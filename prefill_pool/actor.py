"""The process of one prefill engine, under its own name in process lists."""

from engine.actor import EngineActor


class PrefillActor(EngineActor):
    """Computes prompts and offers their KV: an engine loop around `prefill_pool.service.PrefillService`."""
