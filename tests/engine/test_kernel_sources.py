"""No process runs machine code of a source that has changed: every file that a compiled function depends on is one of
its sources.
"""

import ast
import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("numba")

ROOT = Path(__file__).parents[2]
NOT_BAKED = {"jit.kernel_cache", "jit.loops_compile", "protocol.arrays"}
"""How functions are compiled, which every folder is named after, and the types of arrays, which every signature names.
"""
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for package in ("engine", "kv_transfer", "simulator", "bench")
    for path in (ROOT / package).rglob("*.py")
    if "\nSOURCES = (" in path.read_text()
)


class Module:
    """What a module's top level binds: names to definitions, to (module, name) of ours that it imports."""

    def __init__(self, name: str) -> None:
        self.path = file_of(name)
        self.imports: dict[str, tuple[str, str]] = {}
        self.definitions: dict[str, ast.AST] = {}
        self.functions: list[ast.FunctionDef] = []
        for node in ast.parse(self.path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module and (ROOT / node.module.partition(".")[0]).is_dir():
                self.imports |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
            elif isinstance(node, ast.FunctionDef):
                self.functions.append(node)
                self.definitions[node.name] = node
            elif isinstance(node, ast.ClassDef):
                self.definitions[node.name] = node
            elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                self.definitions |= {
                    name.id: node.value for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)
                }


def file_of(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


parsed = cache(Module)


def names_in(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(name, attribute or nothing) of all that is read, annotations and decorators aside."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        yield node.value.id, node.attr
        return
    if isinstance(node, ast.Name):
        yield node.id, ""
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from names_in(child)


def follow(module: str, node: ast.AST, reached: set[tuple[str, str]]) -> None:
    """Adds (module, name) of all of ours that `node`, a part of `module`, depends on."""
    here = parsed(module)
    for name, attribute in names_in(node):
        at = module, name
        if name in here.imports:
            at = here.imports[name]
            if file_of(".".join(at)).exists():
                at = ".".join(at), attribute
        if at[0] in NOT_BAKED or at in reached or (at[0] == module and name not in here.definitions):
            continue
        reached.add(at)
        definition = parsed(at[0]).definitions.get(at[1])
        if definition is not None:
            follow(at[0], definition, reached)


@pytest.mark.parametrize("module", MODULES)
def test_what_a_compiled_function_depends_on_is_among_its_sources(module: str) -> None:
    reached: set[tuple[str, str]] = {(module, "")}
    for function in parsed(module).functions:
        follow(module, function, reached)
    sources = {Path(path) for path in importlib.import_module(module).SOURCES}
    lacking = {f"{name} of {at}" for at, name in reached if file_of(at) not in sources}
    assert not lacking


def test_there_are_sources_to_check() -> None:
    assert {"engine.scheduler.loops_sequences", "engine.runners.cpu_attention", "simulator.summing_runner"} <= set(
        MODULES
    )


ONE_STEP = """
import numpy as np
from engine.runner import Batch
from engine.runners.arithmetic import ArithmeticRunner
from engine.runners.model_of_sums import expected_tokens
from simulator.summing_runner import SummingRunner
line = lambda *numbers: np.array(numbers, np.int32)
batch = Batch(
    step=0, rows=line(0), num_scheduled=line(3), num_computed=line(0), sample=np.ones(1, np.bool_),
    token_ids=line(4, 2, 9, 0).reshape(1, 4), block_tables=line(1).reshape(1, 1),
)
runners = [runner(np.zeros((2, 4), np.int64)) for runner in (ArithmeticRunner, SummingRunner)]
print(*expected_tokens([4, 2, 9], 1), *(runner.execute(batch).token_ids[0, 0] for runner in runners))
"""


def test_a_changed_constant_is_compiled_anew_in_whatever_file_it_is(tmp_path: Path) -> None:
    """The arithmetic model's constants are in the machine code of two packages; here their file has another name,
    too.
    """
    for package in ("jit", "engine", "protocol", "simulator"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    model = tmp_path / "engine/runners/model_of_sums.py"
    (tmp_path / "engine/runners/arithmetic_model.py").rename(model)
    for path in (*tmp_path.glob("engine/runners/arithmetic*.py"), tmp_path / "simulator/summing_runner.py"):
        path.write_text(path.read_text().replace("arithmetic_model", "model_of_sums"))
    for multiplier in (742938285, 950706376):
        model.write_text(model.read_text().replace("742938285", str(multiplier)))
        env = os.environ | {"TWOPASS_CACHE": str(tmp_path / "cache")}
        done = subprocess.run([sys.executable, "-c", ONE_STEP], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert [int(token) for token in done.stdout.split()] == [41 * multiplier % (2**31 - 1) % 32_000] * 3
