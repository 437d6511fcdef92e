"""The check of the table of patches against sources: it agrees with the import-time check, and finds what is gone."""

from __future__ import annotations

import zipfile
from pathlib import Path

import patched_names
import pytest
import vllm
from sources import Sources, parameters

from vllm_spac.integration.hooks.patches import PATCHES, Patch

SOURCES = Sources(Path(vllm.__file__).parents[1])


def test_the_installed_vllm_has_every_name() -> None:
    """As ``patches.require_names`` finds by importing; here from the sources alone."""
    assert list(patched_names.missing_names(SOURCES)) == []


def test_parameters_are_those_that_inspect_finds() -> None:
    import functools
    import importlib
    import inspect

    for patch in PATCHES:
        module, _, path = patch.target.partition(":")
        found = functools.reduce(getattr, path.split("."), importlib.import_module(module))
        if not callable(found):
            continue
        function = SOURCES.function(module, path)
        assert function is not None
        expected = tuple(inspect.signature(inspect.unwrap(getattr(found, "__func__", found))).parameters)
        assert parameters(function) == expected, patch.target


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "made-1.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("made/__init__.py", "from .sub.engine import *\nif True:\n    from .sub.other import run\n")
        file.writestr("made/sub/__init__.py", "")
        file.writestr(
            "made/sub/engine.py",
            "from made.sub.other import Base\n"
            "class Engine(Base[int]):\n    def own(self, a, /, b, *c, d=1, **e): ...\n",
        )
        file.writestr("made/sub/other.py", "class Base:\n    async def inherited(self, x): ...\ndef run(y): ...\n")
    return path


def test_names_are_found_in_a_wheel_through_imports_and_bases(archive: Path) -> None:
    sources = Sources(archive)
    own = sources.function("made", "Engine.own")
    assert own is not None and parameters(own) == ("self", "a", "b", "c", "d", "e")
    assert sources.function("made.sub.engine", "Engine.inherited") is not None
    assert sources.function("made", "run") is not None
    assert sources.function("made", "Engine.gone") is None and sources.function("made.gone", "run") is None


@pytest.mark.parametrize(
    ("target", "takes", "first", "problem"),
    [
        ("made:Engine.own", ("b", "d"), False, None),
        ("made:Engine.own", ("f",), False, "does not take f"),
        ("made:run", ("y",), True, None),
        ("made:run", ("x",), True, "takes y"),
        ("made:Engine.gone", (), False, "is missing"),
    ],
)
def test_a_row_is_judged_as_at_the_start_of_an_engine(archive: Path, target, takes, first, problem) -> None:
    patch = Patch(target, "a test", "worker", takes, first)
    assert patched_names.problem(Sources(archive), patch) == problem


def test_changes_name_other_parameters_and_other_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version, text in {
        "a": "def f(x): ...\ndef g(): return 1\n",
        "b": "def f(x, y): ...\ndef g(): return 2\n",
    }.items():
        (tmp_path / version / "made").mkdir(parents=True)
        (tmp_path / version / "made" / "__init__.py").write_text(text)
    monkeypatch.setattr(patched_names.patches, "PATCHES", tuple(Patch(f"made:{n}", "a test", "v1") for n in "fg"))
    old, new = Sources(tmp_path / "a"), Sources(tmp_path / "b")
    assert list(patched_names.changes(old, old)) == []
    assert list(patched_names.changes(old, new)) == [
        "made:f: (x) became (x, y)",
        "made:g: the same parameters, other code",
    ]


@pytest.mark.full
@pytest.mark.parametrize("version", patched_names.VERSIONS)
def test_each_supported_vllm_has_every_name(version: str) -> None:
    """Downloads its wheel."""
    assert list(patched_names.missing_names(Sources(patched_names.wheel(version)))) == []
