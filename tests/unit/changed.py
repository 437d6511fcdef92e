"""Prints the test files that a change reaches by imports, the nearest first: what ``make test-changed`` runs.

``python tests/unit/changed.py [--base COMMIT] [--far N]`` compares the working tree with the commit (by default where
this branch left main) and follows N imports (3); 9 is nearly everything. Tests that start engines reach nearly all of
the product: they are printed only if they, or what they import below ``tests/``, import a file that changed. Components
are found by name, so theirs are the contract tests. A file that is no module stands for the tests that name it.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from vllm_spac import components

ROOT = Path(__file__).parents[2]
PACKAGES = {"vllm_spac": "vllm_spac", "triton_kernels": "vllm_spac.kernels", "benchmarks": "benchmarks"}
ENGINES = ("parity", "integration", "soak")  # folders


def changed(base: str) -> set[Path]:
    """Files that differ from ``base``, and new ones."""
    listed = []
    for command in (("diff", "--name-only", "-z", base), ("ls-files", "--others", "--exclude-standard", "-z")):
        run = subprocess.run(["git", *command], cwd=ROOT, check=True, capture_output=True, text=True)
        listed += run.stdout.split("\0")
    return {ROOT / name for name in listed if name}


@cache
def modules() -> dict[str, Path]:
    """Dotted name -> file; modules below ``tests/`` are imported by their bare names."""
    found = {}
    for folder, package in PACKAGES.items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = [part for part in path.relative_to(ROOT / folder).with_suffix("").parts if part != "__init__"]
            found[".".join([package, *parts])] = path
    for path in (ROOT / "tests").rglob("*.py"):
        found.setdefault(path.stem, path)
        found[".".join(path.relative_to(ROOT).with_suffix("").parts)] = path
    return found


@cache
def imported(path: Path) -> frozenset[Path]:
    """Files that a file imports, in functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:  # a module of a package, or a name of a module
                full = f"{node.module}.{alias.name}"
                names.add(full if full in modules() else node.module)
    entry = ROOT / "vllm_spac" / "__init__.py"  # where vLLM enters: by it, all of the product would be imported
    return frozenset(modules()[name] for name in names if name in modules()) - {path, entry}


def reached(test: Path, targets: set[Path], far: int) -> int | None:
    """How many imports lie between a test and the nearest of ``targets``; None: more than ``far``."""
    product = test.relative_to(ROOT / "tests").parts[0] not in ENGINES
    layer, seen, distance = {test}, {test}, 0
    while layer and distance <= far:
        if layer & targets:
            return distance
        follow = {path for path in layer if product or path.is_relative_to(ROOT / "tests")}
        layer = {other for path in follow for other in imported(path)} - seen
        seen |= layer
        distance += 1
    return None


def tests() -> Iterator[Path]:
    yield from sorted((ROOT / "tests").rglob("test_*.py"))


def closure(*starts: Path) -> set[Path]:
    """Files with all that they import, one through another."""
    found, left = set(starts), list(starts)
    while left:
        new = imported(left.pop()) - found
        found |= new
        left += new
    return found


def is_component(path: Path) -> bool:
    """Whether a file is found by its name, by no import."""
    names = {name for family in components.FAMILIES for name in components.modules(family).values()}
    return any(modules().get(name) == path for name in names)


def chosen(files: set[Path], far: int = 3) -> list[Path]:
    """The tests that a change of ``files`` reaches, the nearest first."""
    if ROOT / "tests" / "conftest.py" in files:
        return list(tests())
    found: dict[Path, int] = {}
    others = [path.relative_to(ROOT) for path in files if path.suffix != ".py"]
    for test in tests():
        text = test.read_text(encoding="utf-8")
        distance = reached(test, files, far)
        if distance is None and any(other.name in text for other in others):
            distance = 1
        if distance is not None:
            found[test] = distance
    if others or any(path.is_relative_to(ROOT / "vllm_spac") for path in files):  # the rules of documents and imports
        found.update((ROOT / "tests" / "unit" / f"test_{name}.py", 0) for name in ("architecture", "documents"))
    if any(map(is_component, files)):
        found |= {test: 0 for test in tests() if test.parent.name == "contracts"}
    return sorted(found, key=lambda path: (found[path], path))


def _base() -> str:
    ahead = subprocess.run(["git", "merge-base", "main", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return ahead.stdout.strip() or "HEAD"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default=None, help="commit to compare with")
    parser.add_argument("--far", type=int, default=3, help="imports to follow")
    given = parser.parse_args()
    for path in chosen(changed(given.base or _base()), given.far):
        print(path.relative_to(ROOT))
