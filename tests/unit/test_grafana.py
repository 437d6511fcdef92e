"""The Grafana dashboard asks for what ``/metrics`` exports, and for all of it."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="the exporter is vLLM's plugin interface")

from prometheus_client import CollectorRegistry, generate_latest
from vllm.v1.metrics import loggers

from vllm_spac.integration.serving import endpoint, live_page
from vllm_spac.integration.serving.endpoint import WorkerCollector
from vllm_spac.methods.od_moe.inquiries import WorkerCounts
from vllm_spac.methods.od_moe.roster import WorkerShare
from vllm_spac.methods.trees.tree_counters import TreeCounters
from vllm_spac.recording.metrics import Counters

DASHBOARD = json.loads((Path(endpoint.__file__).parent / "grafana.json").read_text(encoding="utf-8"))


def exported() -> dict[str, set[str]]:
    """Name -> labels of every series of a worker that uses everything."""
    counters = Counters(bytes={"disk": 1, "host": 2}, steps={"decode": 3}).snapshot()
    gauges = dict.fromkeys(("slots", "resident", "host_experts", "experts", "slot_bytes"), 1)
    names = ("rows", "dropped_weight", "shortlists", "experts", "emptied", "unweighted")
    trees = TreeCounters(3).snapshot() | {"tree_accepted": {"0": 1, "2": 3}}
    collector = WorkerCollector(None)
    collector.workers = [
        {
            **counters,
            **gauges,
            **trees,
            "mode": "exact",
            "stopped": {"timeline": "no room"},
            "guard": {"draft_length": 2},
            "budget": dict.fromkeys(names, 1),
            "expert_workers": {"worker-0": {"present": 1, **WorkerCounts().of(0), **asdict(WorkerShare())}},
        }
    ]
    registry = CollectorRegistry()
    registry.register(collector)
    found: dict[str, set[str]] = {}
    for line in generate_latest(registry).decode().splitlines():
        if match := re.match(r"(vllm:spac_\w+)\{(.*)\}", line):
            found.setdefault(match[1], set()).update(re.findall(r'(\w+)="', match[2]))
    return found


def vllms() -> set[str]:
    """Samples of this vLLM's own metrics."""
    names = re.findall(r'name="(vllm:\w+)"', Path(loggers.__file__).read_text())
    return {f"{name}{end}" for name in names for end in ("", "_total", "_bucket", "_sum", "_count")}


def test_what_vllm_counts_about_requests_has_these_names() -> None:
    assert set(live_page.SAMPLES) <= vllms()


def queries() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_every_metric_that_it_asks_for_is_exported_and_none_is_left_out() -> None:
    asked = {name for query in queries() for name in re.findall(r"vllm:\w+", query)}
    ours = {name for name in asked if name.startswith("vllm:spac_")}
    assert ours == set(exported())
    assert asked - ours == {sample for sample in vllms() if sample in asked} and len(asked - ours) == 5
    variables = [item["query"]["query"] for item in DASHBOARD["templating"]["list"] if item["type"] == "query"]
    assert {name for query in variables for name in re.findall(r"vllm:\w+", query)} <= set(exported())


def test_labels_that_it_sums_by_or_prints_are_those_of_the_series() -> None:
    series = exported()
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            query = target["expr"]
            names = re.findall(r"vllm:\w+", query)
            labels = set(re.findall(r"by \((\w+)\)", query))
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) == labels - {"le"}, panel["title"]
            ours = all(name in series for name in names)
            assert not ours or all(labels <= series[name] for name in names), query
            for chosen in re.findall(r"\{(instance[^}]*)\}", query):  # vLLM's series are not of one worker
                assert set(re.findall(r"(\w+)=~", chosen)) == ({"instance", "worker"} if ours else {"instance"})


def test_only_counters_have_rates() -> None:
    for query in queries():
        for name in re.findall(r"vllm:\w+", query):
            assert (f"rate({name}{{" in query) is name.endswith(("_total", "_bucket")), query


def test_panels_say_what_they_show_and_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        assert panel["title"] and panel["description"].endswith(".")
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
