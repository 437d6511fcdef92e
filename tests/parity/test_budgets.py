"""Budgets on real models: exact where nothing is cut, within the bound where something is."""

from __future__ import annotations

import engines
import pytest
import torch
import zoo
from exactness import first_difference
from vllm_spac.kernels.reference.cover import substituted, within_groups

import vllm_spac

EXPERTS = {"mixtral": 8, "gpt_oss": 8, "phimoe": 8}
CUSTOM = {"phimoe"}  # routes by a function of its own: truncation only


class Routing:
    """Listens to the routers: does the rule that was read off vLLM's router give what the router gives?"""

    def __init__(self, layers) -> None:
        self.layers = layers
        self.seen = 0

    def route(self, layer, hidden, logits, weights, ids) -> None:
        known = self.layers[layer]
        if known.rule.custom:
            return
        probs = known.rule.probs(logits)
        rule, size, summed = known.rule, known.experts, 1 if known.rule.bias is None else 2
        chosen_by = probs if rule.bias is None else probs + rule.bias
        every = torch.ones(size, dtype=torch.bool)
        if rule.groups is not None:
            every = within_groups(every, chosen_by, known.top_k, rule.groups, rule.top_groups, summed)
        ours = substituted(probs, chosen_by, every, known.top_k, rule.renormalize, rule.scale)
        # Logits of 8 bits are often equal, and torch.topk breaks ties as it likes: weights are compared, not ids.
        ranked = [each.float().sort(dim=1, descending=True).values for each in (weights, ours[0])]
        # vLLM's CPU routers work in the dtype of the logits: exp(a - b) is off by what a - b is, here below 8, so that
        # half a unit of bfloat16 is 8 * eps / 2.
        bits = torch.finfo(logits.dtype).eps
        torch.testing.assert_close(*ranked, rtol=4 * bits, atol=1e-6)
        self.seen += len(ids)


def _listen(worker) -> None:
    runtime = worker._spac_experts().runtime
    runtime.rerouter.listeners.append(Routing(runtime.budget.layers))


def _rows_seen(worker) -> int:
    return worker._spac_experts().runtime.rerouter.listeners.pop().seen


# Kinds of routers; groups (deepseek_v2) and a function of its own (phimoe) take a minute each.
KINDS = ("qwen3_moe", "glm4_moe")  # softmax, sigmoid with a bias
ALL = [f if f in KINDS else pytest.param(f, marks=pytest.mark.full) for f in zoo.FAMILIES]


@pytest.mark.parametrize("family", ALL)
def test_budget(family, checkpoint, stock, tmp_path):
    exact, experts = stock(family).tokens, EXPERTS.get(family, 16)
    coverages = ["truncation"] if family in CUSTOM else ["truncation", "substitution"]
    spac = {"slots": "60%", "disk_dir": str(tmp_path)}
    # A prefix that was computed before is attended to by another kernel, which rounds differently.
    with engines.engine(checkpoint(family), spac, enable_prefix_caching=False) as llm:

        def change(**settings):
            return llm.collective_rpc("spac_budget", args=(settings,))[0]

        llm.collective_rpc(_listen)
        assert first_difference(engines.say(llm), exact) is None
        assert (llm.collective_rpc(_rows_seen)[0] > 0) == (family not in CUSTOM)
        for coverage in coverages:
            for bound in ({"budget": experts}, {"mass": 1.0}):
                change(**bound, coverage=coverage, when="all")
                assert first_difference(engines.say(llm), exact) is None, (coverage, bound)
        change(budget=experts // 2, coverage=coverages[-1], when="all")
        assert engines.say(llm) != exact
        stats = vllm_spac.stats(llm)["workers"][0]
        assert stats["mode"] == "lossy" and 0 < stats["budget"]["dropped_share"] < 1
        with pytest.raises(Exception, match="a layer has"):
            change(budget=experts + 1, coverage="truncation")
        change(budget=experts // 2, coverage="truncation")
        idle = vllm_spac.stats(llm)["workers"][0]
        assert idle["mode"] == "exact" and "add --speculative-config" in idle["budget"]["setting"], "no drafts to cut"
        change()
        assert vllm_spac.stats(llm)["workers"][0]["mode"] == "exact"
        assert first_difference(engines.say(llm), exact) is None, "no trace of a budget is left"
