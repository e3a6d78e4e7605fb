"""The choice of tokens on a GPU: what `engine/sampling.py` does, by `engine/kernels/sampling.py`. In three parts, as
nothing may wait:

metadata = device_sampling_metadata(...)  on the host, before the step is launched; its arrays travel with all else
sample_tokens(logits, sent, last, metadata)      on the device, behind the model
reports(metadata, ...)                    on the host, when the step is done
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.kernels import sampling as kernels
from engine.sampling_metadata import Contexts, Masks, SamplingMetadata
from protocol.arrays import Bool, Int32, Int64
from protocol.messages import TokenLogprobs

Array = npt.NDArray[Any]
Arrays = dict[str, Array]

SAMPLED = ("temperatures", "top_ps", "min_ps", "top_ks", "seeds", "indices")
PENALTIES = ("repetitions", "presences", "frequencies")


class Logprobs(NamedTuple):
    """Of A sequences that asked: float32 [A] of the chosen token; int64 and float32 [A, most] of the likeliest."""

    own: torch.Tensor
    top_token_ids: torch.Tensor
    top: torch.Tensor


class DeviceSamplingMetadata(NamedTuple):
    """Of S sequences."""

    arrays: Arrays
    """For the device, about the N that want more than the likeliest token:

    special                   int64 [N], indices in S
    the names in SAMPLED      [N]
    history, history_rows     int32 [R, longest] known tokens of the rows with penalties, [N] their index; with
                              num_known, answer_bases and
                              the names in PENALTIES [N]; only if there are penalties
    biased, bias              int64, float32 [M]: which of N * vocab_size logits change by how much; only if any do
    forbidden                 int64 [F], likewise: cannot be chosen
    masked, allowed           int64 [G], indices in S, int32 [G, ceil(vocab_size / 32)]: what grammars allow, as in
                              `Masks`; only if there are grammars
    asked                     as below; only if any do
    """
    asked: Int64
    """[A] indices in S that want logprobs."""
    num_top: Int32
    """[A] how many of the likeliest."""


NO_SAMPLING_METADATA = DeviceSamplingMetadata({}, np.zeros(0, np.int64), np.zeros(0, np.int32))


def device_sampling_metadata(
    sampling: SamplingMetadata, contexts: Contexts, vocab_size: int, masks: Masks | None = None
) -> DeviceSamplingMetadata:
    """`contexts.last` is not read: it may not be here yet."""
    special = np.flatnonzero(sampling.special[contexts.rows])
    if not len(special):
        return NO_SAMPLING_METADATA
    rows, num_known = contexts.rows[special], contexts.num_known[special]
    indices = sampling.answer_bases[rows].astype(np.int64) + num_known
    arrays: Arrays = {"special": special, "indices": indices, "seeds": sampling.seeds[rows].view(np.int64)}
    arrays |= {name: getattr(sampling, name)[rows] for name in ("temperatures", "top_ps", "min_ps", "top_ks")}
    arrays |= _penalties(sampling, rows, num_known, contexts.token_ids) | _exceptions(
        sampling, rows, num_known, vocab_size, None if masks is None else masks.final[special]
    )
    if masks is not None and len(masks.which):
        arrays |= {"masked": masks.which, "allowed": masks.allowed}
    asks = sampling.num_logprobs[rows] >= 0
    if asks.any():
        arrays["asked"] = special[asks]
    return DeviceSamplingMetadata(arrays, special[asks], sampling.num_logprobs[rows[asks]])


def sample_tokens(
    logits: torch.Tensor, sent: Mapping[str, torch.Tensor], last: torch.Tensor, metadata: DeviceSamplingMetadata
) -> tuple[torch.Tensor, Logprobs | None]:
    """One token for each row of `logits`, float32 [S, vocab], int32 [S], and logprobs of those that asked. What
    grammars forbid gets -inf in `logits` themselves.

    `sent`: the arrays of `metadata`, on the device; `last`: int32 [S] the last known token of each.
    """
    if "masked" in sent:
        kernels.mask(logits, sent["masked"], sent["allowed"])
    chosen = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    kernels.greedy(logits, chosen)
    if "special" not in sent:
        return chosen, None
    special = sent["special"]
    scores = logits.index_select(0, special)
    if "biased" in sent:
        kernels.add_biases(scores, sent["biased"], sent["bias"])
    if "forbidden" in sent:
        kernels.forbid(scores, sent["forbidden"])
    if "history" in sent:
        kernels.penalise(
            scores,
            torch.empty(scores.shape, dtype=torch.int32, device=scores.device),
            token_ids=sent["history"],
            rows=sent["history_rows"],
            num_known=sent["num_known"],
            last=last.index_select(0, special),
            answer_bases=sent["answer_bases"],
            **{name: sent[name] for name in PENALTIES},
        )
    tokens = torch.empty(len(special), dtype=torch.int32, device=logits.device)
    kernels.sample(scores, out=tokens, **{name: sent[name] for name in SAMPLED})
    chosen.index_copy_(0, special, tokens)
    if "asked" not in sent:
        return chosen, None
    asked, most = sent["asked"], min(int(metadata.num_top.max()), logits.shape[1])
    return chosen, Logprobs(*kernels.logprobs(logits.index_select(0, asked), chosen.index_select(0, asked), most))


def reports(metadata: DeviceSamplingMetadata, own: Array, top_token_ids: Array, top: Array) -> dict[int, TokenLogprobs]:
    """By index in S, each as long as was asked. Arrays as in `Logprobs`, on the host."""
    rows = zip(
        metadata.asked.tolist(),
        metadata.num_top.tolist(),
        own.tolist(),
        top_token_ids.tolist(),
        top.tolist(),
        strict=True,
    )
    told = {}
    for index, count, value, ids, values in rows:
        count -= values[:count].count(float("-inf"))  # what a grammar forbids is no candidate; those are last
        told[index] = TokenLogprobs(value, tuple(ids[:count]), tuple(values[:count]))
    return told


def _penalties(sampling: SamplingMetadata, rows: Int32, num_known: Int32, token_ids: Int32) -> Arrays:
    changed = (sampling.repetitions[rows] != 1) | (sampling.frequencies[rows] != 0) | (sampling.presences[rows] != 0)
    if not changed.any():
        return {}
    kept = np.unique(rows[changed])
    arrays: Arrays = {name: getattr(sampling, name)[rows] for name in PENALTIES}
    return arrays | {
        "history": token_ids[kept, : num_known[changed].max()],
        "history_rows": np.minimum(np.searchsorted(kept, rows), len(kept) - 1).astype(
            np.int32
        ),  # any for a row without penalties
        "num_known": num_known,
        "answer_bases": sampling.answer_bases[rows],
    }


def _exceptions(
    sampling: SamplingMetadata, rows: Int32, num_known: Int32, vocab_size: int, final: Bool | None
) -> Arrays:
    """Biases, and the ends of answers that are still too short. `final`: as in `Masks`."""
    short = sampling.too_short(rows, num_known, final)
    biased, bias, forbidden = [], [], []
    for i, row in enumerate(rows.tolist()):
        token_ids, values = sampling.biases[row]
        if len(token_ids):
            biased.append(i * vocab_size + token_ids.astype(np.int64))
            bias.append(values)
        if short[i] and len(sampling.ending[row]):
            forbidden.append(i * vocab_size + sampling.ending[row].astype(np.int64))
    arrays: Arrays = {"biased": np.concatenate(biased), "bias": np.concatenate(bias)} if biased else {}
    return arrays | ({"forbidden": np.concatenate(forbidden)} if forbidden else {})
