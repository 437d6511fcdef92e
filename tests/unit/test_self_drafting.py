"""A model that drafts for itself: which experts its rows run, and which rows are read first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from vllm_spac.kernels.reference.cover import Chosen

from vllm_spac.errors import UnsupportedError
from vllm_spac.integration.hooks import drafts
from vllm_spac.integration.stepping.v1 import self_drafting
from vllm_spac.integration.stepping.v1.self_drafting import SelfDrafting
from vllm_spac.methods.moe_spec.settings import BudgetedLayer, RoutingRule

EXPERTS, TOP_K = 8, 3


def routed(logits: Tensor, held: list[int], rule: RoutingRule | None = None) -> tuple[Chosen, Chosen]:
    """What a router chooses, and what is run in place of it while only ``held`` are in slots."""
    rule = rule or RoutingRule()
    mask = torch.zeros(EXPERTS, dtype=torch.bool)
    mask[held] = True
    layer = BudgetedLayer("model.layers.0", EXPERTS, TOP_K, rule, lambda: mask)
    natural = logits.softmax(1).topk(TOP_K)
    weights = natural.values / natural.values.sum(1, keepdim=True) if rule.renormalize else natural.values
    heard: list[Any] = []
    drafting = SelfDrafting(
        SimpleNamespace(rerouter=SimpleNamespace(override=None)), [layer], lambda *chosen: heard.append(chosen)
    )  # type: ignore[arg-type]
    run = drafting.route(0, logits, logits, weights, natural.indices.int())
    assert len(heard) == 1 and heard[0][2].tolist() == natural.indices.tolist(), "what is needed is named as it is"
    return (weights, natural.indices), run


@given(st.integers(1, 5), st.sets(st.integers(0, EXPERTS - 1)), st.integers(0, 2**31), st.booleans())
def test_rows_run_the_best_experts_that_are_in_slots(rows: int, held: set[int], seed: int, renormalize: bool) -> None:
    logits = torch.randn(rows, EXPERTS, generator=torch.Generator().manual_seed(seed))
    rule = RoutingRule(renormalize=renormalize)
    (natural, ids), (weights, chosen) = routed(logits, sorted(held), rule)
    for row in range(rows):
        own, run = ids[row].tolist(), chosen[row].tolist()
        allowed = held | (set(own) if len(held) < TOP_K else set())
        best = sorted(allowed, key=lambda expert: -float(logits[row, expert]))[:TOP_K]
        assert set(run) == set(best) and len(set(run)) == TOP_K
        if renormalize:
            assert float(weights[row].sum()) == pytest.approx(1, abs=1e-5)
        if set(own) <= held:
            assert run == own and weights[row].tolist() == natural[row].tolist(), "to the bit"


def test_only_forwards_that_draft_are_rerouted() -> None:
    runtime = SimpleNamespace(rerouter=SimpleNamespace(override=None))
    drafting = SelfDrafting(runtime, [])  # type: ignore[arg-type]
    with pytest.raises(ValueError), drafting.drafting():
        assert runtime.rerouter.override == drafting.route
        raise ValueError
    assert runtime.rerouter.override is None


def test_a_router_of_its_own_is_refused() -> None:
    layer = BudgetedLayer("model.layers.0", EXPERTS, TOP_K, RoutingRule(custom=True), None)
    with pytest.raises(UnsupportedError, match="model.layers.0 routes by a function of its own"):
        SelfDrafting(SimpleNamespace(), [layer])  # type: ignore[arg-type]


def engine(draft: str, model: str = "org/model", **speculation: Any) -> Any:
    given = {"method": "draft_model", "draft_model_config": SimpleNamespace(model=draft, revision=None)} | speculation
    return SimpleNamespace(
        speculative_config=SimpleNamespace(**given),
        model_config=SimpleNamespace(model=model, revision=None),
        use_v2_model_runner=False,
    )


def test_the_model_is_known_by_its_folder_or_its_name(tmp_path) -> None:
    assert drafts.of_itself(engine("org/model")) and not drafts.of_itself(engine("org/other"))
    assert not drafts.of_itself(engine("org/model", method="mtp")), "a part of the checkpoint drafts"
    there, link, copy = (tmp_path / name for name in ("model", "link", "copy"))
    there.mkdir()
    copy.mkdir()
    link.symlink_to(there)
    assert drafts.of_itself(engine(str(link), str(there))) and not drafts.of_itself(engine(str(copy), str(there)))


@pytest.mark.parametrize("rejected", [None, [0, 2]])
def test_the_first_forward_reads_the_token_sampled_last(rejected: list[int] | None) -> None:
    """Two requests: 3 rows from position 10 on and 4 from position 4 on; block size 4, so that 13 is in block 3."""
    block_table = torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]], dtype=torch.int32)
    metadata = SimpleNamespace(
        query_start_loc=torch.tensor([0, 3, 7]), block_table_tensor=block_table, seq_lens=torch.tensor([13, 8])
    )
    metadata.replace = lambda **changes: SimpleNamespace(**vars(metadata) | changes)
    drafter = SimpleNamespace(
        max_model_len=64,
        block_size=4,
        arange=torch.arange(8, dtype=torch.int32),
        input_ids=torch.zeros(8, dtype=torch.int32),
        positions=torch.zeros(8, dtype=torch.int64),
    )
    count = None if rejected is None else torch.tensor(rejected, dtype=torch.int32)
    rows, sampled, changed = self_drafting._sampled_last(
        drafter,  # type: ignore[arg-type]
        next_token_ids=torch.tensor([91, 92]),
        target_positions=torch.tensor([10, 11, 12, 4, 5, 6, 7]),
        cad=metadata,  # type: ignore[arg-type]
        num_rejected_tokens_gpu=count,
        target_token_ids=None,
    )
    positions = [13, 8] if rejected is None else [13, 6]
    slots = [8 * 4 + 1, 3 * 4] if rejected is None else [8 * 4 + 1, 2 * 4 + 2]
    assert rows == 2 and sampled.tolist() == [0, 1]
    assert drafter.input_ids[:2].tolist() == [91, 92] and drafter.positions[:2].tolist() == positions
    assert changed.slot_mapping.tolist() == slots, "no other row writes keys or values"
    assert changed.seq_lens.tolist() == [position + 1 for position in positions]
    assert (changed.max_query_len, changed.num_actual_tokens) == (1, 2)
    assert changed.query_start_loc.tolist() == [0, 1, 2]
    assert count is None or not count.any(), "vLLM subtracts them afterwards"


def test_a_row_past_the_longest_text_writes_nothing() -> None:
    metadata = SimpleNamespace(
        query_start_loc=torch.tensor([0, 1]),
        block_table_tensor=torch.tensor([[5, 6]], dtype=torch.int32),
        seq_lens=torch.tensor([8]),
    )
    metadata.replace = lambda **changes: SimpleNamespace(**vars(metadata) | changes)
    buffers = {"input_ids": torch.zeros(4, dtype=torch.int32), "positions": torch.zeros(4, dtype=torch.int64)}
    drafter = SimpleNamespace(max_model_len=8, block_size=4, arange=torch.arange(4, dtype=torch.int32), **buffers)
    given = {
        "next_token_ids": torch.tensor([9]),
        "target_positions": torch.tensor([7]),
        "num_rejected_tokens_gpu": None,
    }
    _, _, changed = self_drafting._sampled_last(drafter, cad=metadata, **given)  # type: ignore[arg-type]
    assert changed.slot_mapping.tolist() == [-1]
