"""MoE-Spec's trees in torch, and recorded routing changed as the papers' recipes would have it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.papers import five_papers
from benchmarks.papers import moe_spec_resident as resident
from benchmarks.real.fit import llama
from vllm_spac.tools.traces.synthetic import synthetic_trace


@pytest.fixture
def model() -> object:
    """Two layers with random weights."""
    generator, shape = torch.Generator().manual_seed(0), llama.Shape(2, 16, 24, 2, 1, 1e-5, 1e4)

    def random(*size: int) -> torch.Tensor:
        return (torch.randn(*size, generator=generator) * 0.3).to(llama.COMPUTE)

    found = llama.Llama.__new__(llama.Llama)
    found.shape, found.embedding, found.norm = shape, random(50, 16), torch.ones(16, dtype=llama.COMPUTE)
    ones = torch.ones(16, dtype=llama.COMPUTE)
    found.layers = [
        llama.Layer(ones, ones, random(32, 16), random(16, 16), random(24, 16), random(24, 16), random(16, 24))
        for _ in range(2)
    ]
    return found


def test_each_row_of_a_tree_is_read_behind_its_own_ancestors(model) -> None:
    """Also after rows were forgotten; a chain of the same tokens gives the same streams."""
    parents = torch.tensor([-1, 0, 0, 1, 2, 4])
    tokens, sees = torch.tensor([7, 8, 9, 10, 11, 12]), resident.lineage(parents)
    assert sees[5].tolist() == [True, False, True, False, True, True]
    reader = resident.Reader(model, model.ffn)
    reader.read(torch.tensor([1, 2, 3]))
    for _ in range(2):
        found, _ = reader.read(tokens, 3 + sees.sum(1) - 1, sees)
        reader.keep(torch.arange(3))
    for row in range(6):
        chain = resident.Reader(model, model.ffn)
        chain.read(torch.tensor([1, 2, 3]))
        assert torch.allclose(chain.read(tokens[sees[row]])[0][-1].float(), found[row].float(), atol=0.05), row
    kept = torch.tensor([0, 1, 2, 3, 5, 7, 8])  # the path to the last row
    reader.read(tokens, 3 + sees.sum(1) - 1, sees)
    reader.keep(kept)
    alone = resident.Reader(model, model.ffn)
    alone.read(torch.tensor([1, 2, 3, 7, 9, 11, 12]))
    last = torch.tensor([20])
    assert torch.allclose(reader.read(last)[0].float(), alone.read(last)[0].float(), atol=0.05)


def test_whole_words() -> None:
    pieces = ["x"] * resident.PROMPT + ["Ġbe", "gin", "Ġa", "Ġ1", "Ġend"]
    tokenizer = SimpleNamespace(id_to_token=pieces.__getitem__)
    first = resident.PROMPT
    assert list(resident.words(tokenizer, range(len(pieces)))) == [(first, first + 1), (first + 2, first + 2)]


def test_changes_are_paired() -> None:
    found = resident.change([True, False, True, False], [True, True, True, False])
    assert (found["right"], found["change"]) == (0.5, -0.25)
    assert found["change_error"] == pytest.approx(0.25)


def test_a_budgeted_trace_has_at_most_so_many_experts_in_a_layer() -> None:
    """Rows keep what is in the shortlist; prompts and steps of fewer experts are as they were."""
    trace = synthetic_trace(layers=2, experts=16, top_k=4, steps=20, drafts=3)
    cut, few = five_papers.budgeted(trace, 5), five_papers.budgeted(trace, 16)
    assert (few.ids == trace.ids).all()
    for first, last in zip(trace.record_start[:-1], trace.record_start[1:], strict=True):
        ours, theirs = cut.ids[first:last], trace.ids[first:last]
        used = np.unique(ours)
        assert len(used) <= 5 and all(len(set(row)) == 4 for row in ours.tolist())
        assert all(set(a) >= set(b) & set(used.tolist()) for a, b in zip(ours.tolist(), theirs.tolist(), strict=True))


def test_what_a_draft_model_names() -> None:
    """All of what is routed at recall 1, a part below it, and nothing of the last draft."""
    trace = synthetic_trace(layers=2, experts=64, top_k=4, steps=20, drafts=3)
    for recall in (1.0, 0.5):
        found = [each for each in five_papers.named(trace, recall) if each is not None]
        step = next(number for number, each in enumerate(five_papers.named(trace, recall)) if each is not None)
        first = trace.record_start[np.searchsorted(trace.record_step, step)]
        ids = trace.ids[first : first + 8].reshape(2, 4, 4).transpose(1, 0, 2)
        assert found[0].shape == (4, 2, 4) and (found[0][-1] == -1).all()
        same = np.mean([(each[:-1, :, :, None] == ids[:-1, :, None]).any(3).mean() for each in found[:1]])
        assert same == 1.0 if recall == 1.0 else 0.25 < same < 0.8
