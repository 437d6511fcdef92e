"""Models of published shapes: what may be asked for, the streams of their routers, their weights, and their times."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.common import PlanError
from benchmarks.serving import engine, prompts
from benchmarks.shapes import profiled, routing
from benchmarks.shapes.shape import Shape, known
from vllm_spac.tools.traces.synthetic import synthetic_trace
from vllm_spac.tools.traces.trace_text import Text


def test_published_shapes_are_true_but_for_what_was_asked_for() -> None:
    found = Shape.parse("shape:qwen3-30b-a3b")
    config = found.config
    sizes = [config[key] for key in ("hidden_size", "moe_intermediate_size", "num_experts", "num_experts_per_tok")]
    assert sizes == [2048, 768, 128, 8] and found.checkpoint.expert_bytes == [3 * 2048 * 768 * 2]
    assert found.moe_layers == 24 and found.kv_bytes(1) == 24 * 2 * 4 * 128 * 2
    assert known()["qwen3-30b-a3b"]["num_hidden_layers"] == 48, "the table is not changed"
    asked = Shape.parse("shape:tiny@layers=3,experts=32,hidden=128,stream=low")
    assert (asked.moe_layers, asked.checkpoint.experts, asked.stream) == (3, 32, "low")
    assert asked.config["hidden_size"] == 128
    assert Shape.parse("shape:glm-4.5-air@layers=3").moe_layers == 2, "its first layer is dense"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("shape:qwen", "use one of tiny, qwen3-30b-a3b"),
        ("shape:gpt-oss-120b", "no shape has this name"),  # in MXFP4, for which no weights are drawn
        ("shape:tiny@depth=2", "no argument depth; use layers, experts"),
        ("shape:tiny@layers", "write NAME@argument=value"),
        ("shape:tiny@layers=none", "layers=none is no positive number"),
        ("shape:tiny@stream=fast", "use even, low, high"),
    ],
)
def test_what_is_not_known_is_refused_with_what_is(text: str, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        Shape.parse(text)


def test_a_folder_is_made_once_and_again_if_it_differs(tmp_path: Path) -> None:
    shape = Shape.parse("tiny@layers=1")
    folder = shape.write(tmp_path)
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 1
    written = (folder / routing.FILE).stat().st_mtime_ns
    assert shape.write(tmp_path) == folder and (folder / routing.FILE).stat().st_mtime_ns == written
    (folder / "shape.json").write_text("{}")
    shape.write(tmp_path)
    assert (folder / routing.FILE).stat().st_mtime_ns > written


def test_streams_are_as_local_as_they_say() -> None:
    """Qwen3-30B-A3B's neighbours share 45 % of their experts; independent ones share their share of all."""
    overlap = {name: routing.make(name, 2, 128, 8, 2000).describe()["overlap"] for name in ("even", "low", "high")}
    assert overlap["even"] == pytest.approx(8 / 128, abs=0.01)
    assert overlap["low"] == pytest.approx(0.45, abs=0.02) and overlap["high"] == pytest.approx(0.45, abs=0.02)


def test_a_table_chooses_what_the_stream_says(tmp_path: Path) -> None:
    made = routing.make("high", 3, 32, 4, 256)
    routing.save(made, tmp_path)
    table = routing.table(routing.load(tmp_path)).float()
    assert table.shape == (3, 256, 32)
    chosen = table.topk(4, dim=2).indices.sort(dim=2).values
    assert (chosen.transpose(0, 1).numpy() == np.sort(made.ids, axis=2)).all()
    least = torch.softmax(table, -1).topk(4, dim=2).values.sum(-1).min()
    assert least > 0.99, "experts that are not chosen have weight"


