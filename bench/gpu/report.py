"""The findings of a section, as text and as JSON. A figure is a cell of a table, and its column's head names its unit.

A column is `measured` if its figures depend on the machine's speed. A rehearsal computes such figures too, but does not
report them.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

Cell = str | int | float | None


class Column(NamedTuple):
    name: str
    unit: str = ""
    measured: bool = False


class Table(NamedTuple):
    title: str
    columns: tuple[Column, ...]
    rows: list[tuple[Cell, ...]]


class Note(NamedTuple):
    """How something was done, or what could not be done."""

    text: str


class Problem(NamedTuple):
    """Something is wrong, and the section fails."""

    text: str


class NotRun(NamedTuple):
    """The whole section cannot run on this machine."""

    why: str


class Facts(NamedTuple):
    """Facts about the machine."""

    values: dict[str, Cell]


Item = Table | Note | Problem | NotRun | Facts


@dataclass(slots=True)
class Section:
    """The outcome of one section, which is filled while the section runs."""

    name: str
    rehearsal: bool
    status: str = "ok"
    """One of "ok", "failed" and "not run"."""
    seconds: float = 0.0
    why: str = ""
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    facts: dict[str, Cell] = field(default_factory=dict)

    def take(self, item: Item) -> None:
        match item:
            case Table():
                self.tables.append(_without_figures(item) if self.rehearsal else item)
            case Note():
                self.notes.append(item.text)
            case Problem():
                self.problems.append(item.text)
                self.status, self.why = "failed", self.why or item.text
            case NotRun():
                self.status, self.why = "not run", item.why
            case Facts():
                self.facts |= item.values

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "status": self.status,
            "seconds": round(self.seconds, 1),
            "why": self.why,
            "tables": [
                {
                    "title": table.title,
                    "columns": [{"name": c.name, "unit": c.unit, "measured": c.measured} for c in table.columns],
                    "rows": [list(row) for row in table.rows],
                }
                for table in self.tables
            ],
            "notes": self.notes,
            "problems": self.problems,
        }

    def as_text(self) -> str:
        lines = [f"== {self.name}: {self.status}{': ' + self.why if self.why else ''} ({self.seconds:.1f} s)"]
        for name, value in self.facts.items():
            lines.append(f"   {name}: {value}")
        for table in self.tables:
            lines += ["", *render(table, "rehearsal" if self.rehearsal else "-")]
        lines += [f"   {text}" for text in self.notes]
        lines += [f"   PROBLEM {text}" for text in self.problems]
        return "\n".join(lines)


def render(table: Table, missing: str = "-") -> list[str]:
    """Lines of the title, the head with units, and the rows. Text is aligned to the left and figures to the right.
    `missing` is shown for a figure that is None.
    """
    heads = [f"{column.name} [{column.unit}]" if column.unit else column.name for column in table.columns]
    cells = [[_cell(value, missing) for value in row] for row in table.rows]
    widths = [max(len(line[i]) for line in [heads, *cells]) for i in range(len(heads))]
    is_text = [all(isinstance(row[i], str) for row in table.rows) for i in range(len(heads))]
    lines = [heads, *cells]
    aligned = [
        "   "
        + "  ".join(
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(line, widths, is_text, strict=True)
        )
        for line in lines
    ]
    return [f"   {table.title}", *(line.rstrip() for line in aligned)]


def _cell(value: Cell, missing: str) -> str:
    if value is None:
        return missing
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _without_figures(table: Table) -> Table:
    rows = [
        tuple(None if c.measured else value for value, c in zip(row, table.columns, strict=True)) for row in table.rows
    ]
    return Table(table.title, table.columns, rows)
