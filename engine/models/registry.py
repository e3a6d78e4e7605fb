"""Which models can be served: every family, by the name that `config.json` has in `architectures`. No torch here."""

from pathlib import Path

from engine.models import gemma3, llama, phi3
from engine.models.config import ModelConfig
from engine.models.config_file import ConfigFile, read_json
from engine.models.family import Family, architecture_of
from protocol.errors import ModelError

FAMILIES: dict[str, Family] = {**llama.FAMILIES, **gemma3.FAMILIES, **phi3.FAMILIES}


def read_config(model_dir: Path, max_model_len: int | None = None) -> ModelConfig:
    """Parses `config.json`. `max_model_len`: the longest sequence that the deployment will compute, in tokens, by which
    some models choose their rotary frequencies; None for the model's own.

    Raises ModelError naming the file, the key, what it holds and what is supported.
    """
    if not model_dir.is_dir():
        raise ModelError(f"{model_dir}: no such model directory")
    path = model_dir / "config.json"
    file = ConfigFile(path, read_json(path))
    architecture = architecture_of(file)
    if architecture not in FAMILIES:
        raise file.error(f"architecture {architecture} is unknown, expected one of {', '.join(FAMILIES)}")
    return FAMILIES[architecture].read(file, max_model_len)