def test_recorded_choices_are_put_side_by_side() -> None:
    """For twice the experts, two parts of the text, each with its best half; further layers repeat them."""
    trace = synthetic_trace(layers=2, experts=16, top_k=4, steps=160)
    text = Text.of(trace)
    made = routing._widened(text, "trace", 5, 32, 4)
    assert made.ids.shape == (80, 5, 4) and made.experts == 32
    order = np.argsort(-text.weights, axis=2, kind="stable")[:, :, :2]
    best = np.take_along_axis(text.ids, order, axis=2).astype(int)
    assert (made.ids[:, :2] == np.concatenate([best[:80], best[80:] + 16], axis=2)).all()
    assert (made.ids[:, 2:4] == np.roll(made.ids[:, :2], -80 // 3, axis=0)).all()
    for experts, top_k in ((24, 4), (32, 3), (16, 5)):
        with pytest.raises(PlanError, match="cannot be put side by side"):
            routing._widened(text, "trace", 2, experts, top_k)


def test_requests_have_rows_of_their_own(tmp_path: Path) -> None:
    """Prompts have the tokens of their request only; a token's row is that of the request at its position."""
    folder = Shape.parse("tiny@layers=1").write(tmp_path)
    found = prompts.load(folder, 3, 10).ids
    assert [{token % routing.STREAMS for token in ids} for ids in found] == [{0}, {1}, {2}]
    assert len({token for ids in found for token in ids}) > 10 and max(map(max, found)) < 4096
    again = prompts.Prompts(found, "").begun_again(2).ids
    assert [ids[:10] for ids in again] == found and [ids[10:] for ids in again] == [ids[:2] for ids in found]
    rows = routing.rows_of(torch.tensor(found[2]), torch.arange(10), 640)
    assert rows.tolist() == list(range(20, 30))
    assert routing.rows_of(torch.tensor([63]), torch.tensor([15]), 640).tolist() == [5], "at its end it begins again"


@pytest.fixture(scope="module")
def weights():
    from benchmarks.shapes import random_weights

    return random_weights


def test_weights_keep_the_width_of_states(weights) -> None:
    bank = weights.Bank(0, size=1 << 20)
    matrix = weights._drawn("a", (64, 512), torch.bfloat16, bank).float()
    assert matrix.std() == pytest.approx(512**-0.5, rel=0.05)
    assert not torch.equal(matrix, weights._drawn("b", (64, 512), torch.bfloat16, bank).float())
    assert torch.equal(matrix, weights._drawn("a", (64, 512), torch.bfloat16, bank).float())
    writing = weights._drawn("w2_weight", (64, 512), torch.bfloat16, weights.Bank(0, 4, 1 << 20)).float()
    assert writing.std() == pytest.approx(1 / 4**0.5 * 512**-0.5, rel=0.05), "many layers would add too much"
    codes = weights._drawn("a", (256, 512), torch.float8_e4m3fn, bank).float()
    scales = weights._drawn("a.weight_scale_inv", (2, 4), torch.float32, bank)
    assert (codes * scales[0, 0]).std() == pytest.approx(512**-0.5, rel=0.05)
    with pytest.raises(NotImplementedError, match="no rule draws x.weight_scale"):
        weights._drawn("x.weight_scale", (4, 1), torch.float32, bank)


@pytest.mark.parametrize("width", [256, 2048])
def test_a_request_stays_with_its_tokens(weights, width: int) -> None:
    """Whatever layers add to a state: some 0.4, in random directions."""
    bank, tokens = weights.Bank(0, size=1 << 24), 4096
    model = nn.ModuleDict(
        {"embed_tokens": nn.Embedding(tokens, width), "lm_head": nn.Linear(width, tokens, bias=False)}
    )
    for name, parameter in model.named_parameters():
        weights._fill(name, parameter, bank)
    states = model["embed_tokens"].weight.data
    states = states + 0.4 * torch.randn(states.shape, generator=torch.Generator().manual_seed(1))
    states = states / states.pow(2).mean(1, keepdim=True).sqrt()
    answers = model["lm_head"](states).argmax(1)
    kept = (answers % routing.STREAMS == torch.arange(tokens) % routing.STREAMS).float().mean()
    assert kept > 0.99 and len(answers.unique()) > 1000, "all tokens of a request would be alike"


def test_routers_follow_the_stream(weights) -> None:
    """What a router is given is replaced before anything that was wrapped around it earlier, as the plugin does."""
    stream = routing.make("high", 2, 16, 4, 128)

    class Router:
        def _compute_routing(self, hidden, logits, indices_type):
            return logits.topk(4, dim=1)[::-1]

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.routed_experts, self.router = nn.Module(), Router()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(), Layer()])
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, input_ids, positions):
            blank = torch.zeros(len(positions), 16)
            return [layer.router._compute_routing(blank, blank, None)[0] for layer in self.layers]

    model = Model()
    weights.follow(model, stream)
    tokens, positions = torch.tensor([7, 64 + 7, 9]), torch.tensor([0, 1, 127])
    for layer, ids in enumerate(model(tokens, positions)):
        expected = stream.ids[[14, 15, (127 + 18) % 128], layer]
        assert (ids.sort(dim=1).values.numpy() == np.sort(expected, axis=1)).all()
    with pytest.raises(ValueError, match="1 layers, the model 2"):
        weights.follow(model, routing.make("high", 1, 16, 4, 128))


def test_times_beside_a_long_prompt() -> None:
    """Two streams with a token each second, of which one gets none for the five seconds that the prompt takes."""
    one = [float(second) for second in range(20)]
    other = [*one[:11], 16.0]
    assert engine.waited([one, other], 10.5, 15.5) == {
        "longest_gap": 1.0, "kept": pytest.approx(0.5), "first_token": 5.0, "alone": 1.0
    }  # fmt: skip


def test_idle_is_what_no_kernel_covers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert profiled.covered([(0, 4), (1, 2), (3, 6), (8, 9)]) == 7
    assert profiled.covered([]) == 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no GPU" in profiled.profile(lambda: None, 1)["left_out"]


def test_kernels_are_told_from_the_host() -> None:
    cuda, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU

    def event(device, name, start, length):
        return SimpleNamespace(
            device_type=lambda: device, name=lambda: name, start_ns=lambda: start, duration_ns=lambda: length
        )

    events = [event(cpu, "launch", 0, 9), event(cuda, "gemm", 5, 3), event(cuda, "mark", 6, 0)]
    assert list(profiled._spans(events)) == [("gemm", 5, 8)]


def test_bytes_of_a_step_as_time() -> None:
    found = {"rates": {"link": 50e9, "hbm": 2000e9}}
    profiled.divide(found, {"hits": 10, "bytes": {"host": 25e6, "fetched": 25e6}}, 4_000_000, 160_000_000)
    assert (found["link_ms"], found["hbm_bytes"], found["hbm_ms"]) == (1.0, 200_000_000, 0.1)
