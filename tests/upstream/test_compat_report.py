"""The report on a vLLM that is not installed agrees with the import-time check, and finds what is gone or changed."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import zipfile
from pathlib import Path

import compat
import pytest
import typer
import vllm
import wheels
from compat import Judged
from sources import Sources, parameters
from typer.testing import CliRunner

from vllm_spac.integration.hooks import device, patches
from vllm_spac.integration.hooks.patches import PATCHES, Patch

VLLM = Path(vllm.__file__).parent
SOURCES = Sources(VLLM.parent)
ROWS = {patch.target: patch for patch in PATCHES}
DRAFTS = "vllm.v1.executor.multiproc_executor:MultiprocExecutor.take_draft_token_ids"
TOKENS = "vllm.v1.executor.multiproc_executor:MultiprocExecutor.sample_tokens"


def test_the_installed_vllm_has_every_name() -> None:
    """As ``patches.check_names`` finds by importing; here from the sources alone."""
    assert [patch.target for patch in PATCHES if compat.problem(SOURCES, patch)] == []
    assert list(compat.missing_imports(SOURCES)) == []
    assert len(compat.imported()) > 60  # of the whole package


def test_what_was_proved_is_supported_and_installed() -> None:
    assert set(compat.PROVED) == {patch.where for patch in PATCHES}
    for version in {version for proved in compat.PROVED.values() for version in proved}:
        device.check_supported_vllm(version)
    assert all(vllm.__version__.partition("+")[0] in compat.PROVED[where] for where in ("v1", "cpu"))


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
        ("made:Engine.own", ("b", "d"), False, ""),
        ("made:Engine.own", ("f",), False, "does not take f"),
        ("made:run", ("y",), True, ""),
        ("made:run", ("x",), True, "takes y"),
        ("made:Engine.gone", (), False, "is missing"),
    ],
)
def test_a_row_is_judged_as_at_the_start_of_an_engine(archive: Path, target, takes, first, problem) -> None:
    patch = Patch(target, "a test", "worker", takes, first)
    assert compat.problem(Sources(archive), patch) == problem


def changed(tmp_path: Path, target: str, old: str, new: str) -> Judged:
    """A row beside a copy of the installed sources in which ``old``, below its definition, is ``new``."""
    name = target.partition(":")[0].removeprefix("vllm.").replace(".", "/") + ".py"
    text = (VLLM / name).read_text(encoding="utf-8")
    begin = text.index(f"def {target.rpartition('.')[2]}(")
    assert old in text[begin:]
    (tmp_path / "vllm" / name).parent.mkdir(parents=True)
    (tmp_path / "vllm" / name).write_text(text[:begin] + text[begin:].replace(old, new, 1))
    return compat.judged(ROWS[target], SOURCES, Sources(tmp_path))


def test_a_changed_body_is_found_and_named(tmp_path: Path) -> None:
    row = changed(tmp_path, DRAFTS, "return self.collective_rpc(", "return self.collective_call(")
    assert (row.risk, row.changed, row.problem) == ("medium", 2, "")
    assert any(re.match(r"\+ +return self\.collective_call\(", line) for line in row.diff)
    text = compat.page("0.99", [row], [])
    assert f"### `{DRAFTS}`" in text and "collective_call" in text and "Nothing." in text


def test_a_removed_name_is_found_with_what_it_is_for(tmp_path: Path) -> None:
    row = changed(tmp_path, DRAFTS, "take_draft_token_ids", "take_drafts")
    assert (row.risk, row.problem, row.given) == ("high", "is missing", None)
    text = compat.page("0.99", [row], ["vllm.gone:Name (vllm_spac/x.py)"])
    assert f"`{DRAFTS}` is missing, for: {ROWS[DRAFTS].why}. With {patches.WITHOUT}, {ROWS[DRAFTS].loses}." in text
    assert "- the import of `vllm.gone:Name (vllm_spac/x.py)`" in text


def test_a_renamed_parameter_is_found(tmp_path: Path) -> None:
    """One that the wrapper relies on: the plugin would refuse this vLLM."""
    row = changed(tmp_path, TOKENS, "non_block: bool", "blocking: bool")
    assert (row.risk, row.problem) == ("high", "does not take non_block")
    assert row.came == ("blocking",) and row.went == ("non_block",)
    assert "(+blocking -non_block)" in compat.page("0.99", [row], [])


LONG = ("def f(x): ...", "def f(x):\n" + "    x += 1\n" * (compat.FEW + 1))


@pytest.mark.parametrize(
    ("does", "before", "after", "risk"),
    [
        ("encloses", "def f(x): return 1", "def f(x): return 2", "low"),
        ("encloses", "def f(x): return 1", "def f(x, y=0): return 1", "medium"),
        ("encloses", "def f(x, y=0): ...", "def f(y, x=0): ...", "medium"),
        ("encloses", *LONG, "medium"),
        ("replaces", "def f(x): return 1", "def f(x): return 2", "medium"),
        ("replaces", *LONG, "high"),
        ("refuses", *LONG, "low"),
        ("replaces", "def f(x):\n    'One.'\n    return x", "def f(x):\n    'Two.'\n    return x", "none"),
    ],
)
def test_the_rule_of_risk(tmp_path: Path, does, before: str, after: str, risk: str) -> None:
    for name, text in (("a", before), ("b", after)):
        (tmp_path / name / "made").mkdir(parents=True)
        (tmp_path / name / "made" / "__init__.py").write_text(text)
    row = Patch("made:f", "a test", "v1", does=does)
    assert compat.judged(row, Sources(tmp_path / "a"), Sources(tmp_path / "b")).risk == risk


def test_a_row_is_compared_with_what_it_was_run_with() -> None:
    assert [compat.proof(Patch("made:f", "", where), "0.33.0") for where in ("v1", "v2")] == ["0.32.0", "0.33.0"]
    assert [compat.proof(Patch("made:f", "", where), "0.40.0") for where in ("v1", "worker")] == ["0.32.0", "0.33.0"]
    assert compat.proof(Patch("made:f", "", "worker"), "0.32.0") == "0.32.0"


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources of versions that are kept already, and where the page goes."""
    monkeypatch.setattr(wheels, "CACHE", tmp_path)
    monkeypatch.setattr(compat, "PAGES", tmp_path / "pages")
    monkeypatch.setattr(compat, "ROOT", tmp_path)
    for version, text in (("0.32.0", "def f(x): ...\n"), ("0.34.0", "def f(y): ...\n")):
        with zipfile.ZipFile(tmp_path / f"{version}.zip", "w") as file:
            file.writestr("vllm/__init__.py", text)
    return tmp_path


