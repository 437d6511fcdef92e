"""Rules of the house, read from the sources: imports go down the list of ``floor_plan``, and names are unique."""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import floor_plan
import pytest
from floor_plan import MOST_FILES, ORDER

ROOT = Path(__file__).parents[2]
MOST_CLASS_LINES = 200
FOLDERS = {"vllm_spac": "vllm_spac", "triton_kernels": "vllm_spac.kernels", "benchmarks": "benchmarks"}


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
    """The place of ``ORDER`` that holds a module; empty for the package itself, and for what is not in the list."""
    name = module.removeprefix("vllm_spac").strip(".")
    for folder in (name, name.rpartition(".")[0]):
        if folder in ORDER:
            return folder
    return "kernels" if name.startswith("kernels.") else ""


def inside() -> list[Import]:
    """Imports of one of our modules by another; the package itself, which imports lazily, left out."""
    return [i for i in imports() if ours(i.importer) and ours(i.target) and "vllm_spac" not in (i.importer, i.target)]


def test_every_module_has_a_place() -> None:
    assert [module for module in modules() if ours(module) and module != "vllm_spac" and not place(module)] == []
    assert [name for name in ORDER if not any(place(module) == name for module in modules())] == []


def test_imports_go_down() -> None:
    """Those inside functions and for types counted. So the core of serving knows no method and no tool."""
    rank = {name: number for number, name in enumerate(ORDER)}
    up = [str(i) for i in inside() if rank[place(i.importer)] > rank[place(i.target)]]
    assert up == []
    assert rank["methods.moe_spec"] < rank["runtime"], "what runs a step is below all methods"


def test_the_map_is_rendered_from_the_list() -> None:
    _, found, _ = floor_plan.split(floor_plan.README.read_text(encoding="utf-8"))
    assert found == "\n".join(floor_plan.lines()), "run python tests/unit/floor_plan.py"


def test_folders_are_small() -> None:
    assert {name: len(found) for name in ORDER if len(found := floor_plan.files(name)) > MOST_FILES} == {}
    assert len(list((ROOT / "vllm_spac").glob("*.py"))) <= 8


def test_names_are_unique() -> None:
    """Of modules and public classes, but for ``base`` and classes in functions."""
    found: dict[str, list[str]] = {}
    for module, path in modules().items():
        if not ours(module) or path.name == "__init__.py" or module.startswith("vllm_spac.kernels."):
            continue
        if path.stem != "base":
            found.setdefault(path.stem, []).append(module)
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(module)
    assert {name: where for name, where in found.items() if len(where) > 1} == {}


def test_no_circle_of_files() -> None:
    """Imports inside functions and for types counted."""
    graph: dict[str, set[str]] = {module: set() for module in modules()}
    for i in (*inside(), *(i for i in imports() if i.importer.startswith("benchmarks.") and i.target in modules())):
        graph[i.importer].add(i.target)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_only_the_interface_and_tools_import_vllm() -> None:
    found = [i for i in imports() if i.target.split(".")[0] == "vllm" and ours(i.importer)]
    assert [str(i) for i in found if place(i.importer).split(".")[0] not in ("integration", "tools")] == []


@pytest.mark.parametrize(
    ("runner", "known"),
    [
        ("v1", {"integration.loading.runner_choice.AdapterV1", "integration.plugin.draft_handover"}),
        ("v2", {"integration.loading.runner_choice.AdapterV2"}),
    ],
)
def test_a_model_runner_is_known_to_its_adapter_only(runner: str, known: set[str]) -> None:
    """So that V1 goes with its folder, its rows of ``patches`` and these imports."""
    folder = f"vllm_spac.integration.stepping.{runner}"
    found = {(i, i.name or i.target.rpartition(".")[2]) for i in inside() if i.target.startswith(folder)}
    outside = {f"{i.importer}.{name}" for i, name in found if not i.importer.startswith(folder)}
    assert {name.removeprefix("vllm_spac.") for name in outside} == known


