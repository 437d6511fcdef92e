"""Documents that would otherwise drift from the code."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from vllm_spac.cli import plan
from vllm_spac.cli.main import app
from vllm_spac.config.config import SpacConfig
from vllm_spac.config.evidence import WINS
from vllm_spac.config.types import flag
from vllm_spac.decisions.costs import names

ROOT = Path(__file__).parents[2]
MOST_KNOBS = 33


def test_knobs_are_as_the_configuration_has_them() -> None:
    """Otherwise: `vllm-spac knobs --markdown > vllm_spac/KNOBS.md`."""
    text = (ROOT / "vllm_spac" / "KNOBS.md").read_text(encoding="utf-8")
    assert text == plan.document()
    assert all(f"| `{name}` |" in text for name in SpacConfig.model_fields)


def test_what_wins_is_a_result_of_ours() -> None:
    text = (ROOT / "vllm_spac" / "KNOBS.md").read_text(encoding="utf-8")
    assert WINS.keys() < SpacConfig.model_fields.keys()
    for name, (value, file) in WINS.items():
        assert (ROOT / "benchmarks" / "results" / file).is_file(), name
        assert f"| {value}: `{file}` |" in text
    assert text.count(plan.NONE) == len(SpacConfig.model_fields) - len(WINS)


def test_there_are_few_knobs_each_with_one_sentence_and_a_default() -> None:
    assert len(SpacConfig.model_fields) <= MOST_KNOBS
    for name, field in SpacConfig.model_fields.items():
        text = (field.description or "").replace("e.g. ", "")
        assert text.endswith(".") and ". " not in text and not field.is_required(), name


def test_public_names_can_be_imported() -> None:
    """Each `package.module:name` of the section *Public names*."""
    text = (ROOT / "vllm_spac" / "README.md").read_text(encoding="utf-8")
    section = text.partition("## Public names")[2].partition("\n## ")[0]
    names = re.findall(r"`(vllm_spac[\w.]*):(\w+)`", section)
    assert len(names) > 10
    for module, name in names:
        assert hasattr(importlib.import_module(module), name), f"{module}:{name}"


def test_links_lead_somewhere() -> None:
    for path in (*ROOT.glob("*.md"), *(ROOT / "vllm_spac").glob("*.md"), *(ROOT / "benchmarks").glob("*.md")):
        for target, heading in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", path.read_text(encoding="utf-8")):
            there = path.parent / target if target else path
            assert there.exists(), f"{path.name} links to {target}"
            if heading:
                assert heading in _headings(there), f"{path.name} links to {target}#{heading}"


DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "tests/README.md", "benchmarks/README.md")),
    *(ROOT / "vllm_spac" / name for name in ("README.md", "USAGE.md", "RECIPES.md", "KNOBS.md")),
]
GIVEN = r"(?<![\w-])(--spac-[a-z-]+)"


def named(pattern: str) -> Iterator[tuple[Path, str]]:
    """Yields what matches in each document."""
    for path in DOCUMENTS:
        yield from ((path, found) for found in re.findall(pattern, path.read_text(encoding="utf-8")))


def test_flags_are_those_of_knobs() -> None:
    known = set(map(flag, SpacConfig.model_fields))
    assert [f"{path.name}: {text}" for path, text in named(GIVEN) if text not in known] == []


def test_commands_and_their_options_exist() -> None:
    """``vllm-spac NAME --option`` wherever one is written, on as many lines as it takes."""
    commands = _commands(get_command(app))
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        for line in re.findall(r"vllm-spac ([a-z][^\n`#]*)", text):
            name = next(
                (known for known in sorted(commands, key=len, reverse=True) if f"{line} ".startswith(f"{known} ")), ""
            )
            if name:
                wrong = set(re.findall(r"(?<![\w-])(--[a-z0-9-]+)", line)) - commands[name]
                assert not wrong, f"{path.name}: vllm-spac {line}"


def _commands(group: Any, before: str = "") -> dict[str, set[str]]:
    """Options of each command, by its name with those of its groups."""
    found = {}
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            found |= _commands(command, f"{before}{name} ")
        options = {text for item in command.params for text in (*item.opts, *item.secondary_opts)}
        found[before + name] = options | {"--help"}
    return found


def test_the_readme_lists_all_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    listed = text.partition("those of the tool (")[2].partition(")")[0]
    assert sorted(re.findall(r"`([a-z-]+)`", listed)) == sorted(get_command(app).commands)


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    found = list(named(r"(?:`|\n)make ([a-z-]+)"))
    assert found and [f"{path.name}: make {target}" for path, target in found if target not in targets] == []


def test_files_that_are_named_exist() -> None:
    """Paths in backticks, from the root, from the document's folder, or from the package."""
    wrong = []
    for path, text in named(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|md|json|png|html|safetensors))`"):
        beside = (ROOT, path.parent, ROOT / "vllm_spac", ROOT / "tests", ROOT / "benchmarks", ROOT / "triton_kernels")
        if not any((folder / text).exists() for folder in beside):
            wrong.append(f"{path.name}: {text}")
    assert wrong == []


def test_the_map_has_every_folder_and_its_modules() -> None:
    """Folders of the first column exist and are all of them; names in backticks are modules, or folders."""
    section = (
        (ROOT / "vllm_spac" / "README.md").read_text(encoding="utf-8").partition("| folder")[2].partition("\n\n")[0]
    )
    rows = [line.split("|", 2)[1:] for line in section.splitlines() if line.startswith("| `")]
    folders = [name for first, _ in rows for name in re.findall(r"`([\w.]+)/?`", first)]
    there = {path.name for path in (ROOT / "vllm_spac").iterdir() if path.suffix == ".py" or path.is_dir()}
    assert sorted(folders) == sorted(there - {"__init__.py", "__pycache__", "kernels"}), "the map's first column"
    for first, rest in rows:
        within = [ROOT / "vllm_spac" / name for name in re.findall(r"`([\w]+)/`", first)]
        for name in re.findall(r"`([a-z_]+/?)`", rest.partition("|")[0]) if within else ():
            inside = [
                path for folder in within for path in folder.rglob(name.strip("/") + ("" if "/" in name else "*"))
            ]
            assert inside or name in _WORDS, f"{first}: {name}"


