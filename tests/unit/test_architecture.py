"""Rules of import, read from the sources: one level imports only those below it, and only the seam imports vLLM."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"vllm_spac": "vllm_spac", "triton_kernels": "vllm_spac.kernels", "benchmarks": "benchmarks"}

# A module belongs to the longest prefix that matches it. What is not named here fails a test.
LEVELS = {
    # what all others may use
    "kernels": 0,
    "errors": 0,
    "core": 0,
    "metrics": 0,
    "system": 0,
    "timeline": 0,
    "checkpoint": 0,
    # families: their own base, and never one another
    "policies": 1,
    "tiers": 1,
    "balancers": 1,
    "executors": 1,
    "predictors": 1,
    "budget.rankings": 1,
    "budget.calibration": 1,
    "budget.limits": 1,
    "traces": 1,
    # mechanisms
    "components": 2,
    "config": 2,
    "knobs": 2,
    "budget": 2,
    "cache": 2,
    "prediction": 2,
    "speculation": 2,
    "execution": 2,
    "distributed": 2,
    "profiling.costs": 2,
    "profiling.fit": 2,
    "profiling.timing": 2,
    "profiling.serving": 2,
    "recordings": 2,
    "runtime": 3,
    # tools
    "profiling": 4,
    "simulation": 4,
    "evaluation": 4,
    "diagnosis": 4,
    "planning": 4,
    "tuning": 4,
    "traces.statistics": 4,
    # vLLM, and the command line
    "integration": 5,
    "cli": 6,
}
# MoE-SpAc's policy evicts by its estimator's score, which also predicts.
BETWEEN_FAMILIES = {("policies", "predictors")}
_BUDGET = {"budget.rankings", "budget.calibration", "budget.limits"}


@dataclass(frozen=True)
class Import:
    """One name that a module imports; ``name`` is None for a module."""

    importer: str
    target: str
    name: str | None
    line: int

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.target}{f'.{self.name}' if self.name else ''}"


@cache
def modules() -> dict[str, Path]:
    """Dotted name -> file of everything that is installed or run."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([package, *(part for part in parts if part != "__init__")])] = path
    return found


@cache
def imports() -> tuple[Import, ...]:
    return tuple(found for module, path in modules().items() for found in _imports_of(module, path))


def _imports_of(module: str, path: Path) -> Iterator[Import]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, alias.name, None, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module if path.name == "__init__.py" else module.rpartition(".")[0]
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield (
                    Import(module, full, None, node.lineno)
                    if full in modules()
                    else Import(module, base, alias.name, node.lineno)
                )


def ours(module: str) -> bool:
    return module == "vllm_spac" or module.startswith("vllm_spac.")


def place(module: str) -> str:
    """The longest prefix in ``LEVELS``; empty for the package itself."""
    parts = module.removeprefix("vllm_spac").strip(".").split(".")
    for length in range(len(parts), 0, -1):
        if (prefix := ".".join(parts[:length])) in LEVELS:
            return prefix
    return ""


def inside() -> list[Import]:
    """Imports of one of our modules by another; the package itself, which imports lazily, left out."""
    return [i for i in imports() if ours(i.importer) and ours(i.target) and "vllm_spac" not in (i.importer, i.target)]


def test_every_module_has_a_level() -> None:
    assert [module for module in modules() if ours(module) and module != "vllm_spac" and not place(module)] == []


def test_at_most_eight_files_at_the_root() -> None:
    assert len(list((ROOT / "vllm_spac").glob("*.py"))) <= 8


def test_imports_go_down() -> None:
    assert [str(i) for i in inside() if LEVELS[place(i.target)] > LEVELS[place(i.importer)]] == []


def test_families_do_not_import_one_another() -> None:
    found = []
    for i in inside():
        here, there = place(i.importer), place(i.target)
        same = here == there or {here, there} <= _BUDGET
        if LEVELS[here] == LEVELS[there] == 1 and not same and (here, there) not in BETWEEN_FAMILIES:
            found.append(str(i))
    assert found == []


def test_no_circle_of_files() -> None:
    """Imports inside functions and for types counted."""
    graph: dict[str, set[str]] = {module: set() for module in modules() if ours(module)}
    for i in inside():
        graph[i.importer].add(i.target)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_only_the_seam_imports_vllm() -> None:
    found = [i for i in imports() if i.target.split(".")[0] == "vllm" and ours(i.importer)]
    assert [str(i) for i in found if place(i.importer) != "integration"] == []


def test_only_kernels_import_triton_and_nothing_of_ours() -> None:
    kernels = "vllm_spac.kernels"
    found = [i for i in imports() if i.target.split(".")[0] == "triton" and not i.importer.startswith(kernels)]
    found += [i for i in imports() if i.importer.startswith(kernels) and ours(i.target) and kernels not in i.target]
    assert [str(i) for i in found] == []


def test_nobody_imports_a_private_name_of_ours() -> None:
    """A module whose name begins with an underscore is shared inside its family, and by what runs the family."""
    found = [i for i in imports() if i.name is not None and i.name.startswith("_") and not i.name.startswith("__")]
    assert [str(i) for i in found if ours(i.target)] == []


def test_nothing_imports_the_command_line() -> None:
    found = [i for i in imports() if ours(i.target) and place(i.target) == "cli"]
    assert [str(i) for i in found if not ours(i.importer) or place(i.importer) != "cli"] == []


def test_modules_are_short() -> None:
    """Long ones are printed; one of more than 400 lines fails."""
    lengths = {module: len(path.read_text(encoding="utf-8").splitlines()) for module, path in modules().items()}
    product = {module: count for module, count in lengths.items() if ours(module)}
    print(*(f"{module}: {count} lines" for module, count in product.items() if count > 300), sep="\n")
    assert {module: count for module, count in product.items() if count > 400} == {}
    assert sorted(product.values())[len(product) // 2] <= 150


def test_parameters_are_typed() -> None:
    """At least 95 % of those of all functions; the share is printed."""
    found = {
        f"{module}:{node.lineno} {node.name}({given.arg})": given.annotation is not None
        for module, path in modules().items()
        if ours(module)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for given in _parameters(node.args)
    }
    share = sum(found.values()) / len(found)
    print(f"{share:.1%} of {len(found)} parameters are typed")
    assert share >= 0.95, [name for name, typed in found.items() if not typed]


def _parameters(arguments: ast.arguments) -> list[ast.arg]:
    given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    return [item for item in given if item is not None and item.arg not in ("self", "cls")]
