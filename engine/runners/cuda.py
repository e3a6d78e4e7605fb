"""The real model on a GPU: cuBLAS for its linears, our Triton kernels for all else, attention over a block-major paged
cache.

0. Blocks of preempted sequences are copied to the host and back, in the order of the device's work.
1. `plan_step` lays the batch flat, as on the CPU; one copy brings all of its numbers to the device, those for sampling
   too.
2. Tokens that the step before is still choosing are taken from its output on the device.
3. The layers; decodes alone as a padded CUDA graph where there is one of their size (cuda_graphs.py).
4. One token is chosen after each that samples, and copied to the host. `launch` returns here; nothing has waited for
   the device.
5. `result` waits for that copy. Where drafts were verified, those that were chosen too stand.

Work of two steps may be under way at once: the device takes it in the order in which it was launched.
"""

from collections.abc import Callable

import numpy as np
import torch

from engine.kernels.attention_work import Work, attention_work
from engine.kernels.launch import compiled, require_device
from engine.kernels.paged_attention import (
    HEAD_DIMS,
    Launch,
    attention_grids,
    make_workspace,
    paged_attention,
    variants,
)
from engine.kernels.sampling import mask
from engine.models.decoder import Decoder, float32_logits, forward
from engine.runner import Batch, StepOutput
from engine.runners.cuda_copies import DeviceEvent, SwapCopies, fetch, upload
from engine.runners.cuda_graphs import TOKEN_IDS, DecodeGraphs, packed_decodes, step_rows
from engine.runners.cuda_ops import CUDAOps, DeviceStep
from engine.runners.cuda_sampling import (
    NO_SAMPLING_METADATA,
    Arrays,
    DeviceSamplingMetadata,
    device_sampling_metadata,
    reports,
    sample_tokens,
)
from engine.runners.drafts import accept
from engine.runners.host_copies import nothing_sampled
from engine.runners.paged_cache import paged_cache
from engine.runners.step_plan import StepPlan, plan_step
from engine.sampling_metadata import Contexts, Masker, Masks
from protocol.errors import ConfigError

Tensors = dict[str, torch.Tensor]
Works = dict[int, list[Work]]
"""Attention's launches of a step, by window."""


class DeviceLost(Exception):
    """The driver reports an error after which this process computes no more. No RuntimeError: the engine must end, and
    is replaced.
    """


class LaunchedStep:
    """`finish` makes the output once the marks have passed."""

    def __init__(
        self,
        begun: DeviceEvent,
        swapped: DeviceEvent,
        ended: DeviceEvent,
        swapped_bytes: int,
        finish: Callable[[], StepOutput],
        compiled: tuple[str, ...],
    ) -> None:
        self._begun, self._swapped, self._ended, self._swapped_bytes, self._finish = (
            begun,
            swapped,
            ended,
            swapped_bytes,
            finish,
        )
        self._compiled = compiled

    def result(self) -> StepOutput:
        """Waits for the device. From any thread, once."""
        try:
            self._ended.wait()
        except torch.AcceleratorError as error:
            raise DeviceLost(str(error)) from error
        output = self._finish()
        output.seconds = self._ended.seconds_since(self._begun)
        output.compiled = self._compiled
        output.swapped_bytes = self._swapped_bytes
        output.swap_seconds = self._swapped.seconds_since(self._begun) if self._swapped_bytes else 0.0
        return output


