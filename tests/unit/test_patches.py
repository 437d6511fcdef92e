"""The table of what is replaced in vLLM: it matches the installed vLLM and the sources of the replacements."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from vllm_spac.config.config import SpacConfig
from vllm_spac.errors import UnsupportedError
from vllm_spac.integration import plugin
from vllm_spac.integration.hooks import drafts, patches
from vllm_spac.integration.stepping import tree_arguments

SOURCES = Path(patches.__file__).parent


def test_each_row_is_in_this_vllm() -> None:
    patches.check_names("frontend", "worker", "v1", "v2", "cpu")


def test_each_row_says_why_and_no_name_has_two() -> None:
    assert all(patch.why for patch in patches.PATCHES)
    assert len({patch.target for patch in patches.PATCHES}) == len(patches.PATCHES)
    assert all(patch.until or patch.on == "object" or patch.target.endswith("oot") for patch in patches.PATCHES)


def test_the_page_for_vllms_maintainers_counts_the_rows() -> None:
    page = (SOURCES.parent / "UPSTREAM.md").read_text(encoding="utf-8")
    hooks = {
        "step": ["a plugin hook with the batch before a forward and its tokens after it"],
        "bank": [
            "a replacement of custom ops per model",
            "a hook between building a model and loading it",
            "a callback after the router",
            "splitting ops that are chosen per layer",
            "tiles that depend on the layer's experts",
            "a kernel that maps experts after counting, or counts slots",
        ],
    }
    rows = {name: [each for each in patches.PATCHES if each.until in until] for name, until in hooks.items()}
    rows["bank"] += [each for each in patches.PATCHES if each.target.endswith("oot")]
    others = [each for each in patches.PATCHES if each.until != "draft trees"]
    assert f"wraps {len(patches.PATCHES)} names" in page
    assert f"{sum(map(len, rows.values()))} of the {len(others)} that are not for draft trees" in " ".join(page.split())
    assert (len(rows["step"]), len(rows["bank"])) == (7, 8) and "Seven names" in page and "eight names" in page


def test_nothing_of_vllm_is_replaced_beside_the_table() -> None:
    """Wrappers are made by ``install``; who sets a name of vLLM's by hand has to import its class for it."""
    for path in SOURCES.rglob("*.py"):
        if path.name != "patches.py":
            found = re.search(r"^\s*[A-Z]\w+\.\w+ = |^\s*setattr\(", path.read_text(), re.MULTILINE)
            assert found is None, f"{path}: {found and found[0]}"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    found = ModuleType("spac_patched")

    class Thing:
        def method(self, one, *, two=2):
            return one, two

        @staticmethod
        def plain(one):
            return one

        @classmethod
        def made(cls, one):
            return cls, one

    found.Thing = Thing
    monkeypatch.setitem(sys.modules, "spac_patched", found)
    names = {"method": ("one", "two"), "plain": ("one",), "made": ("one",), "gone": (), "method2": ()}
    rows = {
        f"spac_patched:Thing.{n}": patches.Patch(f"spac_patched:Thing.{n}", "a test", "worker", t)
        for n, t in names.items()
    }
    monkeypatch.setattr(patches, "_BY_TARGET", rows)
    return found


def doubled(original):
    def wrapper(*args, **kwargs):
        return original(*args, **kwargs), "wrapped"

    return wrapper


def test_methods_of_every_kind_are_wrapped_once(module: ModuleType) -> None:
    for _ in range(2):
        for name in ("method", "plain", "made"):
            patches.install(f"spac_patched:Thing.{name}", doubled)
    thing = module.Thing()
    assert thing.method(1, two=3) == ((1, 3), "wrapped")
    assert module.Thing.plain(1) == (1, "wrapped") == thing.plain(1)
    assert module.Thing.made(1) == ((module.Thing, 1), "wrapped")


def test_a_parameter_that_is_gone_is_refused_with_its_name(module: ModuleType, monkeypatch) -> None:
    row = patches.Patch("spac_patched:Thing.method", "a test", "worker", ("one", "three"))
    monkeypatch.setattr(patches, "_BY_TARGET", {row.target: row})
    with pytest.raises(UnsupportedError, match=r"calls spac_patched:Thing\.method without three"):
        patches.install("spac_patched:Thing.method", doubled)
    with pytest.raises(UnsupportedError, match="without three"):
        monkeypatch.setattr(patches, "PATCHES", (row,))
        patches.check_names("worker")


TAKEN = "take_draft_token_ids"
DRAFTING = f"{patches.RUNNER_V1}.propose_draft_token_ids"
STATES = f"{patches.SPECULATOR}.propose"
TREES = [f"{runner}.initialize_kv_cache" for runner in (patches.RUNNER_V1, patches.RUNNER_V2)]


def test_rows_that_lose_the_same_are_switched_off_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(patches.WITHOUT, f" {patches.EXECUTOR}.sample_tokens, {patches.ENDPOINTS},")
    off = patches.switched_off()
    handed_over = [f"{patches.WORKER}.sample_tokens", *(f"{patches.EXECUTOR}.{n}" for n in ("sample_tokens", TAKEN))]
    assert list(off.values()) == [handed_over, [patches.ENDPOINTS]] and "/spac routes" in list(off)[1]
    assert {patch.target for patch in patches.PATCHES if patches.is_off(patch.target)} == {
        *handed_over,
        patches.ENDPOINTS,
    }


