"""What form an answer is to have, as plain data. It travels with a request; whoever needs it compiles it
(protocol/llguidance_grammars.py).

An engine's state of a grammar follows from the grammar and the tokens of the answer alone. So a handoff, a preemption
and a retry need to carry nothing more: whoever continues replays the tokens.
"""

from dataclasses import dataclass
from typing import Literal

GrammarKind = Literal["json_object", "json_schema", "regex", "choice"]

MAX_GRAMMAR_BYTES = 64 * 1024
"""Of a grammar's text in UTF-8."""


@dataclass(frozen=True, slots=True)
class Grammar:
    kind: GrammarKind
    text: str = ""
    """A JSON schema, a regular expression, or a JSON list of choices; "" for json_object."""
