"""Files, functions and tests that the pages name exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "ARCHITECTURE.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))]
FILE = re.compile(r"((?:[\w.-]+/)*[\w-]+\.(?:py|md|yaml|json|toml|yml|proto))(?:::?([\w.]+))?|((?:[\w.-]+/)+)")
"""Matches code that is a folder, or a file, possibly with a name in it after a colon (`::` for a test)."""
NAMES = re.compile(r"^ *(?:async )?(?:def|class) (\w+)|^(\w+)(?::.*)? = ", re.MULTILINE)
FOLDERS = [folder for folder in ROOT.iterdir() if folder.is_dir() and not folder.name.startswith(".")]
PATHS = [f"/{path.relative_to(ROOT)}" for folder in FOLDERS for path in folder.rglob("*")]
PATHS += [f"/{path.name}" for path in ROOT.iterdir()]


@pytest.fixture(scope="module")
def everywhere() -> set[str]:
    """All names that any module defines."""
    return set().union(*(names_of(ROOT / path[1:]) for path in PATHS if path.endswith(".py")))


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_is_there(page: str, everywhere: set[str]) -> None:
    wrong = []
    for code in re.findall(r"`([^`\n]+)`", (ROOT / page).read_text()):
        if re.fullmatch(r"(test)?_\w+", code) and code not in everywhere:
            wrong.append(code)
        match = FILE.fullmatch(code)
        if match is None or "NAME" in code:
            continue
        file, name, folder = match.groups()
        found = [path for path in PATHS if path.endswith(f"/{(file or folder).rstrip('/')}")]
        if not found or (name and not any(defined(ROOT / path[1:], name) for path in found)):
            wrong.append(code)
    assert wrong == []


def test_the_reading_order_says_how_long_its_files_are() -> None:
    """The line counts are right to within a fifth, which is enough to plan an evening."""
    listed = re.findall(r"^\| \d+ \| `(\S+)` \| (\d+) \|", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE)
    assert len(listed) == 10
    lines = {file: len((ROOT / file).read_text().splitlines()) for file, _ in listed}
    assert {file: lines[file] for file, said in listed if abs(int(said) - lines[file]) > lines[file] / 5} == {}


def defined(path: Path, name: str) -> bool:
    """Whether a module defines each part of a dotted name."""
    return names_of(path).issuperset(name.split("."))


def names_of(path: Path) -> set[str]:
    """Names that a module defines, including members of its classes."""
    return {name for found in NAMES.findall(path.read_text()) for name in found if name}