@pytest.mark.parametrize("target", [patch.target for patch in patches.PATCHES if not patch.loses])
def test_what_no_engine_can_do_without_is_refused_by_name(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(patches.WITHOUT, f"{patches.ENDPOINTS},{target}")
    with pytest.raises(UnsupportedError, match=re.escape(f"names {target}, which no engine can do without")):
        patches.switched_off()
    assert not patches.is_off(target)


def test_tokens_and_steps_need_their_rows() -> None:
    needed = {patch.target for patch in patches.PATCHES if not patch.loses}
    assert {patches.TILES, *patches.ALIGN, f"{patches.LOADER}.load_model"} <= needed
    assert {f"{runner}.{n}" for runner, _ in patches._RUNNERS for n in ("execute_model", "reload_weights")} <= needed


def test_unknown_names_are_refused_with_those_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(patches.WITHOUT, "vllm:Worker.shutdown\x1b")
    with pytest.raises(UnsupportedError, match=r"names vllm:Worker\.shutdown") as error:
        patches.switched_off()
    assert all((patch.target in str(error.value)) == bool(patch.loses) for patch in patches.PATCHES)
    assert str(error.value).isprintable()


def test_a_command_ends_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything of the engine is made."""
    monkeypatch.setenv(patches.WITHOUT, "nonsense")
    arguments = SimpleNamespace(additional_config={"spac": {"slots": "25%"}}, spac_command=True)
    with pytest.raises(SystemExit, match=f"spac: {patches.WITHOUT} names nonsense"):
        plugin._checked(lambda self: pytest.fail("an engine was made"))(arguments)


def test_a_row_that_is_switched_off_is_neither_wrapped_nor_needed(module: ModuleType, monkeypatch) -> None:
    gone, plain = (
        patches.Patch(f"spac_patched:Thing.{name}", "a test", "worker", loses=f"there is no {name}")
        for name in ("gone", "plain")
    )
    monkeypatch.setattr(patches, "_BY_TARGET", {row.target: row for row in (gone, plain)})
    monkeypatch.setattr(patches, "PATCHES", (gone, plain))
    with pytest.raises(UnsupportedError, match=re.escape(f"or set {patches.WITHOUT}={gone.target}: there is no gone")):
        patches.check_names("worker")
    monkeypatch.setenv(patches.WITHOUT, gone.target)
    patches.check_names("worker")
    patches.install(gone.target, doubled)
    patches.install(plain.target, doubled)
    assert module.Thing.plain(1) == (1, "wrapped")


def engine(v2: bool, method: str = "eagle3") -> SimpleNamespace:
    """As much of a ``VllmConfig`` as is asked about drafts."""
    return SimpleNamespace(
        use_v2_model_runner=v2,
        parallel_config=SimpleNamespace(tensor_parallel_size=1, distributed_executor_backend="uni"),
        scheduler_config=SimpleNamespace(async_scheduling=False),
        model_config=SimpleNamespace(),
        compilation_config=SimpleNamespace(cudagraph_mode=None),
        speculative_config=SimpleNamespace(
            method=method, parallel_drafting=False, use_local_argmax_reduction=False, use_heterogeneous_vocab=False
        ),
    )


@pytest.mark.parametrize(
    ("target", "v2", "ask"),
    [
        (DRAFTING, False, drafts.unguarded),
        (DRAFTING, False, drafts.unweighted),
        (f"{patches.SCHEDULER}.update_from_output", True, drafts.unguarded),
    ],
)
def test_what_needs_a_row_that_is_switched_off_is_refused(target: str, v2: bool, ask, monkeypatch) -> None:
    """By the functions that an engine asks; with the other runner nothing is lost."""
    assert ask(engine(v2)) is None
    monkeypatch.setenv(patches.WITHOUT, target)
    reason = ask(engine(v2))
    assert reason.problem.startswith(f"{patches.WITHOUT} switches off ")
    assert reason.remedy.changes == {patches.WITHOUT: None}
    assert ask(engine(not v2)) is None or patches.WITHOUT not in str(ask(engine(not v2)))


@pytest.mark.parametrize(
    ("target", "v2"),
    [
        (DRAFTING, False),
        (f"{patches.PROPOSER}.load_model", False),
        (STATES, True),
        (f"{patches.SPECULATOR}.load_model", True),
    ],
)
@pytest.mark.parametrize("ask", [drafts.unshadowed, drafts.ungated])
def test_who_looks_at_a_draft_model_needs_its_rows(ask, target: str, v2: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(patches.WITHOUT, target)
    assert patches.WITHOUT in str(ask(engine(v2, "draft_model")))


@pytest.mark.parametrize(("target", "v2"), [(DRAFTING, False), (TREES[0], False), (TREES[1], True)])
def test_trees_are_refused_without_their_rows(target: str, v2: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SpacConfig.parse({"slots": "25%", "tree": 4})
    monkeypatch.setattr(tree_arguments, "_refusals_of_v2", lambda *_: iter(()))
    found = (what for refused, what, _ in tree_arguments._refusals(config, engine(v2)) if refused)
    monkeypatch.setenv(patches.WITHOUT, target)
    assert patches.WITHOUT in next(found)
