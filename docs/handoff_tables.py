"""Writes the tables of docs/handoff.md from the code: `python -m docs.handoff_tables`, or `make docs`.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. Its last column is written by a person where no docstring says the
same, and is kept as long as the cells before it are still the code's. A new row begins with an empty last cell: fill it in.
"""

import ast
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, get_args

import kv_transfer.config
import protocol.messages
import router.config
from kv_transfer.state import DECODE_TABLE, DECODE_TIMERS, PREFILL_TABLE, PREFILL_TIMERS, Table
from protocol.messages import AbortReason, EndKind, FinishReason, Role

PAGE = Path(__file__).parent / "handoff.md"
RECORDS = ("Address", "RequestKey", "Envelope", "End", "StageSeconds", "Logprobs", "TokenLogprobs")
"""What messages are made of, and travel in."""
DURATIONS: Mapping[ModuleType, tuple[str, ...]] = {
    kv_transfer.config: ("pull_timeout_s", "lease_s", "revoke_s", "max_early_handoffs"),
    router.config: ("status_interval_s", "replica_timeout_s", "router_timeout_s", "max_attempts", "queue_ttl_s"),
}
_BLOCK = re.compile(r"<!-- table: (\S+) -->\n(.*?)<!-- end -->\n", re.DOTALL)

Row = tuple[str, ...]


class Field(NamedTuple):
    name: str
    type: str
    default: str
    """Empty where there is none."""
    doc: str


def written(page: str) -> str:
    """The page with all its tables as the code has them."""

    def block(match: re.Match[str]) -> str:
        name, text = match.groups()
        return f"<!-- table: {name} -->\n{TABLES[name](text)}<!-- end -->\n"

    return _BLOCK.sub(block, page)


def rows(text: str) -> list[Row]:
    """Cells of its tables, without their heads: the first cell of a row is code."""
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in text.splitlines() if line.startswith("| `")]


def tables(page: str) -> dict[str, list[Row]]:
    """By name, the rows of every table of the page."""
    return {match[1]: rows(match[2]) for match in _BLOCK.finditer(page)}


def transitions(table: Table[StrEnum, StrEnum]) -> Callable[[str], str]:
    """Pairs that lead to the same states, and of which the same is said, share a row."""

    def write(before: str) -> str:
        said = {(state, event, to): does for state, events, to, does in rows(before) for event in events.split(", ")}
        grouped: dict[Row, list[str]] = {}
        for (state, event), following in table.items():
            source, shown = _code(state), _code(event)
            to = ", ".join(_code(name) for name in type(state) if name in following)
            does = said.get((source, shown, to), "")
            grouped.setdefault((source, to, does or shown), []).append(shown)
        order = [_code(state) for state in type(next(iter(table))[0])]
        found = [(source, ", ".join(events), to, does if does not in events else "") for (source, to, does), events in grouped.items()]
        return _table(("state", "event", "next", "what is done"), sorted(found, key=lambda row: order.index(row[0])))

    return write


def states(timers: Mapping[StrEnum, frozenset[str]]) -> Callable[[str], str]:
    def write(before: str) -> str:
        said = {row[0]: row[-1] for row in rows(before)}
        return _table(
            ("state", "timers that may run", "meaning"),
            [(_code(state), ", ".join(map(_code, sorted(running))) or "none", said.get(_code(state), "")) for state, running in timers.items()],
        )

    return write


def words(before: str) -> str:
    """The values of the small vocabularies that messages use."""
    said = {row[:2]: row[-1] for row in rows(before)}
    names = {"Role": Role, "AbortReason": AbortReason, "EndKind": EndKind, "FinishReason": FinishReason}
    found = [(_code(name), _code(value)) for name, literal in names.items() for value in get_args(literal)]
    return _table(("type", "value", "meaning"), [(*row, said.get(row, "")) for row in found])


def overview(before: str) -> str:
    """As the head of protocol/messages.py lists them."""
    listed = re.findall(r"^ {4}(\w+) +(\S.*? -> \S.*?) {2,}(\S.*)$", protocol.messages.__doc__ or "", re.MULTILINE)
    return _table(("message", "from, to", "what for"), [(_code(name), way, what) for name, way, what in listed])


def fields(names: Iterable[str]) -> Callable[[str], str]:
    """For each class its name, its docstring and its fields. What is said of a field is its docstring where it has one."""
    classes = _classes(protocol.messages)

    def write(before: str) -> str:
        sections = {part.partition("\n")[0]: {row[0]: row[-1] for row in rows(part)} for part in before.split("#### ")}
        text = ""
        for name in names:
            doc, said = ast.get_docstring(classes[name]) or "", sections.get(name, {})
            text += f"\n#### {name}\n\n" + "".join(f"{' '.join(part.split())}\n\n" for part in doc.split("\n\n") if part)
            found = [(_code(field.name), _code(field.type), field.doc or said.get(_code(field.name), "")) for field in _fields(classes[name])]
            text += _table(("field", "type", "meaning"), found)
        return text + "\n"

    return write


def durations(before: str) -> str:
    found = []
    for module, names in DURATIONS.items():
        declared = {field.name: field for one in _classes(module).values() for field in _fields(one)}
        found += [(_code(name), declared[name].default, declared[name].doc) for name in names]
    return _table(("setting", "default", "meaning"), found)


def _classes(module: ModuleType) -> dict[str, ast.ClassDef]:
    """By name; from the source, because docstrings of fields are nowhere else."""
    return {node.name: node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.ClassDef)}


def _fields(declared: ast.ClassDef) -> list[Field]:
    found: list[Field] = []
    for node in declared.body:
        if isinstance(node, ast.AnnAssign):
            default = "" if node.value is None else ast.unparse(node.value)
            found.append(Field(ast.unparse(node.target), ast.unparse(node.annotation).replace(" | ", " or "), default, ""))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and found:
            found[-1] = found[-1]._replace(doc=" ".join(str(node.value.value).split()))
    return found


def _code(text: str) -> str:
    return f"`{text}`"


def _table(head: Row, body: Iterable[Row]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ("---",) * len(head), *body))


TABLES: dict[str, Callable[[str], str]] = {
    "messages": overview,
    "message-fields": fields([message.__name__ for message in get_args(protocol.messages.Message)]),
    "record-fields": fields(RECORDS),
    "words": words,
    "prefill-states": states(PREFILL_TIMERS),
    "prefill-transitions": transitions(PREFILL_TABLE),
    "decode-states": states(DECODE_TIMERS),
    "decode-transitions": transitions(DECODE_TABLE),
    "durations": durations,
}


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
