"""The account of drafts: chains behind each place of a text, steps made of them, and what they cost."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from benchmarks.papers import drafters
from benchmarks.papers import drafts_account as account
from benchmarks.papers.drafts_account import Drafter, Machine, Steps, Text
from benchmarks.real.fit import carved, chains, eagle, llama
from benchmarks.real.fit.carved import CarvedLayer
from benchmarks.real.fit.eagle import Eagle
from benchmarks.real.fit.llama import Llama
from benchmarks.real.fit.rolls import Way, said
from tests.benchmarks.test_real_model import experts, tiny
from vllm_spac.recording.trace_file import DRAFT, TraceFacts

LAYERS, EXPERTS, TOP_K, MOST = 2, 64, 4, 3
FREE = 1.0, 0.0, 0.0, 0.0  # seconds of a step, a row, a miss, a draft


def text(seed: int, places: int = 40, right: float = 0.6, known: float = 1.0) -> Text:
    draw = np.random.default_rng(seed)
    drafts = draw.integers(0, 100, (places, MOST))
    drafts[draw.random(places) >= known] = chains.UNKNOWN
    chosen = draw.random((places, MOST + 1, LAYERS, EXPERTS)).argsort(-1)[..., :TOP_K].astype(np.uint8)
    fits = (draw.random((places, MOST)) < right) & (drafts >= 0)
    return Text(drafts, draw.random((places, MOST)).astype(np.float32), fits, chosen)


@given(st.integers(0, 100), st.integers(0, MOST), st.booleans(), st.booleans())
def test_steps_pass_every_place_once(seed: int, most: int, before: bool, chosen: bool) -> None:
    known = {"dense": [text(seed), text(seed + 1)], "ngram": [text(seed + 2, known=0.5), text(seed + 3, known=0.5)]}
    drafter = Drafter("dense", drafters.FREE, most, "ngram" if before else "", chosen)
    steps = [*Steps(drafter, 8, (1.0, 0.1, 0.01, 0.001)).of(known)]
    for step, after in pairwise(steps):
        right = step.text.right[step.place, : step.kept].tolist()
        assert step.accepted == (right + [False]).index(False)
        assert after.place in (step.place + 1 + step.accepted, 0)
        assert step.kept <= (MOST if before else most) and (step.text.drafts[step.place, : step.kept] >= 0).all()
    assert sum(step.place == 0 for step in steps) == 2


def test_a_trace_of_steps_has_their_rows() -> None:
    known = {"dense": [text(0)]}
    steps = [*Steps(Drafter("dense", drafters.FREE, MOST), 8, FREE).of(known)]
    facts = TraceFacts(LAYERS, EXPERTS, TOP_K, 1 << 20, "")
    trace = account.traced(steps, facts)
    assert trace.step_tokens.tolist() == [1 + step.accepted for step in steps]
    for number, step in enumerate(steps):
        for layer in range(LAYERS):
            start, stop = trace.record_start[number * LAYERS + layer : number * LAYERS + layer + 2]
            assert (trace.ids[start:stop] == step.text.experts[step.place, : 1 + step.kept, layer]).all()
    assert int((trace.row_kind == DRAFT).sum()) == sum(step.kept for step in steps)


def test_n_grams_go_first_where_the_head_says_the_same() -> None:
    """The head's first draft is made all the same."""
    good, head = text(0, right=1.0), text(1)
    drafter = Drafter("dense", drafters.FREE, 2, before="ngram")
    for behind, own in ((head._replace(drafts=good.drafts), False), (head._replace(drafts=good.drafts + 1), True)):
        steps = [*Steps(drafter, 8, FREE).of({"ngram": [good], "dense": [behind]})]
        assert (steps[0].text is behind) == own  # where they contradict one another nothing is known yet
        assert all((step.text is good) == (step.made == 1) for step in steps)
        assert all(step.text is good and step.accepted == MOST for step in steps[8:])


