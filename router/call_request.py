"""What a call asks for, in plain types. Every door decodes its own dialect into this; `parse.py` validates it.

None stands for "not given" wherever a default differs from what the type's zero means. Nothing here has been checked:
numbers may be out of range and texts of any length.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from protocol.grammar import GrammarKind


class Guided(NamedTuple):
    """What form the answer is to have, as in protocol/grammar.py. `choices` stand for the text of a choice. `field`:
    what the client calls it.
    """

    field: str
    kind: GrammarKind
    text: str = ""
    choices: Sequence[str] = ()


class ChatTurn(NamedTuple):
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """Exactly one of the three is given: a text, token ids (integers [num_tokens]), or the turns of a chat."""

    text: str | None = None
    token_ids: Sequence[int] | npt.NDArray[np.integer] | None = None
    chat: Sequence[ChatTurn] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Names, defaults and meaning are those of SamplingParams in twopass/proto/twopass.proto."""

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    n: int = 1
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    include_stop_str_in_output: bool = False
    guided: Guided | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRequest:
    """One call: a prompt and how its `sampling.n` answers are to be written."""

    prompt: Prompt
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    priority: int = 0
    cache_salt: str = ""
    request_id: str | None = None
