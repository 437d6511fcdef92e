"""Documents that would otherwise drift from the code."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from vllm_spac import components
from vllm_spac.cli.main import app
from vllm_spac.config import document
from vllm_spac.config.config import SpacConfig
from vllm_spac.config.evidence import WINS
from vllm_spac.config.types import ROUNDED, ROUNDED_ON_A_GPU, flag
from vllm_spac.decisions.costs import names
from vllm_spac.integration.loading.description import shown_mode
from vllm_spac.tools.machine.checks import diagnose
from vllm_spac.tools.machine.facts import Device, Disk, Facts, Installation, System

ROOT = Path(__file__).parents[2]
MOST_KNOBS = 27
PACKAGE = ROOT / "vllm_spac"
RESULTS = ROOT / "benchmarks" / "results"
MOST_WORDS = 25  # of a sentence, but for one in ten


def _documents() -> list[Path]:
    """All but the list of changes."""
    folders = [path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith((".", "build", "dist"))]
    found = [*ROOT.glob("*.md"), *(path for folder in folders for path in folder.rglob("*.md"))]
    return sorted(path for path in found if path.name != "CHANGELOG.md")


DOCUMENTS = _documents()
CURRENT = [path for path in DOCUMENTS if path.parent != RESULTS]  # pages of results have commands of their time
IN_PASSING = (  # of the carved model
    *(PACKAGE / "KNOBS.md", PACKAGE / "EXACTNESS.md", PACKAGE / "cache" / "README.md"),
    PACKAGE / "integration" / "serving" / "README.md",
)
EARLY = {ROOT / "README.md": 40}  # lines, of ten
GIVEN = r"(?<![\w-])(--spac-[a-z-]+)"


def test_knobs_are_as_the_configuration_has_them() -> None:
    """Otherwise: `vllm-spac knobs --markdown > vllm_spac/KNOBS.md`."""
    text = (ROOT / "vllm_spac" / "KNOBS.md").read_text(encoding="utf-8")
    assert text == document.document()
    assert all(f"| `{name}` |" in text for name in SpacConfig.model_fields)


def test_what_wins_is_a_result_of_ours() -> None:
    text = (ROOT / "vllm_spac" / "KNOBS.md").read_text(encoding="utf-8")
    assert WINS.keys() < SpacConfig.model_fields.keys()
    for name, (value, file) in WINS.items():
        assert (ROOT / "benchmarks" / "results" / file).is_file(), name
        assert f"| {value}: `{file}` |" in text
    assert text.count(document.NONE) == len(SpacConfig.model_fields) - len(WINS)


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
    for path in DOCUMENTS:
        text = re.sub(r"```.*?```|`[^`]*`", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target, heading in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", text):
            there = path.parent / target if target else path
            assert there.exists(), f"{_short(path)} links to {target}"
            if heading:
                assert heading in _headings(there), f"{_short(path)} links to {target}#{heading}"


def test_pages_are_found_from_the_start() -> None:
    """Each page beside the code is linked by USAGE.md, or by the page in its folder."""
    linked = set()
    for path in (PACKAGE / "USAGE.md", *PACKAGE.rglob("README.md")):
        targets = re.findall(r"\]\(([^)#:]+\.md)", path.read_text(encoding="utf-8"))
        linked |= {(path.parent / target).resolve() for target in targets}
    pages = {path.resolve() for path in DOCUMENTS if path.is_relative_to(PACKAGE)}
    assert pages <= linked, pages - linked
    assert pages >= {path.parent.resolve() / "README.md" for path in (PACKAGE / "methods").glob("*/__init__.py")}


def named(pattern: str) -> Iterator[tuple[Path, str]]:
    """Yields what matches in each document that says how things are."""
    for path in CURRENT:
        yield from ((path, found) for found in re.findall(pattern, path.read_text(encoding="utf-8")))


def test_flags_are_those_of_knobs() -> None:
    known = set(map(flag, SpacConfig.model_fields))
    assert [f"{_short(path)}: {text}" for path, text in named(GIVEN) if text not in known] == []


GPU_SAYS = (ROOT / "README.md", PACKAGE / "EXACTNESS.md", PACKAGE / "USAGE.md")


@pytest.mark.parametrize("path", GPU_SAYS, ids=lambda path: path.name)
def test_what_a_gpu_gets_by_default_is_said_in_the_words_of_the_log(path: Path) -> None:
    """And no page promises its bits: vLLM's kernel runs on a GPU where one knob asks for it."""
    text = _flat(path)
    assert ROUNDED_ON_A_GPU in text
    for sentence in _sentences(text):
        assert "vLLM's own kernel" not in sentence or "CPU" in sentence, sentence