@pytest.mark.parametrize("machine", [Machine("rtx4090", "bf16", False), Machine("rtx4090", "int4", True)])
def test_a_draft_takes_what_its_drafter_costs(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else depends on it; a budget saves loads and never adds tokens."""
    texts = {name: [text(seed, 60)] for seed, name in enumerate(chains.DRAFTERS)}
    monkeypatch.setattr(account, "_known", texts)
    monkeypatch.setitem(account.DRAFTERS, "free", Drafter("dense", drafters.FREE, MOST))
    monkeypatch.setitem(account.DRAFTERS, "dear", Drafter("dense", drafters.PARENT, MOST))
    (free,), (dear,) = (account.rows_of(machine, 0.25, True, name, [0]) for name in ("free", "dear"))
    steps = [*Steps(account.DRAFTERS["dear"], 16, FREE).of(texts)]
    made, tokens = sum(step.made for step in steps), sum(1 + step.accepted for step in steps)
    later = tokens / dear["tokens_per_s"] - tokens / free["tokens_per_s"]
    assert later == pytest.approx(made * dear["seconds_per_draft"])
    assert dear["hit_rate"] == free["hit_rate"]
    exact, cut = account.rows_of(machine, 0.25, False, "free", [0, TOP_K])
    assert cut["tokens_per_s"] > exact["tokens_per_s"] and cut["tokens_per_step"] == exact["tokens_per_step"]


def test_drafts_are_chosen_by_what_they_cost_under_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget of one token's experts makes them cost no loads, so that more of them are worth it."""
    monkeypatch.setattr(account, "_known", {name: [text(seed, 400)] for seed, name in enumerate(chains.DRAFTERS)})
    monkeypatch.setitem(account.DRAFTERS, "chosen", Drafter("dense", drafters.HEAD, MOST, chosen=True))
    exact, cut = account.rows_of(Machine("rtx4090", "bf16", True), 0.25, False, "chosen", [0, TOP_K])
    assert cut["rows_per_step"] > exact["rows_per_step"] and cut["tokens_per_step"] > exact["tokens_per_step"]


def test_chains_are_what_decoders_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent's chain is what it says by itself; experts are those of the target's rows, draft by draft."""
    for module in (chains, carved, eagle, llama):
        monkeypatch.setattr(module, "COMPUTE", torch.float32)  # so that near experts are not exchanged by rounding
    monkeypatch.setattr(Eagle, "depths", (0, 1))  # the tiny model has one layer
    tiny(tmp_path / "dense")
    model = Llama(tmp_path / "dense")
    layer = CarvedLayer(model.layers[0], experts(), 3)
    head = Eagle(model, 24)
    head.read = lambda streams: torch.zeros(*streams.shape[:2], model.shape.hidden)
    prompt = torch.tensor([1, 5, 2, 7])
    answer = said(model, lambda number, h: layer(h), [prompt], [Way(12)])[0]

    found = chains.chains(model, [layer], head, prompt, answer, MOST)
    ids = torch.cat([prompt, answer])
    for place, drafts in zip(range(len(prompt) - 1, len(ids)), found["dense"].drafts, strict=False):
        before = ids[: place + 2]
        [alone] = said(model, model.ffn, [before], [Way(MOST)])
        assert torch.equal(alone, drafts)
        asked: list[torch.Tensor] = []

        def ffn(number: int, h: torch.Tensor, asked: list[torch.Tensor] = asked) -> torch.Tensor:
            asked.append(layer.logits(h).topk(layer.top_k).indices)
            return layer(h)

        model.hidden(torch.cat([before, drafts])[None], ffn)
        wanted = asked[0][0, place + 1 :].sort().values
        assert torch.equal(found["dense"].experts[place - len(prompt) + 1][:, 0].long().sort().values, wanted)
    goals = [ids[len(prompt) + 1 + step :][: len(found["ngram"].right)] for step in range(MOST)]
    assert torch.equal(found["ngram"].right, found["ngram"].drafts == torch.stack(goals, 1))
    save_file(
        {
            f"0.{name}.{part}": value.contiguous()
            for name, each in found.items()
            for part, value in each._asdict().items()
        },
        tmp_path / "c",
    )
    read = chains.read(tmp_path / "c")
    assert all(torch.equal(read[name][0].drafts, found[name].drafts) for name in chains.DRAFTERS)
