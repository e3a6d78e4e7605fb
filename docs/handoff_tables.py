"""Writes the tables of docs/handoff.md from the code: `make docs`.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. Where no docstring gives the text of the last column,
a person writes it. Those words are kept as long as the cells before them are the same in the code. A new row has an
empty last cell, which is to be filled in.
"""

import ast
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, TypeVar, get_args

import kv_transfer.config
import protocol.messages
import router.config
from kv_transfer.state import DECODE_TABLE, DECODE_TIMERS, PREFILL_TABLE, PREFILL_TIMERS, E, S, Table
from protocol.messages import AbortReason, EndKind, FinishReason, PoolName, Role

PAGE = Path(__file__).parent / "handoff.md"
RECORDS = ("Address", "RequestKey", "Envelope", "End", "StageSeconds", "Logprobs", "TokenLogprobs")
"""Classes that messages are made of or travel in."""
DURATIONS: Mapping[ModuleType, tuple[str, ...]] = {
    kv_transfer.config: ("pull_timeout_s", "lease_s", "revoke_s", "max_early_handoffs"),
    router.config: ("status_interval_s", "replica_timeout_s", "router_timeout_s", "max_attempts", "queue_ttl_s"),
}
_BAR = re.compile(r"(?<!\\)\|")
"""The bar between two cells. A bar within a cell is escaped."""
_BLOCK = re.compile(r"<!-- table: (\S+) -->\n(.*?)<!-- end -->\n", re.DOTALL)

Row = tuple[str, ...]
T = TypeVar("T", bound=str)


class Field(NamedTuple):
    name: str
    type: str
    default: str
    """Empty if the field has no default."""
    doc: str


def written(page: str) -> str:
    """The page with all its tables rewritten from the code."""

    def block(match: re.Match[str]) -> str:
        name, text = match.groups()
        return f"<!-- table: {name} -->\n{TABLES[name](text)}<!-- end -->\n"

    return _BLOCK.sub(block, page)


def rows(text: str) -> list[Row]:
    """Cells of the rows in a text, without the heads of its tables. A row is a line whose first cell is code."""
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [tuple(cell.strip().replace(r"\|", "|") for cell in _BAR.split(line)[1:-1]) for line in lines]


def tables(page: str) -> dict[str, list[Row]]:
    """Rows of every table of the page, by the table's name."""
    return {match[1]: rows(match[2]) for match in _BLOCK.finditer(page)}


def transitions(table: Table[S, E]) -> Callable[[str], str]:
    """Pairs (state, event) share a row if they lead to the same states and the page has the same words for them."""

    def write(before: str) -> str:
        said = {(state, event, to): does for state, events, to, does in rows(before) for event in events.split(", ")}
        grouped: dict[Row, list[str]] = {}
        for (state, event), following in table.items():
            source, shown = _code(state), _code(event)
            to = ", ".join(_code(name) for name in type(state) if name in following)
            does = said.get((source, shown, to), "")
            grouped.setdefault((source, to, does or shown), []).append(shown)
        order = [_code(state) for state in type(next(iter(table))[0])]
        found = [(source, ", ".join(events), to, does) for (source, to, does), events in grouped.items()]
        found = [row if row[3] != row[1] else (*row[:3], "") for row in found]  # the page has no words for it
        return _table(("state", "event", "next", "what is done"), sorted(found, key=lambda row: order.index(row[0])))

    return write


def states(timers: Mapping[S, frozenset[T]]) -> Callable[[str], str]:
    def write(before: str) -> str:
        said = {row[0]: row[-1] for row in rows(before)}
        shown = [(_code(state), ", ".join(map(_code, sorted(running))) or "none") for state, running in timers.items()]
        return _table(("state", "timers that may run", "meaning"), [(*row, said.get(row[0], "")) for row in shown])

    return write


def words(before: str) -> str:
    """The values of the small vocabularies that messages use."""
    said = {row[:2]: row[-1] for row in rows(before)}
    names = {
        "PoolName": PoolName,
        "Role": Role,
        "AbortReason": AbortReason,
        "EndKind": EndKind,
        "FinishReason": FinishReason,
    }
    found = [(_code(name), _code(value)) for name, literal in names.items() for value in get_args(literal)]
    return _table(("type", "value", "meaning"), [(*row, said.get(row, "")) for row in found])


def overview(before: str) -> str:
    """The messages that the docstring of protocol/messages.py lists."""
    listed = re.findall(r"^ {4}(\w+) +(\S.*? -> \S.*?) {2,}(\S.*)$", protocol.messages.__doc__ or "", re.MULTILINE)
    return _table(("message", "from, to", "what for"), [(_code(name), way, what) for name, way, what in listed])


def fields(names: Iterable[str]) -> Callable[[str], str]:
    """Name, docstring and fields of each class. A field's docstring replaces the words that the page has for it."""
    classes = _classes(protocol.messages)

    def write(before: str) -> str:
        sections = {part.split("\n")[0]: {row[0]: row[-1] for row in rows(part)} for part in before.split("#### ")}
        text = ""
        for name in names:
            doc, said = ast.get_docstring(classes[name]) or "", sections.get(name, {})
            paragraphs = [" ".join(part.split()) for part in doc.split("\n\n") if part]
            shown = [(_code(field.name), _code(field.type), field.doc) for field in _fields(classes[name])]
            found = [(field, type_, doc or said.get(field, "")) for field, type_, doc in shown]
            text += "\n" + "".join(f"{paragraph}\n\n" for paragraph in (f"#### {name}", *paragraphs))
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
    """Classes by name. They are read from the source, because docstrings of fields are nowhere else."""
    body = ast.parse(inspect.getsource(module)).body
    return {node.name: node for node in body if isinstance(node, ast.ClassDef)}


def _fields(declared: ast.ClassDef) -> list[Field]:
    found: list[Field] = []
    for node in declared.body:
        if isinstance(node, ast.AnnAssign):
            default = "" if node.value is None else ast.unparse(node.value)
            type_ = ast.unparse(node.annotation).replace(" | ", " or ")
            found.append(Field(ast.unparse(node.target), type_, default, ""))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and found:
            found[-1] = found[-1]._replace(doc=" ".join(str(node.value.value).split()))
    return found


def _code(text: str) -> str:
    return f"`{text}`"


def _table(head: Row, body: Iterable[Row]) -> str:
    escaped = [[cell.replace("|", r"\|") for cell in row] for row in (head, ("---",) * len(head), *body)]
    return "".join(f"| {' | '.join(row)} |\n" for row in escaped)


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
