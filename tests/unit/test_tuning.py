"""What ``vllm-spac tune`` would measure, how it compares, and the files that it keeps."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_spac.config import tuned_profile
from vllm_spac.config.config import SpacConfig
from vllm_spac.config.tuned_profile import (
    DEFAULT,
    LRU,
    MAY_SET,
    Candidate,
    Drafts,
    TunedProfile,
    combine,
    departures,
    path_of,
)
from vllm_spac.decisions.comparison import NEAR, Ratio, Said, compare_tokens
from vllm_spac.decisions.costs import Costs
from vllm_spac.errors import ConfigError
from vllm_spac.system.machine import Machine
from vllm_spac.tools.planning.planned_machine import HOST_RESERVE, UTILIZATION, PlannedMachine
from vllm_spac.tools.planning.planned_model import ServedModel
from vllm_spac.tools.tuning.candidates import AGREEMENT, MOST, Allowed, Budget, budgets, candidates, left_out
from vllm_spac.tools.tuning.progress import Measurement, ProgressFile, key_of

ROOT = Path(__file__).parents[2]
TOY = ROOT / "benchmarks" / "toy" / "models" / "target"
QUALITY = ROOT / "benchmarks" / "results" / "toy_quality.json"
GIB, MIB = 1 << 30, 1 << 20
EXPERTS = 18 * MIB  # of the toy model
SCARCE = 548 * MIB  # run-time buffers take most of it, and half of the experts have a slot


@pytest.fixture(scope="module")
def toy() -> ServedModel:
    return ServedModel.read(str(TOY))


def gpu(fast: float, host: float) -> PlannedMachine:
    """A machine with a GPU, ``fast`` bytes of it for vLLM and ``host`` bytes for experts, and a disk."""
    return PlannedMachine("gpu", Costs.read("rtx4090"), int(fast / UTILIZATION) + 1, int(host) + HOST_RESERVE, 1 << 40)


def cpu(fast: float) -> PlannedMachine:
    costs = Costs.read("rtx4090")
    origin = costs.provenance.model_copy(update={"store": "disk"})
    changes = {"load": costs.disk, "host": costs.load, "disk": None, "provenance": origin}
    return PlannedMachine("cpu", costs.model_copy(update=changes), 0, int(fast / UTILIZATION) + 1, 1 << 40)


def by_name(model: ServedModel, machine: PlannedMachine, **allowed) -> dict[str, Candidate]:
    found = candidates(model, machine, Allowed(**allowed))
    assert len({candidate.name for candidate in found}) == len(found)
    for candidate in found:
        SpacConfig.parse(dict(candidate.knobs or {}))
        assert set(candidate.knobs or {}) <= MAY_SET
    return {candidate.name: candidate for candidate in found}


# -- candidates --


def test_the_default_and_lru_are_always_first_and_have_no_drafts(toy: ServedModel) -> None:
    for machine in (gpu(GIB, GIB), gpu(GIB, 0), cpu(GIB)):
        found = list(by_name(toy, machine, slots="25%").values())
        assert [candidate.name for candidate in found[:2]] == [DEFAULT, LRU]
        assert found[0].drafts is None and found[1].knobs == {**(found[0].knobs or {}), "policy": "lru"}
        assert all((found[0].knobs or {}).items() <= (c.knobs or {}).items() for c in found if not c.is_stock)


def test_a_machine_with_a_gpu(toy: ServedModel) -> None:
    found = by_name(toy, gpu(GIB, GIB), slots="25%", departures=frozenset({"rounding"}))
    assert found[DEFAULT].knobs == {"slots": "25%"}
    assert found["store=disk"].knobs == {"slots": "25%", "store": "disk"}
    assert found["CPU experts"].departures == found["decisions=device"].departures == {"rounding"}
    stock = found["stock vLLM, its own offloading"]
    assert stock.is_stock and stock.options["cpu_offload_gb"] == pytest.approx(0.75 * EXPERTS / GIB)
    assert left_out(toy, gpu(GIB, GIB), list(found.values())) is None
    for machine, why in ((gpu(GIB, 0), "host memory has no room"), (gpu(GIB, GIB), "every expert fits")):
        assert why in (left_out(toy, machine, []) or "")


def test_a_machine_without_a_gpu(toy: ServedModel) -> None:
    found = by_name(toy, cpu(GIB), slots="25%", departures=frozenset({"rounding"}))
    assert not any(candidate.is_stock for candidate in found.values())
    assert [name for name, candidate in found.items() if "store" in (candidate.knobs or {})] == ["CPU experts"]
    assert {"prefetch=utility", "policy=lfu", "io_threads=8", "drafts=ngram 4"} <= set(found)
    assert "policy=pinned" not in found, "it needs a calibration"
    assert "policy=drop" not in found, "it keeps nothing"
    assert "needs a GPU" in (left_out(toy, cpu(GIB), list(found.values())) or "")


def test_host_memory_that_holds_no_more_than_a_part(toy: ServedModel) -> None:
    large = replace(toy, checkpoint=replace(toy.checkpoint, layer_bytes={n: 64 * MIB * 64 for n in range(6)}))
    found = by_name(large, gpu(8 * GIB, GIB), slots="25%")
    assert found[DEFAULT].knobs == {"slots": "25%", "store": "disk"}, "the default store has no room"
    assert found["host memory=1024MiB"].knobs == {"slots": "25%", "store": "disk", "host_memory": "1024MiB"}


def test_only_what_is_allowed(toy: ServedModel) -> None:
    budget = Budget("budget=32 router", {"budget": 32}, "LOSSY: 95.0% of tokens agree")
    for allowed in (set(), {"rounding"}, {"lossy"}, {"rounding", "lossy"}):
        given = (budget,) if "lossy" in allowed else ()
        found = by_name(toy, gpu(GIB, GIB), slots="25%", budgets=given, departures=frozenset(allowed))
        assert set().union(*(candidate.departures for candidate in found.values())) == allowed
    assert found["drafts=ngram 4, budget=32 router"].note == budget.quality


def test_drafts_have_lengths_and_the_users_come_first(toy: ServedModel) -> None:
    asked = {"method": "draft_model", "model": "/d", "num_speculative_tokens": 6}
    found = by_name(toy, cpu(GIB), slots="25%", drafts=asked, eagle3="/head")
    lengths = [name for name in found if name.startswith("drafts=")]
    assert lengths[:2] == ["drafts=draft_model 6", "drafts=draft_model 3"]
    assert {f"drafts=eagle3 {n}" for n in (2, 4, 8)} | {"drafts=ngram 2", "drafts=ngram 4"} <= set(lengths)
    assert found["drafts=eagle3 8"].drafts == {"method": "eagle3", "model": "/head", "num_speculative_tokens": 8}
    assert found["drafts=draft_model 6, guard=off"].knobs == {"slots": "25%", "guard": "off"}
    assert asked["num_speculative_tokens"] == 6


def test_draft_trees_of_a_drafter_that_can_draft_them(toy: ServedModel) -> None:
    asked = {"method": "eagle", "model": "/e", "num_speculative_tokens": 6}
    found = by_name(toy, cpu(GIB), slots="25%", drafts=asked, eagle3="/head", engine={"max_num_seqs": 8})
    named = [name for name in found if name.startswith("tree=")]
    assert named == [f"tree={n}, {method}" for method in ("eagle", "eagle3") for n in (4, 8, 16)]
    tree = found["tree=16, eagle"]
    assert tree.knobs == {"slots": "25%", "tree": 16} and tree.drafts == {**asked, "num_speculative_tokens": 16}
    assert not tree.departures and not tree.same_steps
    assert combine(found[DEFAULT], [tree, found["drafts=eagle3 4"], found["policy=lfu"]]) == Candidate(
        "tree=16, eagle + policy=lfu", "combined", {"slots": "25%", "tree": 16, "policy": "lfu"}, tree.drafts
    )
    without = by_name(toy, cpu(GIB), slots="25%", drafts={"method": "draft_model", "model": "/d"})
    assert not any(name.startswith("tree=") for name in without)


def test_draft_trees_have_rows_for_all_requests(toy: ServedModel) -> None:
    """vLLM serves 128 requests with 2,048 rows on a CPU; with a GPU 1,024 with 8,192, and trees set what they need."""
    for machine, engine, sizes in (
        (cpu(GIB), {}, [4, 8]),
        (cpu(GIB), {"max_num_seqs": 256}, [4]),
        (cpu(GIB), {"max_num_seqs": 256, "max_num_batched_tokens": 8192}, [4, 8, 16]),
        (gpu(GIB, GIB), {"max_num_seqs": 8}, [4, 8, 16]),
        (gpu(GIB, GIB), {}, [4]),
        (gpu(GIB, GIB), {"max_num_batched_tokens": 2048}, []),
        (gpu(GIB, GIB), {"max_num_seqs": 8, "attention_backend": "FLASH_ATTN"}, []),
    ):
        found = by_name(toy, machine, slots="25%", eagle3="/head", engine=engine)
        assert [c.knobs["tree"] for c in found.values() if c.knobs and "tree" in c.knobs] == sizes, engine


def test_cpu_experts_without_a_gpu_where_memory_holds_the_slots_and_all_experts(toy: ServedModel) -> None:
    rounding = frozenset({"rounding"})
    found = by_name(toy, cpu(GIB), slots="25%", departures=rounding)
    assert found["CPU experts"].knobs == {
        "slots": "25%",
        "store": "host",
        "cpu_experts": "waterfill",  # a balancer that is named is not checked while it is measured
    }
    assert "decisions=device" not in found
    for machine, allowed in (
        (cpu(GIB), {"slots": "25%"}),
        (cpu(SCARCE), {"slots": "25%", "departures": rounding}),
        (cpu(SCARCE), {"limited": True, "departures": rounding}),
    ):
        assert "CPU experts" not in by_name(toy, machine, **allowed), allowed


def test_limited_memory_is_counted_in_slots_and_a_context_leaves_more(toy: ServedModel) -> None:
    limited = by_name(toy, cpu(SCARCE), limited=True)
    percent = float(str((limited[DEFAULT].knobs or {})["slots"]).rstrip("%"))
    assert 25 <= percent < 100
    assert by_name(toy, cpu(SCARCE))[DEFAULT].knobs == {}, "the engine counts by itself"
    split = [name for name in by_name(toy, cpu(SCARCE), context=256) if name.startswith("slots=")]
    assert len(split) == 1 and split[0].endswith("KV cache for 256 tokens")
    everything = by_name(toy, cpu(GIB))
    assert {candidate.group for candidate in everything.values()} == {"baseline", "drafts"}, "nothing is offloaded"


def test_predictors_of_a_file(toy: ServedModel) -> None:
    found = by_name(toy, cpu(GIB), slots="25%", predictor_file="/p", predictors=("neural", "gate"))
    for name in ("neural", "gate"):
        assert found[f"prefetch={name}"].knobs == {"slots": "25%", "prefetch": name, "predictor_file": "/p"}
    assert not {"prefetch=neural", "prefetch=gate"} & by_name(toy, cpu(GIB), slots="25%").keys()


def test_what_departs_from_the_tokens_of_vllm() -> None:
    assert departures({"slots": "25%", "cpu_experts": "off", "decisions": "host", "prefetch": "utility"}) == set()
    assert departures({"cpu_experts": 2}) == departures({"decisions": "device"}) == {"rounding"}
    assert departures({"budget": 8}) == departures({"budget": "0.9"}) == {"lossy"}
    assert departures({"budget": 0.9, "cpu_experts": "auto"}) == {"rounding", "lossy"}


# -- combinations --

BASE = Candidate(DEFAULT, "baseline", {"slots": "25%"})


def change(name: str, group: str, drafts: dict | None = None, **knobs) -> Candidate:
    return Candidate(name, group, {"slots": "25%", **knobs}, drafts)


def test_the_best_of_each_group_go_together() -> None:
    ranked = [
        change("drafts", "drafts", {"method": "ngram"}),
        change("lfu", "policy", policy="lfu"),
        change("lru", "policy", policy="lru"),
        change("more threads", "threads", io_threads=8),
    ]
    found = combine(BASE, ranked)
    assert found is not None and found.name == "drafts + lfu + more threads"
    assert found.knobs == {"slots": "25%", "policy": "lfu", "io_threads": 8} and found.drafts == {"method": "ngram"}


def test_what_contradicts_or_is_refused_is_left_out() -> None:
    ranked = [
        change("pointers", "decisions", store="host", decisions="device"),
        change("disk", "store", store="disk"),
        change("cpu", "cpu_experts", cpu_experts="threshold"),  # pointers refuse it
        change("lru", "policy", policy="lru"),
    ]
    found = combine(BASE, ranked)
    assert found is not None and found.name == "pointers + lru"
    SpacConfig.parse(dict(found.knobs or {}))
    assert combine(BASE, ranked[:3]) is None and combine(BASE, []) is None, "one change alone is no combination"


# -- comparison --


def test_a_ratio_is_faster_only_if_its_whole_interval_is() -> None:
    rng = random.Random(0)
    same = Ratio.of([rng.gauss(1.0, 0.1) for _ in range(20)])
    faster = Ratio.of([rng.gauss(1.2, 0.05) for _ in range(20)])
    assert not same.is_faster and same.low < 1 < same.high and same.turns == 20
    assert faster.is_faster and 1.1 < faster.low <= faster.median <= faster.high
    assert not Ratio.of([1.0] * 8).is_faster, "as fast is not faster"
    assert "95 % interval" in str(faster)


def test_tokens_that_differ_are_wrong_unless_it_was_close() -> None:
    said = Said(ids=(1, 2, 3), second=(7, 8, 9), gap=(4.0, NEAR / 2, 4.0))
    for ids, near, verdict in (
        ([1, 2, 3], False, "equal"),
        ([1, 8, 5], True, "near-ties"),
        ([1, 8, 3], False, "wrong"),  # of steps with the same rows
        ([1, 6, 3], True, "wrong"),  # not the second best
        ([1, 2, 9], True, "wrong"),  # not close
        ([1, 2], True, "wrong"),  # too few
        ([1, 2, 3, 4], True, "wrong"),
    ):
        found = compare_tokens([said, said], [[1, 2, 3], ids], near)
        assert (found.verdict, found.answers) == (verdict, 2), ids
        assert found.differ == (verdict != "equal")
    assert compare_tokens([Said(ids=(1,))], [[2]], True).verdict == "wrong", "it was not asked how close it is"


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_any_other_token_at_a_clear_place_is_wrong(ids: list[int], data: st.DataObject) -> None:
    said = Said(ids=tuple(ids), second=tuple(n + 1 for n in ids), gap=(2 * NEAR,) * len(ids))
    place = data.draw(st.integers(0, len(ids) - 1))
    other = [*ids[:place], ids[place] + data.draw(st.integers(1, 3)), *ids[place + 1 :]]
    assert compare_tokens([said], [other], True).verdict == "wrong"
    assert compare_tokens([said], [ids], False).verdict == "equal"


# -- budgets that were evaluated --


def test_budgets_come_with_their_quality(toy: ServedModel) -> None:
    found = budgets(QUALITY, toy)
    assert 0 < len(found) <= MOST
    points = {
        (p["ranking"], p["coverage"], p["budget"], p["mass"]): p for p in json.loads(QUALITY.read_text())["points"]
    }
    for budget in found:
        bound, knobs = SpacConfig.parse(dict(budget.knobs)).bound, budget.knobs
        point = points[knobs["budget_ranking"], knobs["budget_coverage"], bound.experts, bound.mass]
        assert point["agreement"] >= AGREEMENT and f"{100 * point['agreement']:.1f}%" in budget.quality
        assert budget.quality.startswith("LOSSY") and "bytes per token" in budget.quality


def test_a_budget_that_costs_more_loads_than_it_saves_is_refused(toy: ServedModel, tmp_path: Path) -> None:
    """The toy's own results have such: with 42 experts of ``selected`` fewer drafts were accepted."""
    path, content = tmp_path / "q.json", json.loads(QUALITY.read_text())
    dear = {("selected", 42), ("selected", 48)}
    points = [p for p in content["points"] if p["coverage"] == "substitution" and (p["ranking"], p["budget"]) in dear]
    assert all(point["agreement"] >= AGREEMENT for point in points) and len(points) == 2
    path.write_text(json.dumps(content | {"points": points}))
    (kept,) = budgets(path, toy)
    assert kept.knobs["budget"] == 48 and "0.99 times the bytes per token" in kept.quality
    path.write_text(json.dumps(content | {"points": points[:1]}))
    with pytest.raises(
        ConfigError, match="costs more loads than it saves .1.07 times the bytes per token.* drop --lossy"
    ):
        budgets(path, toy)
    path.write_text(json.dumps(content | {"points": points[:1], "generation": []}))
    assert "bytes per token not measured" in budgets(path, toy)[0].quality


