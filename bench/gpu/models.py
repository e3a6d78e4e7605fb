"""Models with random weights, their KV caches and their runners."""

import torch

from bench.gpu.setting import Setting
from engine.models.checkpoint import expected_shapes
from engine.models.config import Dtype, ModelConfig, Rope
from engine.models.decoder import Decoder
from engine.models.loading import build_model
from engine.runners.cuda import CUDARunner
from engine.runners.paged_cache import block_bytes
from engine.runners.torch_cpu import TorchCPURunner

BLOCK_SIZE = 16
NUM_BLOCKS = 512
"""KV blocks of the caches of small models."""


def small_config(setting: Setting) -> ModelConfig:
    """Each group has three query heads. The model is small enough for the CPU to compute every answer too."""
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=setting.size(4001, 97),
        hidden_size=setting.size(384, 96),
        intermediate_size=setting.size(1024, 80),
        num_layers=setting.size(4, 1),
        num_heads=6,
        num_kv_heads=2,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope=Rope(theta=10000.0),
        tie_word_embeddings=True,
        max_position_embeddings=1024,
    )


def large_config(setting: Setting) -> ModelConfig:
    """The shape of Llama 3.1 8B."""
    if setting.rehearsal:
        return small_config(setting)
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope=Rope(theta=500000.0),
        tie_word_embeddings=False,
        max_position_embeddings=8192,
    )


def random_model(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int, *, drawn_on: torch.device
) -> Decoder:
    """A model whose weights keep activations near one, so that attention matters. The same seed gives other weights on
    another kind of `drawn_on`.
    """
    generator = torch.Generator(drawn_on).manual_seed(seed)
    shapes = expected_shapes(config)

    def read(name: str) -> torch.Tensor:
        shape = shapes[name]
        mean, deviation = (1.0, 0.1) if len(shape) == 1 else (0.0, (2 / shape[1]) ** 0.5)
        return torch.empty(shape, dtype=dtype, device=drawn_on).normal_(mean, deviation, generator=generator).to(device)

    name_of: dict[torch.dtype, Dtype] = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
    return build_model(config, name_of[dtype], read)


def small_model(setting: Setting, device: torch.device) -> Decoder:
    """A small model in float32 with the same weights on every device."""
    return random_model(small_config(setting), torch.float32, device, setting.seed, drawn_on=torch.device("cpu"))


def large_model(setting: Setting) -> Decoder:
    return random_model(
        large_config(setting), setting.model_dtype, setting.device, setting.seed, drawn_on=setting.device
    )


def make_cache(model: Decoder, num_blocks: int) -> torch.Tensor:
    """A flat uint8 cache on the model's device. It holds random KV, because a step's time may depend on the values."""
    cache = torch.empty(num_blocks * block_bytes(model, BLOCK_SIZE), dtype=torch.uint8, device=model.embed.device)
    for piece in cache.view(model.dtype).split(1 << 30):
        piece.normal_()
    return cache


def cpu_runner(model: Decoder, num_blocks: int) -> TorchCPURunner:
    return TorchCPURunner(
        model, make_cache(model, num_blocks), block_size=BLOCK_SIZE, num_threads=torch.get_num_threads()
    )


def gpu_runner(model: Decoder, cache: torch.Tensor, graph_sizes: tuple[int, ...] = ()) -> CUDARunner:
    """The GPU's runner. In a rehearsal its kernels are interpreted."""
    max_model_len = model.config.max_position_embeddings
    return CUDARunner(model, cache, block_size=BLOCK_SIZE, max_model_len=max_model_len, graph_sizes=graph_sizes)