def test_the_log_and_doctor_say_so_too() -> None:
    default = SpacConfig.parse({"slots": "25%", "plane": "pointers"})
    assert shown_mode(ROUNDED, default, on_cpu=False) == ROUNDED_ON_A_GPU
    assert shown_mode(ROUNDED, default, on_cpu=True) == ROUNDED
    assert "--spac-plane slots" not in shown_mode(ROUNDED, default, on_cpu=False, only_ours=True), "it would be refused"
    asked = SpacConfig.parse({"slots": "25%", "plane": "slots"})
    assert [shown_mode(found, asked, on_cpu=False) for found in ("exact", ROUNDED)] == ["exact", ROUNDED]
    gpu = Installation("0.33.0", device=Device("a GPU", pinned=True, unified=True))
    system = System(frozenset({0}), None, (0,), 1 << 40, 1 << 40, None, None, "always")
    found = diagnose(Facts(gpu, system, Disk(Path("/packed"), 1 << 40)))
    assert [ROUNDED_ON_A_GPU in each.text for each in found if each.check == "GPU"] == [True]


CARVED = [path for path in DOCUMENTS if "carved" in path.read_text(encoding="utf-8").lower()]
FACT = re.compile(r"(not a|no) trained MoE")


@pytest.mark.parametrize("path", CARVED, ids=lambda path: _short(path))
def test_pages_with_the_carved_model_say_early_what_its_routing_is(path: Path) -> None:
    """In their first lines, or, of pages that mention it once and of the generated list of knobs, by a link or not."""
    text = path.read_text(encoding="utf-8")
    early = _flat_text("\n".join(text.split("\n")[: EARLY.get(path, 10)]))
    if path in IN_PASSING:
        assert "benchmarks/real/README.md" in text or path.name == "KNOBS.md"
    else:
        assert FACT.search(early), f"{_short(path)} does not say early whose routing it is"


def _flat(path: Path) -> str:
    return _flat_text(path.read_text(encoding="utf-8"))


def _flat_text(text: str) -> str:
    """A text in one line, without marks of code."""
    return " ".join(text.replace("`", "").split())


def test_commands_and_their_options_exist() -> None:
    """``vllm-spac NAME --option`` wherever one is written, on as many lines as it takes."""
    commands = _commands(get_command(app))
    for path in CURRENT:
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        for line in re.findall(r"vllm-spac ([a-z][^\n`#]*)", text):
            name = next(
                (known for known in sorted(commands, key=len, reverse=True) if f"{line} ".startswith(f"{known} ")), ""
            )
            if name:
                wrong = set(re.findall(r"(?<![\w-])(--[a-z0-9-]+)", line)) - commands[name]
                assert not wrong, f"{_short(path)}: vllm-spac {line}"


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
    listed = text.partition("the nine of the tool: ")[2].partition(".")[0]
    commands = vars(get_command(app))["commands"]
    assert re.findall(r"`([a-z-]+)`", listed) == [name for name, command in commands.items() if not command.hidden]


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    found = list(named(r"(?:`|\n)make ([a-z0-9-]+)"))
    assert found and [f"{_short(path)}: make {target}" for path, target in found if target not in targets] == []


