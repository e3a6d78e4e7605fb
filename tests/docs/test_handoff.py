"""docs/handoff.md agrees with the code: its tables are the code's, its reasons are those that the services give."""

import ast

import pytest

from docs.handoff_tables import PAGE, TABLES, rows, tables, written
from protocol.messages import Message
from protocol.router_link import ROUTER_SILENT

ROOT = PAGE.parents[1]


def test_every_table_is_as_the_code_has_it() -> None:
    page = PAGE.read_text()
    assert set(tables(page)) == set(TABLES)
    assert written(page) == page, "docs/handoff.md differs from the code: run `make docs`, read what changed"


def test_nothing_is_left_unsaid() -> None:
    silent = [(name, *row) for name, found in tables(PAGE.read_text()).items() for row in found if not row[-1]]
    assert silent == [], "fill in the last cells of these rows of docs/handoff.md"


def test_every_message_is_listed() -> None:
    listed = [row[0].strip("`") for row in tables(PAGE.read_text())["messages"]]
    assert listed == [message.__name__ for message in Message.__args__]


@pytest.mark.parametrize(("service", "engine"), [("prefill_pool/service.py", "P"), ("decode_pool/service.py", "D")])
def test_the_reasons_are_those_that_the_services_give(service: str, engine: str) -> None:
    """Every text that is passed as a reason is listed, and every listed reason stands in the service."""
    section = PAGE.read_text().split("## Reasons\n")[1].split("\n## ")[0]
    listed = {row[0].strip("`") for row in rows(section) if engine in row[1].split(", ")}
    tree = ast.parse((ROOT / service).read_text())
    assert passed_as_reason(tree) - listed == set()
    assert listed - texts(tree) == set()


def test_a_page_that_differs_is_made_right_and_words_stay_where_rows_do() -> None:
    page = PAGE.read_text()
    row = "| `leased` | `consumed` | `gone` | D has all of it. |\n"
    assert row in page
    assert written(page.replace(row, row + row.replace("consumed", "eaten"))) == page
    for wrong in ("", row.replace("`gone`", "`revoking`")):
        assert written(page.replace(row, wrong)) == page.replace(row, row.replace("D has all of it.", ""))
    said = "| `lease_index` | `int` |"
    assert written(page.replace(said, "| `lease_index` | `str` |")) == page
    assert written(page.replace(said, "| `slot` | `int` |")) != page


def passed_as_reason(tree: ast.Module) -> set[str]:
    """Texts that a service passes to its own methods as `reason` or `error`."""
    methods = {
        node.name: [argument.arg for argument in node.args.args[1:] + node.args.kwonlyargs]
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    }
    found: set[str] = set()
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in methods:
            bound = dict(zip(methods[call.func.attr], call.args, strict=False))
            bound |= {word.arg: word.value for word in call.keywords if word.arg}
            found |= {text for name in ("reason", "error") if name in bound for text in texts(bound[name])}
    return found


def texts(node: ast.AST) -> set[str]:
    """All strings below a node that are not empty."""
    constants = {
        part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)
    }
    names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return (constants | ({ROUTER_SILENT} if "ROUTER_SILENT" in names else set())) - {""}