class CUDARunner:
    """`model` and `cache` (flat uint8, owned by the caller, used in place) lie on one device, the one
    torch computes on now. `masker`: as in `TorchCPURunner`.

    `graph_sizes`, ascending: numbers of decodes for which a step is captured, here and now. On CPU tensors Triton's
    interpreter computes all of this, for tests.
    Raises CapacityError as `paged_cache` does, ConfigError for shapes that the kernels do not take or where they
    cannot run.
    """

    def __init__(
        self,
        model: Decoder,
        cache: torch.Tensor,
        *,
        block_size: int,
        max_model_len: int,
        graph_sizes: tuple[int, ...] = (),
        num_host_blocks: int = 0,
        masker: Masker | None = None,
    ) -> None:
        require_device()
        # TF32 keeps 10 bits of 23, and float32 is the exact dtype. An image may have turned it on (NVIDIA's set
        # TORCH_ALLOW_TF32_CUBLAS_OVERRIDE). Graphs capture the kernels that this chooses.
        torch.set_float32_matmul_precision("highest")
        # Where cuBLAS splits a product's terms among programs, it may add their sums in 16 bits, float16 up to 65504.
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        _check_shapes(model, block_size)
        self.cache = paged_cache(cache, model, block_size)
        self.model, self.block_size, self.device = model, block_size, cache.device
        self._masker = masker
        num_sms = (
            torch.cuda.get_device_properties(self.device).multi_processor_count if self.device.type == "cuda" else 1
        )
        config = model.config
        heads = config.num_heads, config.num_kv_heads, config.head_dim
        self._windows = tuple(sorted({layer.attention.window for layer in model.layers}))
        self._grids = attention_grids(*heads, model.dtype, num_sms)
        self._workspace = make_workspace(self._grids, *heads, self.device)
        self._copies = SwapCopies(cache.view(len(self.cache), -1), num_host_blocks)
        self._last = torch.zeros(0, dtype=torch.int32, device=self.device)
        """[num_rows] the newest token of every row, for batches in which it is still pending; not kept with drafts,
        where none ever is.
        """
        with torch.inference_mode():
            self._graphs = DecodeGraphs(
                self._forward,
                graph_sizes,
                max_blocks=-(-max_model_len // block_size),
                windows=self._windows,
                grid=self._grids[0],
                device=self.device,
            )
        self._num_compiled = len(compiled)

    def close(self) -> None:
        """Gives pinned memory back, once no step is in flight. The second time nothing happens."""
        self._copies.close()

    def execute(self, batch: Batch) -> StepOutput:
        return self.launch(batch).result()

    @torch.inference_mode()
    def launch_attention(self) -> None:
        """Launches every kernel that attention may choose, over no keys: nothing of the cache is read or written. Which
        of them a step takes depends on how the lengths of its sequences meet.
        """
        config, none = self.model.config, torch.zeros(2, dtype=torch.int32, device=self.device)
        q = torch.zeros(1, config.num_heads, config.head_dim, dtype=self.model.dtype, device=self.device)
        for window, launch in variants(self._grids, self._windows, self.device):
            paged_attention(
                q, self.cache, 0, none[None], none, none, q,
                scale=1.0, launches=[launch], workspace=self._workspace, window=window,
            )  # fmt: skip

    @torch.inference_mode()
    def launch_mask(self) -> None:
        """Launches what masks logits under a grammar, over logits of nobody."""
        vocab_size = self.model.config.vocab_size
        logits = torch.zeros(1, vocab_size, device=self.device)
        rows = torch.zeros(1, dtype=torch.int64, device=self.device)
        mask(logits, rows, torch.zeros(1, -(-vocab_size // 32), dtype=torch.int32, device=self.device))

    @torch.inference_mode()
    def launch(self, batch: Batch) -> LaunchedStep:
        """Gives the device its orders. `batch`'s arrays are read before this returns."""
        try:
            begun = DeviceEvent(self.device)
            swapped_bytes = self._copies.launch(batch)
            swapped = DeviceEvent(self.device) if swapped_bytes else begun
            finish = self._launch(batch) if len(batch.rows) else lambda: nothing_sampled(0, 0.0)
            ended = DeviceEvent(self.device)
            new = tuple(compiled[self._num_compiled :])
            self._num_compiled += len(new)
            return LaunchedStep(begun, swapped, ended, swapped_bytes, finish, new)
        except torch.AcceleratorError as error:
            raise DeviceLost(str(error)) from error

    def _launch(self, batch: Batch) -> Callable[[], StepOutput]:
        if len(self._last) < len(batch.token_ids):
            self._last = torch.nn.functional.pad(self._last, (0, len(batch.token_ids) - len(self._last)))
        plan = plan_step(batch, self.block_size)
        size = self._graphs.size_for(len(batch.rows)) if int(batch.num_scheduled.max()) == 1 else None
        metadata, failures = self._sampling_metadata(plan, batch)
        works = {window: attention_work(self._grids, plan.starts, plan.contexts, window) for window in self._windows}
        sent = upload(_step_arrays(plan, batch, size, works) | metadata.arrays, self.device)
        if size is not None:
            sent["token_ids"] = step_rows(sent["packed"], size)[TOKEN_IDS]
        if batch.pending is not None:
            newest = self._last.index_select(0, sent["pending_rows"])
            sent["token_ids"].index_copy_(0, sent["pending_tokens"], newest)
        x = self._computed(plan, sent, size, works)
        if x is None:
            return lambda: accept(plan, np.zeros(0, np.int32), {})
        last = sent["token_ids"].index_select(0, sent["sampled_tokens"])
        chosen, logprobs = sample_tokens(float32_logits(x, self.model.lm_head), sent, last, metadata)
        if batch.num_drafts is None:
            self._last.index_copy_(0, sent["sampled_rows"], chosen)
        tokens, told = fetch(chosen), [fetch(tensor) for tensor in logprobs or ()]
        return lambda: accept(plan, tokens, reports(metadata, *told) if told else {}, failures)

    def _sampling_metadata(self, plan: StepPlan, batch: Batch) -> tuple[DeviceSamplingMetadata, dict[int, str]]:
        """And which sequences cannot go on under their grammar, as in `Masks`. All tokens of those under one are known
        here: the scheduler sees to it.
        """
        if batch.sampling is None or not len(plan.sampled_tokens):
            return NO_SAMPLING_METADATA, {}
        rows = np.repeat(batch.rows[plan.sampled], 1 + plan.num_drafts)
        num_known = (plan.positions[plan.sampled_tokens] + 1).astype(np.int32)
        contexts = Contexts(rows, num_known, batch.token_ids, num_known)
        masks: Masks | None = None if self._masker is None else self._masker.masks(batch.sampling, contexts)
        metadata = device_sampling_metadata(batch.sampling, contexts, self.model.config.vocab_size, masks)
        return metadata, {} if masks is None else masks.errors

    def _computed(self, plan: StepPlan, sent: Tensors, size: int | None, works: Works) -> torch.Tensor | None:
        """What goes into the head: [L, hidden]; None if L is 0."""
        num_sampled, num_tokens = len(plan.sampled_tokens), len(plan.token_ids)
        if size is not None:
            x = self._graphs.run(size, sent["packed"], sent["block_tables"])[:num_tokens]
            if num_sampled < num_tokens:
                x = x.index_select(0, sent["sampled_tokens"])
            return x if num_sampled else None
        step = DeviceStep(
            token_ids=sent["token_ids"],
            positions=sent["positions"],
            slots=sent["slots"],
            starts=sent["starts"],
            contexts=sent["contexts"],
            block_tables=sent["block_tables"],
            kept=None if num_sampled == num_tokens else sent["sampled_tokens"],
            launches={
                window: [Launch(work.grid, sent[_name(window, work)], work.num_merges) for work in launches]
                for window, launches in works.items()
            },
        )
        return self._forward(step)

    def _forward(self, step: DeviceStep) -> torch.Tensor | None:
        return forward(self.model, CUDAOps(self.model, self.cache, step, self._workspace), step.token_ids, step.kept)


def _name(window: int, work: Work) -> str:
    return f"work of window {window}, {work.grid.queries} queries"


def _step_arrays(plan: StepPlan, batch: Batch, size: int | None, works: Works) -> Arrays:
    """The step's numbers; `token_ids` and the rest of T, and attention's work, in one array `packed` where it is padded
    up to `size`.
    """
    arrays: Arrays = {"sampled_tokens": plan.sampled_tokens.astype(np.int32), "block_tables": plan.block_tables}
    if size is not None:
        arrays["packed"] = packed_decodes(plan, size, list(works.values()))
    else:
        arrays |= {_name(window, work): work.array for window, launches in works.items() for work in launches}
        arrays |= {
            name: getattr(plan, name).astype(np.int32)
            for name in ("token_ids", "positions", "slots", "starts", "contexts")
        }
    if batch.num_drafts is None:
        arrays["sampled_rows"] = batch.rows[plan.sampled].astype(np.int64)
    if batch.pending is not None:
        arrays["pending_rows"] = batch.rows[batch.pending].astype(np.int64)
        arrays["pending_tokens"] = plan.starts[:-1][batch.pending]
    return arrays


def _check_shapes(model: Decoder, block_size: int) -> None:
    if model.config.head_dim not in HEAD_DIMS:
        raise ConfigError(
            f"head_dim: {model.config.head_dim}, GPU kernels take {', '.join(map(str, HEAD_DIMS))}; choose `device: "
            "cpu`"
        )
    if block_size & (block_size - 1):
        raise ConfigError(f"block_size: {block_size}, GPU kernels take powers of two")