_WORDS = {"auto"}  # values of knobs


def test_levels_are_those_of_the_rules() -> None:
    import test_architecture

    text = (
        (ROOT / "vllm_spac" / "README.md")
        .read_text(encoding="utf-8")
        .partition("levels, listed")[2]
        .partition("\n\n")[0]
    )
    assert sorted(map(int, re.findall(r"\((\d)\)", text))) == sorted(set(test_architecture.LEVELS.values()))


def test_components_are_added_as_the_table_says() -> None:
    """Each family's folder, base class, what it needs and its knob."""
    text = (ROOT / "vllm_spac" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| an? [^|]*\| `([\w/]+)/`: `(\w+)`[^|]*\| ([^|]*)\|[^|]*\| `(\w+)` \|$", text, re.MULTILINE)
    assert len(rows) == 8
    for folder, base, methods, knob in rows:
        kind = getattr(importlib.import_module(f"vllm_spac.{folder.replace('/', '.')}.base"), base)
        assert knob in SpacConfig.model_fields
        abstract = set(getattr(kind, "__abstractmethods__", ()))
        assert abstract <= set(re.findall(r"`(\w+)`", methods)), f"{base}: {abstract}"


def test_numbers_and_names_of_machines_and_versions() -> None:
    from vllm_spac.integration.hooks.device import SUPPORTED

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    usage = (ROOT / "vllm_spac" / "USAGE.md").read_text(encoding="utf-8")
    recipes = (ROOT / "vllm_spac" / "RECIPES.md").read_text(encoding="utf-8")
    assert "commands for five published models" in readme and recipes.count("\n## ") == 5
    assert "beside a vLLM of your own (0.32 or 0.33)" in readme
    assert [f"0.{minor}.0" for minor in range(30, 40) if f"0.{minor}.0" in SUPPORTED] == ["0.32.0", "0.33.0"]
    assert all(f"`{name}`" in usage for name in names())


def _headings(path: Path) -> list[str]:
    """Returns the names by which links refer to the headings of a Markdown file."""
    found = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in found]
