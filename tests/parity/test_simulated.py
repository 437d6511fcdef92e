"""The simulator on the routing that an engine recorded: the engine's hits, loads, waves and CPU experts, exactly.

What an engine runs before its first step (warm-up, measured rates) is neither counted nor recorded, but loads experts:
these calls are kept here, and repeated before the simulator's first step.
"""

from __future__ import annotations

from pathlib import Path

import engines
import numpy as np
import pytest
from compare import METHODS, TOY

import vllm_spac
from vllm_spac import components
from vllm_spac.cache.loader import LayerUse
from vllm_spac.cache.prefetch_settings import PrefetchSettings
from vllm_spac.core import Rates
from vllm_spac.decisions.costs import Costs
from vllm_spac.execution.host.cpu_division import CpuDivision
from vllm_spac.execution.host.slot_layers import SlotLayers
from vllm_spac.integration.loading import assembly
from vllm_spac.recording.trace_file import Trace
from vllm_spac.tools.traces.replayed import Outcome, rows_of_records
from vllm_spac.tools.traces.simulated_slots import SlotsReplay
from vllm_spac.tools.traces.simulation import build_policy

RATES = Rates(fast=1e-4, stream=3e-4, cpu=2e-4, cpu_row=1e-4, draft=1e-3)  # given, so that drafts are not measured
COUNTED = ("hits", "misses", "loads", "waves", "cpu_experts", "cpu_rows")


class Uncounted:
    """Keeps the calls of an engine's layers that are not counted, in their order."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple] = []
        self.layers: SlotLayers | None = None
        fill, cold, together, waves = SlotLayers.fill, CpuDivision.cold, SlotLayers.together, SlotLayers.waves

        def kept_fill(layers, keys):
            self.layers = layers
            self.calls.append(("fill", keys))
            return fill(layers, keys)

        def kept_cold(division, layer, routed, counters, real=None):
            if counters is None:
                self.calls.append(("cold", layer, routed.copy(), None, real))
            return cold(division, layer, routed, counters, real)

        def kept_together(layers, layer, routed, counters):
            if counters is None:
                self.calls.append(("together", layer, routed.copy(), None))
            return together(layers, layer, routed, counters)

        def kept_waves(layers, layer, routed, counters):
            if counters is None:
                self.calls.append(("waves", layer, routed.copy(), None))
            return waves(layers, layer, routed, counters)

        patch.setattr(CpuDivision, "cold", kept_cold)
        for name, function in {"fill": kept_fill, "together": kept_together, "waves": kept_waves}.items():
            patch.setattr(SlotLayers, name, function)

    def repeat(self, layers: SlotLayers) -> None:
        for name, *arguments in self.calls:
            result = getattr(layers.cpu if name == "cold" else layers, name)(*arguments)
            if name in ("fill", "waves"):
                list(result)
            elif name == "together" and result is not None:
                layers.release(result[1])


def simulated(trace: Trace, spac: dict, balancer: str, slots: int, gamma: int, before: Uncounted) -> SlotsReplay:
    facts = trace.facts
    knobs = {"layers": facts.layers, "top_k": facts.top_k, "gamma": gamma, "expert_bytes": facts.expert_bytes}
    rates = {} if balancer == "fixed" else {"rates": RATES}
    count = {"count": spac["cpu_experts"]} if balancer == "fixed" else {}
    chosen = None if balancer == "none" else components.build("balancers", balancer, **knobs, **rates, **count)
    outcome = Outcome(spac["policy"], balancer, slots, slots / facts.total)
    policy = build_policy(spac["policy"], trace, slots, balancer=balancer)  # which knows the drafts, as an engine's
    costs = Costs.read("rtx4090")
    replay = SlotsReplay(trace, costs, facts.expert_bytes, outcome, policy, chosen, PrefetchSettings(drafts=gamma))
    before.repeat(replay.layers)
    replay.run(rows_of_records(trace))
    return replay


@pytest.mark.parametrize(
    ("spac", "balancer", "speculation"),
    [
        ({"policy": "reuse"}, "none", None),
        # What the CPU computed is admitted when a read has ended, and reads of an engine end when they do.
        ({"policy": "utility", "cpu_experts": "waterfill@admit=False"}, "waterfill@admit=False", None),
        pytest.param({"policy": "layer_lru", "slots": "6%"}, "none", None, marks=pytest.mark.full),
        pytest.param({"policy": "lru", "cpu_experts": 3}, "fixed", "eagle3", marks=pytest.mark.full),
        *(
            pytest.param({"policy": "lru", "cpu_experts": balancer}, balancer, "eagle3", marks=pytest.mark.full)
            for balancer in ("threshold", "threshold@misses=load")
        ),
    ],
    ids=str,
)
def test_counts_are_the_engine_s(spac, balancer, speculation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.trace"
    knobs = {"slots": "25%", "store": "host", "record": f"trace={path}"} | spac
    options = {} if speculation is None else {"speculative_config": METHODS[speculation]}
    with monkeypatch.context() as patch:
        patch.setattr(assembly, "_rates", lambda *arguments: (RATES, "given"))
        patch.setattr(LayerUse, "counts", lambda *_: False)  # when such reads of an engine end, the clock says
        uncounted = Uncounted(patch)
        with engines.engine(str(TOY / "target"), knobs, **options) as llm:
            for prompt in engines.PROMPTS[:4]:
                engines.say(llm, [prompt])
            engines.say(llm, engines.PROMPTS[4:])
            (stats,) = vllm_spac.stats(llm)["workers"]
            del llm  # the trace is complete when the engine is gone
    residency = uncounted.layers.loader.residency
    gamma = 1 if speculation is None else METHODS[speculation]["num_speculative_tokens"]
    replay = simulated(Trace.load(path), spac, balancer, residency.slots, gamma, uncounted)
    found = replay.counters.snapshot()
    assert {name: found[name] for name in COUNTED} == {name: stats[name] for name in COUNTED}
    assert np.array_equal(replay.residency.owner, residency.owner)
    assert stats["hits"] and (balancer == "none" or stats["cpu_experts"])
    assert stats["loads"] or balancer == "threshold"