def test_files_that_are_named_exist() -> None:
    """Paths in backticks, from the root, from the document's folder, or from the package."""
    wrong = []
    for path, text in named(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|md|json|png|html|safetensors))`"):
        beside = (ROOT, path.parent, PACKAGE, ROOT / "tests", ROOT / "benchmarks", ROOT / "triton_kernels")
        if "NAME" not in text and not any((folder / text).exists() for folder in beside):
            wrong.append(f"{_short(path)}: {text}")
    assert wrong == []


def test_scripts_that_are_run_exist() -> None:
    """``python FOLDER/NAME.py`` in a command."""
    found = list(named(r"python ((?:[\w.-]+/)+[\w.-]+\.py)"))
    assert found and [f"{_short(path)}: {script}" for path, script in found if not (ROOT / script).exists()] == []


def test_components_are_added_as_the_table_says() -> None:
    """Each family's base class, what it needs, where its files are, and its knob."""
    text = (PACKAGE / "README.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| an? [^|]*\| `([\w.]+):(\w+)`[^|]*\| ([^|]*)\| ([^|]*)\|[^|]*\| `(\w+)` \|$", text, re.MULTILINE
    )
    assert sorted(row[0] for row in rows) == sorted(family.base for family in components.FAMILIES.values())
    for module, name, files, methods, knob in rows:
        [family] = [each for each in components.FAMILIES.values() if each.base == module]
        kind = getattr(importlib.import_module(f"vllm_spac.{module}"), name)
        abstract = set(getattr(kind, "__abstractmethods__", ()))
        assert abstract <= set(re.findall(r"`(\w+)`", methods)), f"{name}: {abstract}"
        assert knob in SpacConfig.model_fields
        own = f"{family.folder.replace('.', '/')}/NAME.py" if family.folder else f"NAME_{family.noun}.py"
        assert f"`{own}`" in files, f"{name}: {own}"


def test_numbers_and_names_of_machines_and_versions() -> None:
    from vllm_spac.integration.hooks.device import SUPPORTED

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    plans = (PACKAGE / "tools" / "planning" / "README.md").read_text(encoding="utf-8")
    recipes = (PACKAGE / "RECIPES.md").read_text(encoding="utf-8")
    assert "commands for eleven published models" in readme
    assert recipes.count("\n## ") == 12, "and one section of newer models"
    assert "beside a vLLM of your own (0.32 or 0.33)" in readme
    assert [f"0.{minor}.0" for minor in range(30, 40) if f"0.{minor}.0" in SUPPORTED] == ["0.32.0", "0.33.0"]
    assert all(f"`{name}`" in plans for name in names())


def test_documents_are_short() -> None:
    for path in DOCUMENTS:
        page = path.name == "README.md" and path.parent.parent == PACKAGE / "methods"
        most = 80 if page else 120 if path in (ROOT / "README.md", PACKAGE / "USAGE.md") else 250
        assert path.read_text(encoding="utf-8").count("\n") <= most, f"{_short(path)} has more than {most} lines"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: _short(path))
def test_nine_of_ten_sentences_are_short(path: Path) -> None:
    found = sorted(_sentences(path.read_text(encoding="utf-8")), key=_words)
    tenth = found[-(len(found) // 10) - 1 :]
    assert not tenth or _words(tenth[0]) <= MOST_WORDS, "\n".join(tenth)


def test_sentences_are_told_apart() -> None:
    text = """# No sentence

One sentence, over
two lines (see [a link](a/long/path.md#with-a-heading)). *Another.* **A third: `code. with. stops`; a fourth?**

- One of a list, e.g. this one: it goes on.
- The next one.

```bash
no sentence
```

| short cell | a cell of a table with eight words or more: in it a colon ends one |
|---|---|
"""
    assert list(_sentences(text)) == [
        "One sentence, over two lines (see [a link]).",
        "*Another.",
        "**A third: x; a fourth?**",
        "One of a list, e.g. this one: it goes on.",
        "The next one.",
        "a cell of a table with eight words or more.",
        "in it a colon ends one",
    ]
    assert _words("**A third: x – a fourth?") == 5


def _sentences(text: str) -> Iterator[str]:
    """Yields the sentences of paragraphs, of lists, and of cells of tables that are no mere words.

    Links count as their text, code as one word. In a cell, a colon or a semicolon ends a sentence, too.
    """
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "x", text))
    blocks: list[str] = [""]
    for line in map(str.strip, text.splitlines()):
        if line.startswith("|"):
            cells = (cell.strip() for cell in line.strip("|").split("|"))
            blocks += [re.sub(r"[:;] ", ". ", cell) for cell in cells if len(cell.split()) >= _CELL]
        if not line or line.startswith(("|", "#", "!", "<")):
            blocks.append("")
        elif item := re.match(r"(?:[-*]|\d+\.) +(.*)", line):
            blocks.append(item[1])
        else:
            blocks[-1] = f"{blocks[-1]} {line}".strip()
    for block in blocks:
        parts = re.split(r"(?<=[.?!])(?<!e\.g\.)(?<!i\.e\.)(?:\*\*|[*)\"])? +", block)
        yield from (part for part in parts if re.search(r"\w", part))


_CELL = 8  # words


def _words(sentence: str) -> int:
    return len(re.findall(r"[^\s–]*\w[^\s–]*", sentence))


def _short(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _headings(path: Path) -> list[str]:
    """Returns the names by which links refer to the headings of a Markdown file."""
    found = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in found]