def test_what_is_of_vllms_v1_runner_is_in_its_folder() -> None:
    """Types counted; ``tools`` collect a drafter's states offline."""
    own = "vllm.v1.worker.gpu_model_runner", "vllm.v1.spec_decode.llm_base", "vllm.v1.sample.rejection_sampler"
    found = [i for i in imports() if i.target.startswith(own) and ours(i.importer)]
    places = {place(i.importer) for i in found}
    assert places <= {"integration.stepping.v1", "tools.evaluation"}, [str(i) for i in found]


def test_scripts_import_one_another_by_their_package() -> None:
    """Nothing of ``benchmarks`` changes ``sys.path``, and no import of it is by a bare name."""
    names = {module.rpartition(".")[2] for module in modules() if module.startswith("benchmarks.")}
    found = [i for i in imports() if i.importer.startswith("benchmarks") and i.target.split(".")[0] in names]
    assert [str(i) for i in found] == []
    assert [m for m, path in modules().items() if m.startswith("benchmarks") and "sys.path" in path.read_text()] == []


def test_one_place_asks_for_home_folders() -> None:
    """``untrusted.path_of``, which says what to do where there is none; ``pathlib`` raises a RuntimeError there."""
    asking = {"expanduser", "home", "expandvars"}
    found = {
        module
        for module, path in modules().items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in asking
    }
    assert found == {"vllm_spac.system.untrusted"}


def test_only_kernels_import_triton_and_nothing_of_ours() -> None:
    kernels = "vllm_spac.kernels"
    compiling = kernels, "benchmarks.kernels"
    found = [i for i in imports() if i.target.split(".")[0] == "triton" and not i.importer.startswith(compiling)]
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
    """Long ones are printed; one of more than 600 lines fails."""
    lengths = {module: len(path.read_text(encoding="utf-8").splitlines()) for module, path in modules().items()}
    product = {module: count for module, count in lengths.items() if ours(module)}
    print(*(f"{module}: {count} lines" for module, count in product.items() if count > 450), sep="\n")
    assert {module: count for module, count in product.items() if count > 600} == {}
    assert sorted(product.values())[len(product) // 2] <= 160


def test_classes_are_short() -> None:
    long = {
        node.name
        for module, path in modules().items()
        if ours(module)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and (node.end_lineno or 0) - node.lineno >= MOST_CLASS_LINES
    }
    assert long == set()


def test_names_are_in_the_words_of_the_field() -> None:
    """Names of classes, functions, parameters and fields; CONTRIBUTING.md says which words vLLM has instead."""
    private = {"tell", "told", "hear", "hears", "heard", "said", "seen", "seat", "seated", "look", "looks", "found"}
    private |= {"withhold", "there", "mine", "whom"}

    def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
        for node in ast.walk(tree):
            match node:
                case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.arg(arg=name):
                    yield node.lineno, name
                case ast.Attribute(attr=name, ctx=ast.Store()):
                    yield node.lineno, name
            for field in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(field, ast.AnnAssign):
                    yield field.lineno, ast.unparse(field.target)

    assert [
        f"{module}:{line} {name}"
        for module, path in modules().items()
        if ours(module)
        for line, name in names(ast.parse(path.read_text(encoding="utf-8")))
        if private & set(name.lower().split("_"))
    ] == []


MOST_VERBS = 60
THEIRS = {"forward", "init_state", "main", "register", "show"}  # names of torch, vLLM, Python, entry points, a command


def acts(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yields functions and methods that return nothing: public ones, but for commands and what is inside of others."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from acts(node)
            continue
        given = node.name.startswith("_") or node.name in THEIRS or "typer." in ast.unparse(node.args)
        if not given and isinstance(node.returns, ast.Constant) and node.returns.value is None:
            yield node


def test_public_functions_that_act_begin_with_verbs_of_the_glossary() -> None:
    """Those of CONTRIBUTING.md, of which there are few; each is in use."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    verbs = re.findall(r"`(\w+)`", text.partition("| about | verbs |")[2].partition("\n\n")[0])
    assert len(set(verbs)) == len(verbs) <= MOST_VERBS
    used = {
        f"{module}:{node.lineno} {node.name}": node.name.removeprefix("spac_").split("_")[0]
        for module, path in modules().items()
        if ours(module)
        for node in acts(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert [name for name, verb in used.items() if verb not in verbs] == []
    assert set(verbs) - set(used.values()) == set()


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
