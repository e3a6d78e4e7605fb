"""A front door with all that it needs of a model and of the configuration."""

import time
from pathlib import Path

from protocol import start_times
from router.config import RouterConfig
from router.door_link import CoreLink
from router.frontdoor import FrontDoor, Model
from router.metrics_totals import DoorTotals
from router.tokenizer import load_tokenizer
from router.tracing import export_to


def model_name(model_dir: Path | None) -> str:
    return model_dir.name if model_dir is not None else "arithmetic"


def make_door(
    link: CoreLink, config: RouterConfig, model_dir: Path | None, vocab_size: int, totals: DoorTotals
) -> FrontDoor:
    """If `model_dir` is None, prompts and answers are numbers instead of text. Raises ModelError and ConfigError."""
    with start_times.phase("tokenizer"):
        tokenizer = load_tokenizer(model_dir, vocab_size)
    return FrontDoor(
        link,
        tokenizer,
        config,
        Model(model_name(model_dir), vocab_size),
        clock=time.monotonic,
        totals=totals,
        tracing=export_to(config.otlp_endpoint) if config.otlp_endpoint else None,
    )
