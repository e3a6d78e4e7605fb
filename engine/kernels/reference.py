"""The kernels in plain torch, one function each with the same name and arguments, without how the work is divided: what
tests compare with. Computes in float64.
"""

import torch

from engine.models.config import Activation


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    value = x.double()
    out.copy_(value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps) * weight.double())


def add_rms_norm(h: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    h += delta
    rms_norm(h, weight, eps, out)


def gated_activation(gate_up: torch.Tensor, out: torch.Tensor, activation: Activation) -> None:
    gate, up = gate_up.double().chunk(2, dim=-1)
    active = (
        torch.nn.functional.silu(gate) if activation == "silu" else torch.nn.functional.gelu(gate, approximate="tanh")
    )
    out.copy_(active * up)


def rope_and_cache(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    layer: int,
    q_out: torch.Tensor,
    qk_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    num_heads, head_dim = q_out.shape[1:]
    num_kv_heads, block_size = cache.shape[3], cache.shape[4]
    q, k, v = qkv.unflatten(1, (-1, head_dim)).split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if qk_norm is not None:
        normed_q, normed_k = torch.empty_like(q, dtype=torch.double), torch.empty_like(k, dtype=torch.double)
        rms_norm(q, qk_norm[0], eps, normed_q)
        rms_norm(k, qk_norm[1], eps, normed_k)
        q, k = normed_q, normed_k
    cosine, sine = cos[positions, None].double(), sin[positions, None].double()
    q_out.copy_(_rotate(q, cosine, sine))
    kept = slots >= 0
    blocks, offsets = slots[kept] // block_size, slots[kept] % block_size
    cache[blocks, layer, 0, :, offsets] = _rotate(k, cosine, sine).to(cache.dtype)[kept]
    cache[blocks, layer, 1, :, offsets] = v[kept]


def _rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    half = cosine.shape[-1]
    first, second, rest = x.double().split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine, rest], dim=-1)


def gather_blocks(cache_flat: torch.Tensor, block_ids: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(cache_flat[block_ids])


def scatter_blocks(buffer: torch.Tensor, cache_flat: torch.Tensor, block_ids: torch.Tensor) -> None:
    cache_flat[block_ids] = buffer


def pull_blocks(src_flat: torch.Tensor, src_ids: torch.Tensor, dst_flat: torch.Tensor, dst_ids: torch.Tensor) -> None:
    dst_flat[dst_ids] = src_flat[src_ids]


def paged_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    layer: int,
    block_tables: torch.Tensor,
    starts: torch.Tensor,
    contexts: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
) -> None:
    group, block_size = q.shape[1] // cache.shape[3], cache.shape[4]
    for table, first, end, context in zip(
        block_tables, starts.tolist(), starts[1:].tolist(), contexts.tolist(), strict=False
    ):
        blocks = cache[table[: -(-context // block_size)].long(), layer].double()  # [blocks, 2, K, block_size, D]
        k, v = (
            blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context].repeat_interleave(group, 1)
        )  # [H, context, D]
        for token in range(first, end):
            seen = context - end + token + 1
            if seen <= 0:  # a padding row
                continue
            begin = max(0, seen - window) if window else 0
            scores = torch.einsum("hd,hkd->hk", q[token].double(), k[:, begin:seen]) * scale
            out[token] = torch.einsum("hk,hkd->hd", torch.softmax(scores, dim=-1), v[:, begin:seen])