def test_the_command(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "imported", lambda: {("vllm", "f"): "vllm_spac/x.py"})
    monkeypatch.setattr(patches, "PATCHES", (Patch("vllm:f", "a test", "v1", ("x",)),))
    app = typer.Typer()
    app.command()(compat.main)
    asked = CliRunner().invoke(app, ["0.34.0"])
    assert asked.exit_code == 1 and "**does not take x**" in asked.stdout
    assert (kept / "pages" / "0.34.0.md").read_text(encoding="utf-8").strip() == asked.stdout.strip()
    fine = CliRunner().invoke(app, ["0.32.0", "--brief"])
    assert fine.exit_code == 0 and "0 missing" in fine.stdout and "|" not in fine.stdout


def test_no_sources_end_the_command_with_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(wheels, "CACHE", tmp_path)
    app = typer.Typer()
    app.command()(compat.main)
    done = CliRunner().invoke(app, ["../0.34.0"])
    assert done.exit_code == 2 and "compat: '../0.34.0' is no version of vLLM" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel of vLLM 1, of which most is no Python source."""
    path = tmp_path / "vllm-1.whl"
    with zipfile.ZipFile(path, "w") as file:
        for name in ("vllm/_C.so", "vllm/a.py", "vllm-1.dist-info/METADATA", "other/b.py"):
            file.writestr(name, name.encode() + bytes(3 << 20 if name.endswith("so") else 0))
    monkeypatch.setattr(wheels, "CACHE", tmp_path / "kept")
    return path


def kept_of(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as found:
        return {name: found.read(name) for name in found.namelist()}


def test_only_python_sources_are_kept_and_asked_for_once(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "_resolve", lambda requirement: ("1", wheel.as_uri()))
    assert kept_of(wheels.sources("1")) == {"vllm/a.py": b"vllm/a.py"}
    monkeypatch.delattr(wheels, "_resolve")
    assert wheels.sources("1").name == "1.zip"


def test_parts_of_a_wheel_are_enough(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a server that sends parts; from one that does not, pip gets all of it."""
    whole, asked, status = wheel.read_bytes(), [0], [206]

    def answered(request, timeout):
        first, last = map(int, request.get_header("Range").removeprefix("bytes=").split("-"))
        part = whole[first : last + 1]
        asked[0] += len(part)
        parts = status[0] == 206
        found = io.BytesIO(part if parts else whole)
        found.status = status[0]
        found.headers = {"Content-Range": f"bytes {first}-{last}/{len(whole)}"} if parts else {}
        return contextlib.nullcontext(found)

    monkeypatch.setattr(wheels.urllib.request, "urlopen", answered)
    monkeypatch.setattr(wheels, "_READ_AHEAD", 1024)
    monkeypatch.setattr(wheels, "_resolve", lambda requirement: ("1", "https://index/vllm-1.whl"))
    assert kept_of(wheels.sources("1")) == {"vllm/a.py": b"vllm/a.py"}
    assert asked[0] < len(whole) // 100
    status[0] = 200
    monkeypatch.setattr(wheels, "_pip", lambda *options, seconds: shutil.copy(wheel, options[2]))
    assert kept_of(wheels.sources("1.0")) == {"vllm/a.py": b"vllm/a.py"}


def test_an_import_that_a_version_lacks_is_named(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (archive.parent / "plugin").mkdir()
    text = "import vllm.gone\nfrom vllm import gone, here\nif True:\n    from vllm.deep import x\nimport os\n"
    (archive.parent / "plugin" / "a.py").write_text(text)
    (archive.parent / "vllm").mkdir()
    (archive.parent / "vllm" / "__init__.py").write_text("here = 1\n")
    found = compat.imported(archive.parent / "plugin")
    monkeypatch.setattr(compat, "imported", lambda: found)
    lacking = ["vllm:gone (plugin/a.py)", "vllm.deep:x (plugin/a.py)", "vllm.gone (plugin/a.py)"]
    assert list(compat.missing_imports(Sources(archive.parent))) == lacking
