"""A mistyped knob must never be ignored: the user would rely on a setting that is not in force."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vllm_spac.cache import prefetch_settings
from vllm_spac.config.config import SpacConfig, check_knob, component_knobs
from vllm_spac.config.former import FORMER
from vllm_spac.config.types import PREFETCHING, SlotCount, flag
from vllm_spac.errors import ConfigError
from vllm_spac.methods.moe_spec.settings import BudgetSettings
from vllm_spac.system.machine import CLUSTER_FILE


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auto", SlotCount()),
        (" AUTO ", SlotCount()),
        ("32", SlotCount(per_layer=32)),
        (32, SlotCount(per_layer=32)),
        ("1", SlotCount(per_layer=1)),
        ("25%", SlotCount(share=0.25)),
        ("2k", SlotCount(tokens=2)),
        ("16K", SlotCount(tokens=16)),
        (" 25 % ", SlotCount(share=0.25)),
        ("12.5%", SlotCount(share=0.125)),
        ("100%", SlotCount(share=1.0)),
    ],
)
def test_slots_are_understood(text: str | int, expected: SlotCount) -> None:
    assert SlotCount.parse(text) == expected


WRONG_SLOTS = [
    "",
    "0",
    "-1",
    "+3",
    "0%",
    "0.0%",
    "101%",
    "100.01%",
    "-5%",
    "%",
    "x",
    "25 percent",
    "3.5",
    "1e2",
    "k",
    "0k",
    "2.5k",
    "-2k",
    "nan%",
]


@pytest.mark.parametrize("text", [*WRONG_SLOTS, "auto%", "25%%", "3 2", 0, -1])
def test_other_slots_are_refused_with_what_would_be_right(text: str | int) -> None:
    with pytest.raises(ValueError, match=r"32.*25%.*auto"):
        SlotCount.parse(text)


@pytest.mark.parametrize(
    ("asked", "count", "balancer"),
    [
        ("off", None, None),
        ("auto", None, "waterfill"),
        (3, 3, None),
        ("3", 3, None),
        ("threshold@fixed=2", None, "threshold@fixed=2"),
        ("waterfill", None, "waterfill"),
    ],
)
def test_cpu_experts_are_off_auto_a_number_or_what_a_balancer_selects(
    asked: str | int, count: int | None, balancer: str | None
) -> None:
    config = SpacConfig.parse({"cpu_experts": asked})
    assert (config.cpu_experts, config.cpu_expert_count, config.balancer) == (str(asked), count, balancer)


@pytest.mark.parametrize(
    ("asked", "experts", "mass", "mass_of"),
    [
        (16, 16, None, "selected"),
        ("16", 16, None, "selected"),
        (1, 1, None, "selected"),
        (1.0, None, 1.0, "selected"),
        ("1.0", None, 1.0, "selected"),
        (0.98, None, 0.98, "selected"),
        ("0.98@of=selected", None, 0.98, "selected"),
        (".5@of=scores", None, 0.5, "scores"),
        ("1e-05", None, 1e-5, "selected"),
        ("off", None, None, "selected"),
    ],
    ids=str,
)
def test_a_budget_is_a_number_or_a_share(asked, experts, mass, mass_of) -> None:
    config = SpacConfig.parse({"budget": asked})
    knob, settings = config.parsed_budget, BudgetSettings.at_start(config)
    assert (knob.experts, knob.bounds) == (experts, asked != "off")
    assert (settings.budget, settings.mass, settings.mass_of) == (experts, mass, mass_of)


@pytest.mark.parametrize(
    "budget",
    [0, "0", -1, "-3", 1.5, "1.01", 16.0, "0.0", "nan", "inf", True, None, [16], "", "9" * 5000, "budgets.json"],
)
def test_other_budgets_are_refused_with_what_would_be_right(budget: object) -> None:
    with pytest.raises(ConfigError, match=r"budget=.* \(--spac-budget\): ") as caught:
        SpacConfig.parse({"budget": budget})
    assert "0.98" in str(caught.value) or budget == ""


def test_arguments_of_a_budget() -> None:
    with pytest.raises(ConfigError, match="of='all': use of=selected or of=scores"):
        SpacConfig.parse({"budget": "0.98@of=all"})
    with pytest.raises(ConfigError, match="0.98 has no argument 'alpha'; it has of"):
        SpacConfig.parse({"budget": "0.98@alpha=1"})
    with pytest.raises(ConfigError, match="16 has no argument 'of'; it has coverage"):
        SpacConfig.parse({"budget": "16@of=scores"})


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"slot": 3}, "unknown knob 'slot'; did you mean 'slots'"),
        ({"lookahead": 3}, "unknown knob 'lookahead'; known knobs: "),
        ({"execution": "pointers"}, "execution .--spac-execution. is gone; use --spac-plane, with the same names"),
        ({"decisions": "host"}, "decisions .--spac-decisions. is gone; write --spac-plane pointers for device, and"),
        ({"kernel": "table"}, "kernel .--spac-kernel. is gone; write --spac-plane slots for vllm, and table or"),
        ({"disk-dir": "/x"}, "unknown knob 'disk-dir'; did you mean 'disk_dir'"),
        ({"qqq": 3}, "unknown knob 'qqq'; known knobs: preset, slots, store, disk_dir, host_memory, policy, "),
        ({"slots": "ten"}, r"slots='ten' \(--spac-slots\).*a number of experts per layer"),
        ({"slots": 0}, r"slots=0 \(--spac-slots\)"),
        ({"slots": -4}, r"slots=-4 \(--spac-slots\)"),
        ({"slots": "101%"}, r"slots='101%' \(--spac-slots\).*at most 100%"),
        ({"slots": True}, r"slots=True \(--spac-slots\)"),
        ({"slots": None}, r"slots=None \(--spac-slots\)"),
        ({"slots": ["25%"]}, r"slots=.*\(--spac-slots\)"),
        ({"store": "ssd"}, r"store='ssd' \(--spac-store\).*use one of disk, host, or package.module:Class"),
        ({"store": True}, r"store=True \(--spac-store\).*use one of disk, host, or package.module:Class"),
        ({"policy": "lur"}, r"policy='lur' \(--spac-policy\).*lfu, .*lru.*, or package.module:Class"),
        ({"policy": 3}, r"policy=3 \(--spac-policy\)"),
        ({"disk_dir": 3.5}, r"disk_dir=3.5 \(--spac-disk-dir\)"),
        ({"io_threads": 0}, r"io_threads=0 \(--spac-io-threads\).*greater than or equal to 1"),
        ({"io_threads": 65}, r"io_threads=65 \(--spac-io-threads\).*less than or equal to 64"),
        ({"io_threads": -2}, r"io_threads=-2 \(--spac-io-threads\)"),
        ({"io_threads": 2.5}, r"io_threads=2.5 \(--spac-io-threads\)"),
        ({"io_threads": "many"}, r"io_threads='many' \(--spac-io-threads\)"),
        (
            {"cpu_experts": 0},
            r"cpu_experts=0 \(--spac-cpu-experts\): no balancer is called '0'; use one of off, auto, N",
        ),
        ({"cpu_experts": True}, r"cpu_experts=True \(--spac-cpu-experts\): .*use one of off, auto, N"),
        ({"cpu_experts": "two"}, r"'two'; use one of off, auto, N, .*threshold, waterfill, or package.module:Class"),
        ({"cpu_experts": "none"}, r"'none' cannot serve: without CPU experts use --spac-cpu-experts off"),
        (
            {"cpu_experts": 2, "profile": "x"},
            r"profile \(--spac-profile\).*cpu_experts=2 \(--spac-cpu-experts\); add --spac-cpu-experts auto",
        ),
        ({"cpu_kernel": "simd"}, r"--spac-cpu-kernel\) computes nothing without"),
        ({"budget": "16@votes=equal"}, r"\(--spac-budget\): votes='equal': use votes=uniform or votes=path"),
        (
            {"budget": "16@alpha=1"},
            r"\(--spac-budget\): 16 has no argument 'alpha'; it has coverage, when, votes, ranking",
        ),
        ({"budget": "16@votes=uniform@alpha=1"}, r"\(--spac-budget\): 16 has no argument 'alpha'"),
        ({"budget": "16@votes=path@alpha=1.5"}, r"\(--spac-budget\): alpha=1.5: use a number from 0.0 to 1.0"),
        ({"budget": "16@votes=path@alpha=True"}, r"\(--spac-budget\): alpha=True: use a number from 0.0 to 1.0"),
        ({"budget": "16@votes"}, r"\(--spac-budget\): 'votes' in '16@votes' sets nothing"),
        ({"budget": "16@coverage=rescue"}, r"coverage='rescue': use coverage=substitution or coverage=truncation"),
        ({"budget": "16@ranking=best"}, r"no ranking is called 'best'; use one of router, selected"),
        ({"budget": "16@ranking=router@share=1"}, r"16 has no argument 'share'"),
        ({"budget": "16@when=all@colour=2"}, r"16 has no argument 'colour'; it has coverage"),
        ({"budget": "16@colour=2"}, r"16 has no argument 'colour'; it has coverage"),
        ({"budget": "off@of=scores"}, r"off has no argument 'of'; it has coverage"),
        ({"budget": "16@calibration=FILE"}, r"\(--spac-budget\): 16 has no argument 'calibration'"),
        ({"policy": "lru@calibration=FILE"}, r"\(--spac-policy\): lru has no argument 'calibration'"),
        ({"tree": 1}, r"tree=1 \(--spac-tree\): a tree of one token is a chain; use --spac-tree 2 or more"),
        ({"tree": 256}, r"tree=256 \(--spac-tree\): use a number of draft tokens up to 255"),
        ({"tree": True}, r"\(--spac-tree\): use a number of draft tokens"),
        ({"tree": -3}, r"\(--spac-tree\): use a number of draft tokens"),
        ({"tree": "0@depth=6"}, "0 has no argument 'depth'; it has none"),
        ({"tree_shape": "static"}, "tree_shape .--spac-tree-shape. is gone; write --spac-tree 16@depth=6"),
        ({"guard": "yes"}, r"\(--spac-guard\).* on@cut=\.\.\.@lookups=\.\.\. or off"),
        ({"guard": "on@gap=2"}, r"\(--spac-guard\).* no argument 'gap'; it has cut"),
        ({"guard": "on@cut=never"}, r"\(--spac-guard\).* use cut=eager or cut=always"),
        ({"tree": "3@shape=static"}, r"\(--spac-tree\): 3 has no argument 'shape'; it has depth, width"),
        ({"tree": "[[0],[1],[1,0]]"}, r"\(--spac-tree\): use a number of draft tokens"),
        ({"tree": "3@depth=17"}, "depth=17: use a whole number from 1 to 16"),
        ({"tree": "3@width=2.5"}, "width=2.5: use a whole number from 1 to 64"),
        ({"tree": "3@wide=2"}, "3 has no argument 'wide'; it has depth, width"),
        ({"tree": "9@depth=1"}, "have 8; raise depth or width of --spac-tree, or use --spac-tree 8@depth=1"),
        ({"tree": "9@width=1"}, "have 6; raise .*, or use --spac-tree 6@width=1"),
        ({"record": "timeline=/x/y,trace=/x/y"}, r"\(--spac-record\): trace and timeline would replace each other"),
        ({"record": "run.trace"}, r"\(--spac-record\): 'run.trace': use trace=FILE, timeline=FILE, or both"),
        ({"record": "trace=a,trace=b"}, "use trace=FILE"),
        ({"record": True}, "use trace=FILE"),
        ({"http": "pages"}, r"\(--spac-http\): 'pages': use page, control, or page,control"),
        ({"http": True}, "use page, control"),
        ({"timeline": "x"}, r"timeline \(--spac-timeline\) is gone; use --spac-record timeline=FILE"),
        ({"control": True}, r"control \(--spac-control\) is gone; use --spac-http control"),
        ({1: 2}, "knobs must be named by strings"),
        ("25%", "must be a mapping of knobs"),
        (None, "must be a mapping of knobs"),
        ([("slots", 3)], "must be a mapping of knobs"),
    ],
)
def test_malformed_configuration_names_the_knob(raw: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpacConfig.parse(raw)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError, match="slots='x'.*io_threads=0.*unknown knob 'stor'"):
        SpacConfig.parse({"slots": "x", "io_threads": 0, "stor": "disk"})


@pytest.mark.parametrize(
    ("raw", "device", "store"),
    [
        ({}, "cpu", "disk"),
        ({}, "cuda", "host"),
        ({"store": "disk"}, "cuda", "disk"),
        ({"plane": "pointers"}, "cpu", "host"),
        ({"plane": "pointers", "store": "host"}, "cuda", "host"),
    ],
)
def test_the_store_follows_from_the_device_and_the_execution(raw: dict, device: str, store: str) -> None:
    assert SpacConfig.parse(raw).store_on(device) == store


@pytest.mark.parametrize(
    ("raw", "execution"),
    [
        ({}, "slots"),
        ({"plane": "slots"}, "slots"),
        ({"plane": "table"}, "table"),
        ({"plane": "pointers"}, "pointers"),
        ({"executor": "processes"}, "workers"),
    ],
)
def test_the_plane_names_the_execution(raw: dict, execution: str) -> None:
    assert SpacConfig.parse(raw).execution_name == execution


def test_a_plane_has_no_arguments() -> None:
    with pytest.raises(ConfigError, match="pointers has no argument 'staging'; it has none"):
        SpacConfig.parse({"plane": "pointers@staging=on"})
    with pytest.raises(ConfigError, match="staging .--spac-staging. is gone; leave it out"):
        SpacConfig.parse({"staging": "on"})


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"store": "disk"}, r"store=disk .* keeps none there; add --spac-host-memory 8GiB, or use --spac-store host"),
        ({"disk_dir": "/x"}, r"disk_dir=/x .*means nothing with store=host .*; drop --spac-disk-dir"),
        ({"store": "host", "disk_dir": "/x"}, r"disk_dir=/x .*means nothing with store=host .*; drop --spac-disk-dir"),
        ({"cpu_experts": "threshold"}, r"no layer tells the host .*use --spac-cpu-experts auto, or use .*slots"),
        (
            {"policy": "layer_lru"},
            r"layer_lru \(--spac-policy\) has no formula.*use --spac-plane slots, or .* reuse",
        ),
    ],
)
def test_pointers_need_memory_and_move_experts_themselves(others: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpacConfig.parse({"plane": "pointers", **others})


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"workers": 2}, r"workers \(--spac-workers\) is gone; --spac-executor processes@workers=3 says how many"),
        ({"executor": "local@per_layer=1"}, "local has no argument 'per_layer'; it has none"),
        ({"executor": "processes@per_layer=17@workers=34"}, "per_layer=17: use a whole number from 1 to 16"),
        ({"executor": "processes@workers=257"}, "workers=257: use a whole number from 1 to 256"),
        (
            {"executor": "processes@workers=5@per_layer=2"},
            "5 workers do not form groups .*; use --spac-executor processes@workers=4@per_layer=2$",
        ),
        (
            {"executor": "cluster@per_layer=4@file=/x@workers=3"},
            "do not form groups .*; use --spac-executor cluster@per_layer=4@file=/x@workers=4$",
        ),
        ({"executor": "processes@replicas=1"}, "processes has no argument 'replicas'; it has workers, per_layer"),
        ({"executor": "processes@file=/x"}, "processes has no argument 'file'"),
        ({"cluster": "/x"}, r"cluster \(--spac-cluster\) is gone; --spac-executor cluster@file=FILE"),
        ({"executor": "cluster@file=\0"}, "NUL"),
        ({"executor": "cluster@file="}, "file='': the path is empty"),
        ({"executor": "cluster@file=/home/a@b/cluster.json"}, "'b/cluster.json' in .* sets nothing"),
        ({"executor": "ray"}, "executor='ray' .*: use local or processes@workers=...@per_layer=... or cluster@file"),
        ({"executor": "processes", "plane": "pointers"}, "drop --spac-plane"),
        ({"executor": "processes", "cpu_experts": "auto"}, "drop --spac-cpu-experts"),
        ({"executor": "processes", "prefetch": "neural"}, "needs its file"),
        ({"executor": "processes", "host_memory": "1GiB"}, "drop --spac-host-memory"),
        ({"executor": "processes", "store": "host"}, "drop --spac-store, and give --spac-slots 100%"),
        ({"executor": "threads"}, "executor='threads' .*: use local or processes@workers=...@per_layer=..."),
    ],
    ids=str,
)
def test_what_expert_workers_do_not_go_with(raw: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpacConfig.parse(raw)


def test_expert_workers_run_the_layers() -> None:
    config = SpacConfig.parse({"executor": "processes@per_layer=2@workers=4"})
    assert config.execution_name == "workers" and config.store_on("cpu") == "disk"
    assert (config.executor_name, config.workers_per_layer, config.workers) == ("processes", 2, 4)
    few = [SpacConfig.parse({"executor": f"processes@per_layer={size}"}).workers for size in (1, 2, 3)]
    assert few == [2, 2, 3], "one group, and two workers at least"
    named = SpacConfig.parse({"executor": "cluster@file=~/c.json"})
    assert (named.cluster, named.workers) == (Path("~/c.json").expanduser(), None)
    assert SpacConfig.parse({"executor": "cluster@workers=3"}).cluster == CLUSTER_FILE.expanduser()
    assert SpacConfig.parse({"executor": "cluster@file=12"}).cluster == Path("12")
    assert SpacConfig.parse({}).execution_name == "slots"


def test_the_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        SpacConfig.parse({}).slots = "3"


def test_policy_that_must_know_the_future_cannot_serve() -> None:
    with pytest.raises(
        ConfigError, match="'belady' cannot serve: it must know the future.*; use one of drop, layer_lru, lfu"
    ):
        SpacConfig.parse({"policy": "belady"})


@pytest.mark.parametrize(
    ("name", "text"),
    [("slots", "0"), ("slots", "-1"), ("store", "3"), ("policy", "nope"), ("io_threads", "0"), ("io_threads", "x")],
)
def test_text_of_a_flag_is_refused(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=flag(name)):
        check_knob(name, text)


def test_a_flag_is_right_by_itself_although_it_means_something_beside_others_only() -> None:
    """Each flag is parsed before the others are known; without them the configuration refuses it."""
    assert check_knob("cpu_kernel", "simd") == "simd"
    with pytest.raises(ConfigError, match="--spac-cpu-kernel"):
        SpacConfig.parse({"cpu_kernel": "simd"})


@pytest.mark.parametrize(
    ("text", "alpha"),
    [("8", None), ("8@votes=path", 0.5), ("8@votes=path@alpha=0", 0), ("off@votes=path@alpha=1", 1)],
)
def test_a_budget_takes_arguments(text: str, alpha: float | None) -> None:
    config = SpacConfig.parse({"budget": f"{text}@coverage=truncation@when=all@ranking=router"})
    settings = BudgetSettings.at_start(config)
    assert settings.alpha == alpha and settings.coverage == "truncation"
    assert (settings.when, settings.ranking) == ("all", "router")
    assert settings.active is config.lossy is (settings.budget == 8) is (text[0] == "8")


@pytest.mark.parametrize("former", ["budget_ranking", "budget_coverage", "budget_when", "budget_votes"])
def test_a_knob_that_became_an_argument_says_how_to_write_it(former: str) -> None:
    with pytest.raises(ConfigError, match=rf"{former} \({flag(former)}\) is gone; write --spac-"):
        SpacConfig.parse({former: "static"})
    [example] = re.findall(r"--spac-budget (\S+@[^ ,]+)", FORMER[former])
    SpacConfig.parse({"budget": example.replace("NAME", "router")})


@pytest.mark.parametrize("knob", ["policy", "prefetch", "cpu_experts"])
def test_a_component_takes_arguments(knob: str) -> None:
    spec, wrong = {
        "policy": ("utility@upper=1@boundaries=(3, 1)", "utility@lower=1"),
        "prefetch": ("utility@variant=released", "utility@num_experts=1"),
        "cpu_experts": ("threshold@fixed=2", "threshold@tau=2"),
    }[knob]
    assert getattr(SpacConfig.parse({knob: spec}), knob) == spec
    with pytest.raises(ConfigError, match=f"{knob}.*has no argument"):
        SpacConfig.parse({knob: wrong})
    with pytest.raises(ConfigError, match=f"{knob}.*sets nothing"):
        SpacConfig.parse({knob: f"{spec}@on"})


def test_a_component_whose_arguments_are_not_for_users_takes_none() -> None:
    with pytest.raises(ConfigError, match=r"no store is called 'host@threads=4'"):
        SpacConfig.parse({"store": "host@threads=4"})


ON_DEVICE = {"prefetch": "neural@file=/x", "plane": "pointers"}


GONE = ("linear", "draft_linear", "token_table", "frequency", "auto")
SERVE = "draft_gate, gate, hybrid, neural, quasi_hidden, shadow, utility"


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        (
            {"prefetch": "neural"},
            r"prefetch=neural .* needs its file; use --spac-prefetch neural@file=FILE, which.*predictors train",
        ),
        ({"predictor_file": "/x"}, r"\(--spac-predictor-file\) is gone; --spac-prefetch NAME@file=PATH names it"),
        ({"prefetch": "off@file=/x"}, "no predictor is called 'off'"),
        ({"prefetch": "utility@file=/x"}, "file of prefetch=utility@file=/x .*no effect.*use --spac-prefetch utility$"),
        ({"prefetch": "neural@file="}, r"\(--spac-prefetch\): the path is empty"),
        ({"prefetch": "neural@file=/a@b"}, "'b' in .* sets nothing; use name@argument=value"),
        *(
            ({"prefetch": f"{name}@file=/x"}, rf"no predictor is called '{name}'; use one of off, {SERVE}")
            for name in GONE
        ),
        ({"prefetch": "neural@file=/x", "profile": "/y"}, "add --spac-cpu-experts auto"),
        ({"prefetch": "off@extra=0.2"}, "no predictor is called 'off'"),
        ({"prefetch": "utility@extra=1.5"}, r"\(--spac-prefetch\): extra=1.5: use a number from 0.0 to 1.0"),
        ({"prefetch": "utility@extra=True"}, r"\(--spac-prefetch\): extra=True: use a number"),
        ({"prefetch": "utility@depth=0"}, r"\(--spac-prefetch\): depth=0: use a whole number from 1"),
        ({"prefetch": "neural@reach=2@file=/x"}, "neural has no argument 'reach'"),
        ({"prefetch": "oracle"}, "'oracle' cannot serve: it must know what routers will choose"),
        (
            {"plane": "pointers", "prefetch": "draft_gate@k=2@threshold=2"},
            r"no settings background, extra and threshold.*; use --spac-prefetch draft_gate@k=2$",
        ),
        (
            {"plane": "pointers", "prefetch": "utility@depth=2"},
            r"prefetch=utility@depth=2 .*no host moves them; use --spac-plane slots, or use --spac-prefetch gate,",
        ),
        (ON_DEVICE | {"prefetch": "neural@depth=4@file=1e3"}, "neural@depth=4@.*use --spac-prefetch neural@file=1e3$"),
        (
            ON_DEVICE | {"prefetch": "neural@extra=0.3@depth=4@file=/x"},
            r"no settings but a file .*delay nothing.*; use --spac-prefetch neural@file=/x$",
        ),
        (
            {"plane": "pointers", "prefetch": "shadow@depth=17"},
            r"reads at most 16 experts while drafts are made .*; use --spac-prefetch shadow@depth=16$",
        ),
    ],
    ids=str,
)
def test_knobs_of_the_prefetcher_that_cannot_be(raw: dict, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        SpacConfig.parse(raw)


SPECULATES = {"speculate": "restricted", "prefetch": "gate"}


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        ({"speculate": "on"}, "use off or restricted@when=... or predicted@when=..."),
        ({"speculate": "off@when=all"}, "off has no argument 'when'"),
        (
            {"speculate": "predicted"},
            r"predicted \(--spac-speculate\) needs a predictor .*prefetch=off .*add --spac-pref",
        ),
        (
            {"speculate": "predicted", "prefetch": "utility"},
            "prefetch=utility .* names none; add --spac-prefetch gate",
        ),
        (SPECULATES | {"prefetch": "shadow"}, "one layer ahead, .*prefetch=shadow .* names none"),
        (
            SPECULATES | {"budget": 8},
            r"and budget=8 \(--spac-budget\) both choose .*; drop --spac-speculate, or drop --spac-budget",
        ),
        (SPECULATES | {"budget": 0.9}, r"and budget=0.9 \(--spac-budget\) both choose"),
        (
            SPECULATES | {"executor": "processes"},
            r"rows are sent by what it chose; drop --spac-speculate",
        ),
    ],
    ids=str,
)
def test_speculated_execution_that_cannot_be(raw: dict, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        SpacConfig.parse(raw)


def test_speculated_execution_is_a_setting_of_the_budget() -> None:
    for given, when in (("restricted", "decode"), ("restricted@when=all", "all")):
        found = BudgetSettings.at_start(SpacConfig.parse(SPECULATES | {"speculate": given}))
        assert (found.speculate, found.when) == ("restricted", when)
    assert not BudgetSettings.at_start(SpacConfig.parse({})).active


def test_knobs_of_the_prefetcher() -> None:
    config = SpacConfig.parse({"prefetch": "neural@depth=4@file=/x=1@extra=0.25"})
    assert (config.prefetch_share, str(config.predictor_file)) == (0.25, "/x=1")
    assert SpacConfig.parse({}).prefetch_share == SpacConfig.parse({"prefetch": "utility"}).prefetch_share == 0.1


def test_settings_of_the_prefetcher_are_arguments_of_its_knob() -> None:
    assert component_knobs()["prefetch"].settings is PREFETCHING
    spec = "utility@depth=8@upper=1"
    assert SpacConfig.parse({"prefetch": spec}).prefetch == spec
    settings = prefetch_settings.PrefetchSettings.of(spec)
    assert (settings.prefetch, settings.depth, settings.options) == ("utility", 8, {"upper": 1})
    given = prefetch_settings.PrefetchSettings.configured(SpacConfig.parse({"prefetch": spec}), spec, None)
    assert (given.extra, given.next_layer) == (0.1, True)
    assert prefetch_settings.PrefetchSettings.of("utility@extra=0.3", extra=0.1).extra == 0.3
    for wrong in ("utility@depth=0", "utility@upper=0", "utility@depth=many"):
        with pytest.raises(ConfigError):
            prefetch_settings.PrefetchSettings.of(wrong)


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        ({"host_memory": "lots"}, r"host_memory='lots' \(--spac-host-memory\)"),
        ({"host_memory": 0}, r"host_memory=0 \(--spac-host-memory\)"),
        ({"host_memory": True}, "use a number"),
        ({"host_memory": "1GiB", "store": "host"}, "store=host .* holds all of them in memory; use --spac-store disk"),
    ],
    ids=str,
)
def test_host_memory_that_cannot_be(raw: dict, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        SpacConfig.parse(raw)


def test_host_memory_makes_a_disk_the_store_everywhere() -> None:
    config = SpacConfig.parse({"host_memory": "1.5GiB"})
    assert SpacConfig.parse({"host_memory": "1GiB", "plane": "pointers"}).store_on("cuda") == "disk"
    assert config.host_memory == 3 << 29 and config.store_on("cuda") == config.store_on("cpu") == "disk"
    assert SpacConfig.parse({}).store_on("cuda") == "host"
