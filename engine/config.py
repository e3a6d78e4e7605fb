"""The knobs of one engine. They have the names that are usual in LLM serving."""

from dataclasses import dataclass
from typing import Literal

from protocol.errors import ConfigError
from protocol.preemption import PreemptionMode

Knob = Literal[PreemptionMode, "auto"]
"""What `preemption` may say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Budgets and policies of one engine."""

    max_num_batched_tokens: int = 2048
    """Most tokens that one step computes, prompt chunks and decodes together. It is at least `max_num_seqs`."""
    max_num_seqs: int = 64
    """Most sequences that run at once."""
    max_model_len: int = 8192
    """Longest sequence in tokens, prompt and answer together."""
    block_size: int = 16
    """Tokens per KV block."""
    num_blocks: int = 0
    """KV blocks of the pool, with block 0, which is never used. With 0, `kv_cache_bytes` decides."""
    kv_cache_bytes: int = 0
    """Bytes of the pool if `num_blocks` is 0."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory for weights, activations and KV together, if neither `num_blocks` nor
    `kv_cache_bytes` is given.
    """
    preemption: Knob = "recompute"
    """How a running sequence that loses its blocks gets its KV back: recompute computes it again, swap copies it from
    host memory, remote gets it from the prefill pool while that has room, auto takes the cheapest of these. Where swap
    or remote is not possible, the KV is recomputed.
    """
    num_host_blocks: int = 0
    """KV blocks of host memory to swap into. With 0, `swap_space_bytes` decides."""
    swap_space_bytes: int = 0
    """Bytes of host memory to swap into if `num_host_blocks` is 0."""
    enable_chunked_prefill: bool = True
    """If off, a prompt is computed in one step or not at all. An answer that goes on after a preemption, or in another
    engine, is cut into chunks all the same.
    """
    long_prefill_token_threshold: int = 0
    """Most tokens of one sequence in one step; with 0 there is no limit."""
    enable_prefix_caching: bool = True
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    prompt_reservation: Literal["none", "check", "hold"] = "check"
    """Whether an admission needs blocks for all known tokens and not only for its first chunk: none does not, check
    needs them to be free, hold takes them.
    """
    watermark: float = 0.0
    """Share of the pool that an admission must leave free while anything runs."""
    priority_aging_s: float = 60.0
    """Seconds of waiting that are worth one unit of priority; with 0, priorities never change."""
    num_speculative_tokens: int = 0
    """Most drafts per sequence and step, taken from the sequence's earlier tokens; with 0 there is no speculation."""
    async_scheduling: bool = False
    """Builds the next step while one runs. The end of an answer is then noticed one step later."""
    cuda_graph_sizes: tuple[int, ...] = ()
    """Numbers of decodes for which a step was captured, ascending. A step of decodes alone is padded up to
    the next size.
    """
    pad_with_prefill: bool = False
    """Takes no more prompt tokens beside decodes than fill the step up to the next of `cuda_graph_sizes`."""
    thrash_window_s: float = 5.0
    """Seconds over which thrashing is measured."""
    thrash_limit: float = 0.3
    """Tokens recomputed per token generated, beyond which nothing is admitted beside the sequences that run; with 0
    there is no limit.
    """
    stall_timeout_s: float = 120.0
    """An engine whose step takes longer, or that does not answer for longer, counts as dead and is replaced."""

    def max_known_tokens(self, num_blocks: int) -> int:
        """Most known tokens with which a sequence fits into an engine of `num_blocks` blocks, block 0 included,
        and can go on.
        """
        return min(self.max_model_len - 1, (num_blocks - 1) * self.block_size)

    def max_prompt_tokens(self, num_blocks: int) -> int:
        """Longest prompt that an engine of `num_blocks` blocks computes from its beginning."""
        longest = self.max_known_tokens(num_blocks)
        return longest if self.enable_chunked_prefill else min(longest, self.max_num_batched_tokens)

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs", "block_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)} is below 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens: {self.max_num_batched_tokens} is below max_num_seqs: {self.max_num_seqs}; "
                "every running sequence needs one token of a step"
            )
        sizes = ("num_blocks", "kv_cache_bytes", "long_prefill_token_threshold", "num_host_blocks", "swap_space_bytes")
        for name in (*sizes, "priority_aging_s", "num_speculative_tokens", "thrash_limit"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: {getattr(self, name)} is below 0")
        graph_sizes = self.cuda_graph_sizes
        if list(graph_sizes) != sorted(set(graph_sizes)) or min(graph_sizes, default=1) < 1:
            raise ConfigError(f"cuda_graph_sizes: {graph_sizes} is not ascending from 1 on")
        if self.preemption == "swap" and not self.num_host_blocks and not self.swap_space_bytes:
            raise ConfigError("preemption: swap needs num_host_blocks or swap_space_bytes")
        if self.num_speculative_tokens and self.async_scheduling:
            raise ConfigError(
                "num_speculative_tokens: drafts depend on the step before, so async_scheduling must be off"
            )
        if self.pad_with_prefill and not self.cuda_graph_sizes:
            raise ConfigError("pad_with_prefill: needs cuda_graph_sizes")
        for name in ("thrash_window_s", "stall_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: {getattr(self, name)} is not above 0")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(f"gpu_memory_utilization: {self.gpu_memory_utilization} is not in (0, 1]")
        if self.max_model_len < 2:
            raise ConfigError(f"max_model_len: {self.max_model_len} is below 2")
        if not 0.0 <= self.watermark < 1.0:
            raise ConfigError(f"watermark: {self.watermark} is not in [0, 1)")
