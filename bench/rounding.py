"""Estimates how far bfloat16 may move logits: it runs the float32 model with noise wherever the bfloat16 model rounds.

Rounding to the nearest moves a value by up to half the spacing of bfloat16 at that value, which is 2**-9 to 2**-8 of
the value. Over many values it acts like uniform noise of that size. A runner rounds in each layer: the results of both
norms, q, k and v, k again when it is rotated, the attention's output, o, gate and up, their product, and down. After
the layers it rounds the last norm. The residual stream, all sums and the logits are float32. The logits' error is then
one draw from what the noise does to them, on every CPU and GPU and for any order of sums. An error that lies far
outside has another cause.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from engine.models.decoder import Decoder, Linear
from engine.runner import Batch
from engine.runners.step_plan import plan_step
from engine.runners.torch_cpu import TorchCPURunner

BLOCK_SIZE = 16
NUM_DRAWS = 3
NUM_RIVALS = 10
"""The gap of the likeliest token to this many of the next likeliest is looked at."""
DEVIATIONS = 5.0
"""A gap may move by this many of its standard deviations. It moves by more about once in two million times."""


class Expected(NamedTuple):
    """What the noise does to the logits of P positions."""

    logits: torch.Tensor
    """[P, vocab_size]: logits of the float32 model."""
    rms: float
    """Root mean square of the logits' errors, without the part that is common to all logits of a position."""
    gap_deviations: torch.Tensor
    """[P]: standard deviation of the gap between the likeliest token and one of its rivals."""

    def excused_margins(self) -> torch.Tensor:
        """[P]: bfloat16 may choose another token than float32 if float32's token leads by less than this."""
        return DEVIATIONS * self.gap_deviations

    def relative_rms(self, logits: torch.Tensor) -> float:
        """Root mean square error of bfloat16's `logits` [P, vocab_size] divided by the expected one; near 1."""
        return centred(logits - self.logits).square().mean().sqrt().item() / self.rms


def expected_errors(model: Decoder, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> Expected:
    """Errors to expect before every token of the answers, which are teacher-forced and equally long. `model` is
    float32, with weights that bfloat16 can represent.
    """
    logits = teacher_forced(model, prompts, answers)
    errors = torch.stack(
        [teacher_forced(_with_noise(model, seed), prompts, answers) - logits for seed in range(NUM_DRAWS)]
    )
    likeliest = logits.topk(1 + NUM_RIVALS, dim=1).indices.expand(NUM_DRAWS, -1, -1)
    moved = errors.gather(2, likeliest)
    gap_deviations = (moved[:, :, 1:] - moved[:, :, :1]).square().mean((0, 2)).sqrt()
    return Expected(logits, centred(errors).square().mean().sqrt().item(), gap_deviations)


def teacher_forced(model: Decoder, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> torch.Tensor:
    """Logits before every token of the answers, [P, vocab_size]. One step computes all of them, with the answers passed
    as drafts.
    """
    known = [prompt + answer[:-1] for prompt, answer in zip(prompts, answers, strict=True)]
    lengths = np.array([len(ids) for ids in known], np.int32)
    width = -(-int(lengths.max()) // BLOCK_SIZE)
    token_ids = np.zeros((len(known), lengths.max()), np.int32)
    for row, ids in enumerate(known):
        token_ids[row, : len(ids)] = ids
    batch = Batch(
        step=0,
        rows=np.arange(len(known), dtype=np.int32),
        num_scheduled=lengths,
        num_computed=np.zeros(len(known), np.int32),
        sample=np.ones(len(known), np.bool_),
        token_ids=token_ids,
        block_tables=np.arange(len(known) * width, dtype=np.int32).reshape(len(known), width),
        num_drafts=np.full(len(known), len(answers[0]) - 1, np.int32),
    )
    config = model.config
    elements = (1 + len(known) * width) * config.num_layers * 2 * config.num_kv_heads * BLOCK_SIZE * config.head_dim
    cache = torch.zeros(elements, dtype=model.dtype).view(torch.uint8)
    runner = TorchCPURunner(model, cache, block_size=BLOCK_SIZE, num_threads=torch.get_num_threads())
    with torch.inference_mode():
        logits = runner.forward(plan_step(batch, BLOCK_SIZE))
    assert logits is not None
    return logits


def _with_noise(model: Decoder, seed: int) -> Decoder:
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = model.config.num_heads, model.config.num_kv_heads
    keys = slice(num_heads * model.config.head_dim, (num_heads + num_kv_heads) * model.config.head_dim)

    def noisy(x: torch.Tensor) -> torch.Tensor:
        spacing = (x.contiguous().view(torch.int32) & 0x7F800000).view(torch.float32) * 2**-7
        return x + spacing * (torch.rand(x.shape, generator=generator) - 0.5)

    def linear(exact: Linear) -> Linear:
        return lambda x: noisy(exact(noisy(x)))

    def qkv(exact: Linear) -> Linear:
        def computed(x: torch.Tensor) -> torch.Tensor:
            y = noisy(exact(noisy(x)))
            y[:, keys] = noisy(y[:, keys])
            return y

        return computed

    return with_linears(model, linear, qkv)


def with_linears(model: Decoder, change: Callable[[Linear], Linear], change_qkv: Callable[[Linear], Linear]) -> Decoder:
    """The model with `change_qkv` applied to the qkv projection of each layer, and `change` to its other linears."""
    return replace(
        model,
        layers=tuple(
            replace(
                layer,
                qkv=change_qkv(layer.qkv),
                o=change(layer.o),
                gate_up=change(layer.gate_up),
                down=change(layer.down),
            )
            for layer in model.layers
        ),
    )


def centred(errors: torch.Tensor) -> torch.Tensor:
    """Errors minus their mean at each position: an error common to all logits changes no choice and no probability."""
    return errors - errors.mean(-1, keepdim=True)