def test_an_evaluation_imports_nothing(toy: ServedModel, tmp_path: Path, monkeypatch) -> None:
    """Somebody else may have written it: rankings are named by the names of this package's files."""
    (tmp_path / "planted.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    path, content = tmp_path / "q.json", json.loads(QUALITY.read_text())
    path.write_text(json.dumps(content | {"points": [p | {"ranking": "planted:Ranking"} for p in content["points"]]}))
    with pytest.raises(ConfigError, match="no budget that keeps"):
        budgets(path, toy)


def test_what_is_no_evaluation_of_this_model_is_refused(toy: ServedModel, tmp_path: Path) -> None:
    path, content = tmp_path / "q.json", json.loads(QUALITY.read_text())
    with pytest.raises(ConfigError, match="evaluate some first: vllm-spac quality"):
        budgets(path, toy)
    for text, says in (
        ("{", "cannot be read"),
        ("[]", "no result of format"),
        (json.dumps({"format": "spac-quality-1"}), "cannot be read: KeyError 'facts'"),
        (json.dumps(content | {"facts": content["facts"] | {"experts": 8}}), "of 8 experts.*has 64"),
        (json.dumps(content | {"points": content["points"][:1]}), "no budget that keeps 95%"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=says):
            budgets(path, toy)


# -- files --

HERE = Machine(cpu="c", cores=4, disk="d")


def profile(**changes) -> TunedProfile:
    given = {"model": "m", "identity": "a" * 32, "machine": HERE, "versions": {"vllm": "0.32.0"}}
    return TunedProfile(**given | {"choice": LRU, "knobs": {"policy": "lru"}} | changes)


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = path_of(tmp_path / "new", "a" * 32)
    whole = profile(ratio=Ratio(median=1.2, low=1.1, high=1.3, turns=9), speculative_config={"method": "ngram"})
    whole.write(path)
    assert TunedProfile.read(path) == whole and list(path.parent.iterdir()) == [path]
    assert whole.differences(HERE, {"vllm": "0.32.0"}) == []
    assert whole.differences(replace_(HERE, cores=8), {"vllm": "0.33.0"}) == [
        "cores: 4, not 8",
        "vllm: 0.32.0, not 0.33.0",
    ]


def replace_(machine: Machine, **changes) -> Machine:
    return machine.model_copy(update=changes)


def test_a_profile_may_set_what_candidates_set_and_nothing_else(toy: ServedModel) -> None:
    budget = Budget("b", dict.fromkeys(("budget_ranking", "budget_coverage", "budget"), 1), "")
    more = {"predictors": ("neural",), "predictor_file": "p", "eagle3": "/head", "slots": "25%"}
    both = {"budgets": (budget,), "departures": frozenset({"rounding", "lossy"})}
    large = replace(toy, checkpoint=replace(toy.checkpoint, layer_bytes={n: 64 * MIB * 64 for n in range(6)}))
    found: set[str] = set()
    for model, machine in ((toy, gpu(GIB, GIB)), (toy, cpu(GIB)), (large, gpu(8 * GIB, GIB))):
        for candidate in candidates(model, machine, Allowed(**more, **both)):
            found |= set(candidate.knobs or {})
            if candidate.drafts is not None:
                Drafts.check(dict(candidate.drafts))
    assert found == MAY_SET


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"knobs": {"control": True}}, "sets no control"),
        ({"knobs": {"trace": "/x"}}, "sets no trace"),
        ({"knobs": {"budget": 8}, "allowed": ["lossy"]}, "allowed: Extra inputs are not permitted"),
        ({"knobs": {"policy": "best"}}, "policy='best' is the name of no policy of this package"),
        ({"knobs": {"policy": "json:JSONDecoder"}}, "policy='json:JSONDecoder' is the name of no policy"),
        ({"knobs": {"policy": "utility@upper=1"}}, "is the name of no policy"),
        ({"knobs": {"prefetch": "/x"}}, "prefetch='/x' is the name of no predictor"),
        ({"knobs": {"cpu_experts": "json:JSONDecoder"}}, "is the name of no balancer of this package"),
        ({"knobs": {"budget": "budgets.json"}}, "a tuned profile names no file of budgets"),
        (
            {"speculative_config": {"method": "custom_class", "model": "json:JSONDecoder"}},
            "drafts|method: Input should be",
        ),
        ({"speculative_config": {"model": "json.JSONDecoder"}}, "method: Field required"),
        ({"speculative_config": {"method": "eagle3"}}, "drafts of eagle3 need a model"),
        (
            {"speculative_config": {"method": "ngram", "rejection_sample_method": "synthetic"}},
            "rejection_sample_method",
        ),
        ({"engine": {"max_num_seqs": "8"}}, "max_num_seqs of its engine is no number"),
        ({"format": "spac-tuned-0"}, "format"),
    ],
)
def test_a_profile_that_says_more_than_it_may_is_none(tmp_path: Path, changes: dict, says: str) -> None:
    content = json.loads(profile().model_dump_json()) | changes
    (tmp_path / "p.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=f"no tuned profile of format.*{says}.*run vllm-spac tune again"):
        TunedProfile.read(tmp_path / "p.json")


def test_other_files_are_no_profiles(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no tuned profile.*vllm-spac tune MODEL"):
        TunedProfile.read(tmp_path / "absent.json")
    (tmp_path / "p.json").write_bytes(b" " * (2 << 20))
    with pytest.raises(ConfigError, match="cannot be read: it has 2097152 bytes, more than 1048576"):
        TunedProfile.read(tmp_path / "p.json")
    (tmp_path / "p.json").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        TunedProfile.read(tmp_path / "p.json")


def test_the_identity_of_a_model_changes_with_its_config_and_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "a.safetensors").write_bytes(b"1234")
    first = tuned_profile.identity(tmp_path)
    assert len(first) == 32
    (tmp_path / "README.md").write_text("other")
    assert tuned_profile.identity(tmp_path) == first
    (tmp_path / "a.safetensors").write_bytes(b"12345")
    second = tuned_profile.identity(tmp_path)
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert len({first, second, tuned_profile.identity(tmp_path)}) == 3


def test_progress_is_of_one_run_alone(tmp_path: Path) -> None:
    key = key_of("a" * 32, HERE, {"vllm": "1"}, {"slots": "25%"})
    file = ProgressFile(tmp_path, key)
    file.load()
    file.content.runs.append(Measurement(arm=DEFAULT, round=0, rates=[1.5], seconds=2.0))
    file.save()
    again = ProgressFile(tmp_path, key)
    again.load()
    assert again.content == file.content
    for other in (
        key_of("b" * 32, HERE, {"vllm": "1"}, {"slots": "25%"}),
        key_of("a" * 32, replace_(HERE, cores=8), {"vllm": "1"}, {"slots": "25%"}),
        key_of("a" * 32, HERE, {"vllm": "2"}, {"slots": "25%"}),
        key_of("a" * 32, HERE, {"vllm": "1"}, {"slots": "50%"}),
    ):
        assert ProgressFile(tmp_path, other).path != file.path
    file.path.write_text("{")
    with pytest.raises(ConfigError, match="no unfinished tuning.*--fresh"):
        again.load()
    file.path.write_text(ProgressFile(tmp_path, other).content.model_dump_json())
    with pytest.raises(ConfigError, match="belongs to another run"):
        again.load()
    file.remove()
    assert list(tmp_path.iterdir()) == []
