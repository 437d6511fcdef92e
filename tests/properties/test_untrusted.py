"""Untrusted files: they load, or raise one error of one line, with memory bounded by a multiple of their size."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from safetensors.torch import save_file
from typer.testing import CliRunner

from vllm_spac.cli.check import print_model
from vllm_spac.cli.main import app
from vllm_spac.decisions import costs
from vllm_spac.decisions.costs import Costs
from vllm_spac.decisions.predictor_file import Identity, PredictorFile, kinds
from vllm_spac.decisions.predictors._trained import Sizes
from vllm_spac.decisions.predictors.base import START, PredictorInputs
from vllm_spac.errors import SpacError
from vllm_spac.recording.trace_file import Trace
from vllm_spac.storage.checkpoint import headers, packed_folder
from vllm_spac.storage.checkpoint.published import find_model
from vllm_spac.tools.traces import trace_statistics
from vllm_spac.tools.traces.synthetic import synthetic_trace

SLACK = 16 << 20  # what 2^20 experts take, and the interpreter's own
HUGE = st.sampled_from([-1, 0, 1, 255, 256, 257, 1 << 16, 1 << 20, 1 << 31, 1 << 32, 1 << 62, 1 << 63, 1 << 64, 10**30])
ODD = [None, True, [], {}, 1.5, "\x1b[31m", "\ud800", "F32", "U8", "BF16", "F4", "[" * 2000, [[]], [0, 8]]
VALUES = HUGE | HUGE.map(str) | st.text(max_size=8) | st.sampled_from(ODD).map(copy.deepcopy)  # ``spoil`` changes them


def split(content: bytes) -> tuple[dict, bytes]:
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def joined(header: object, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@st.composite
def damaged(draw, content: bytes) -> bytes:
    """Bytes flipped, cut, added or doubled; or a value somewhere in the header replaced by another."""
    how = draw(st.sampled_from(["bytes", "cut", "grown", "header", "length"]))
    if how == "bytes":
        found = bytearray(content)
        for at in draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=8)):
            found[at] = draw(st.integers(0, 255))
        return bytes(found)
    if how == "cut":
        return content[: draw(st.integers(0, len(content) - 1))]
    if how == "grown":
        return content + draw(st.binary(min_size=1, max_size=64))
    if how == "length":
        return draw(HUGE.filter(lambda number: 0 <= number < 1 << 64)).to_bytes(8, "little") + content[8:]
    header, data = split(content)
    for _ in range(draw(st.integers(1, 3))):
        spoil(draw, header)
    return joined(header, data)


def spoil(draw: Callable, node) -> None:
    """Replace, remove or add one value somewhere below ``node``."""
    while True:
        places = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not places:
            return
        place = draw(st.sampled_from(places))
        if isinstance(node[place], dict | list) and node[place] and draw(st.integers(0, 3)):
            node = node[place]
            continue
        action = draw(st.sampled_from(["replace", "replace", "remove", "add"]))
        if action == "remove":
            del node[place]
        elif action == "add" and isinstance(node, dict):
            node[draw(st.text(max_size=4))] = draw(VALUES)
        else:
            node[place] = draw(VALUES)
        return


def loads_or_refuses(load: Callable[[], object], size: int, multiple: int) -> None:
    tracemalloc.start()
    try:
        load()
    except SpacError as error:
        assert str(error).isprintable() and len(str(error)) < 5000
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak <= multiple * size + SLACK


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("untrusted")


def content_of(save: Callable[[Path], object], path: Path) -> bytes:
    save(path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def trace(folder) -> bytes:
    return content_of(synthetic_trace(layers=2, experts=8, top_k=2, steps=5, drafts=1).save, folder / "trace")


@given(st.data())
@settings(max_examples=examples(400), deadline=None)
def test_traces(folder, trace, data) -> None:
    path, content = folder / "t", data.draw(damaged(trace))
    path.write_bytes(content)

    def look() -> None:
        found = Trace.load(path)
        if found.records:
            trace_statistics.distances(found)
            trace_statistics.uses(found)

    loads_or_refuses(look, len(content), 64)


@pytest.fixture(scope="module")
def predictors(folder) -> bytes:
    sizes = Sizes(layers=2, experts=4, top_k=2, width=3, reach=1)
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, dict] = {
        name: {part: torch.rand(shape, generator=generator).to(dtype) for part, (dtype, shape) in specs.items()}
        for name, specs in ((name, kinds()[name].specs(sizes)) for name in kinds() if name != "neural")
    }
    left_out = {"neural": "too slow"}
    made = PredictorFile(Identity("0123", "toy", ("a", "b")), sizes, 9, tensors, left_out)
    return content_of(made.save, folder / "predictors")


@given(st.data())
@settings(max_examples=examples(300), deadline=None)
def test_predictors(folder, predictors, data) -> None:
    path, content = folder / "p", data.draw(damaged(predictors))
    path.write_bytes(content)

    def look() -> None:
        found = PredictorFile.read(path)
        for name in found.names:
            predictor = found.build(name)
            for layer in (START, 0):
                list(predictor.guesses(PredictorInputs(layer, torch.ones(1, found.sizes.width), ids, weights)))

    ids, weights = torch.tensor([[0, 1]]), torch.ones(1, 2)
    loads_or_refuses(look, len(content), 64)


JSON = st.recursive(VALUES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner))


@given(JSON | st.binary(max_size=64), st.data())
@settings(max_examples=examples(200), deadline=None)
def test_profiles(folder, value, data) -> None:
    path = folder / "j"
    path.write_bytes(value if isinstance(value, bytes) else json.dumps(value).encode())
    loads_or_refuses(lambda: Costs.read(path), path.stat().st_size, 64)
    profile = json.loads((Path(costs.__file__).parent / "profiles" / "h200.json").read_text())
    spoil(data.draw, profile)
    path.write_text(json.dumps(profile))
    loads_or_refuses(lambda: Costs.read(path), len(path.read_bytes()), 64)


CONFIG = {
    "model_type": "toy",
    "num_hidden_layers": 2,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "config_groups": {"a": {"weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}},
    },
}


@given(st.data())
@settings(max_examples=examples(300), deadline=None)
def test_checkpoints(folder, data) -> None:
    model = folder / "model"
    model.mkdir(exist_ok=True)
    names = [
        f"model.layers.{n}.mlp.experts.{e}.up_proj.weight{s}" for n in (0, 1) for e in (0, 1) for s in ("", "_scale")
    ]
    path = model / "a.safetensors"
    save_file({name: torch.zeros(4, 4) for name in names}, path)
    config = json.loads(json.dumps(CONFIG))
    if data.draw(st.booleans()):
        path.write_bytes(data.draw(damaged(path.read_bytes())))
    else:
        spoil(data.draw, config)
    (model / "config.json").write_text(json.dumps(config))
    size = path.stat().st_size
    loads_or_refuses(lambda: headers.read_checkpoint(model), size, 64)
    said = Console(file=io.StringIO(), width=80)
    with contextlib.suppress(SpacError):
        print_model(said, find_model(str(model)))
    assert "\x1b" not in said.file.getvalue()


@given(st.data())
@settings(max_examples=examples(100), deadline=None)
def test_packed_experts(folder, data) -> None:
    fingerprint = "0123456789abcdef" * 2
    path = folder / "packed" / fingerprint / "layer-000" / "expert-0000.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = {"format": packed_folder.FORMAT, "fingerprint": fingerprint, "layer": "\x1b[31m[red]x", "expert": "0"}
    header = {"__metadata__": facts | {"xxh3_128": "0"}}
    spoil(data.draw, header)
    text = json.dumps(header).encode().ljust(packed_folder.HEADER - 8)
    path.write_bytes(data.draw(damaged(len(text).to_bytes(8, "little") + text + b"data" * 8)))
    shown = CliRunner().invoke(app, ["packed", "--disk-dir", str(folder / "packed"), "--verify"])
    assert shown.exit_code in (0, 1) and (shown.exception is None or isinstance(shown.exception, SystemExit))
    assert "\x1b" not in shown.output


# --- what was found by hand -------------------------------------------------------------------------------------------


def claiming(content: bytes, **facts: object) -> bytes:
    header, data = split(content)
    header["__metadata__"] |= {name: str(value) for name, value in facts.items()}
    return joined(header, data)


@pytest.mark.parametrize(
    "facts",
    [
        {"layers": 65535},
        {"layers": 2 * 10**9, "experts": 256},
        {"layers": 1000, "experts": 2 * 10**6},
        {"experts": 1 << 62},
        {"expert_bytes": 10**300},
        {"expert_bytes": -1},
        {"layers": "9" * 4000},
        {"layers": "9" * 5000},
        {"top_k": 1 << 40},
        {"layers": "nan"},
    ],
    ids=str,
)
def test_a_small_trace_of_a_large_model(folder, trace, facts) -> None:
    path = folder / "large"
    path.write_bytes(claiming(trace, **facts))
    loads_or_refuses(lambda: Trace.load(path), path.stat().st_size, 64)
    shown = CliRunner().invoke(app, ["trace", "show", str(path)])
    assert shown.exit_code == 1 and isinstance(shown.exception, SystemExit) and "error:" in shown.output


def test_the_largest_model_that_a_trace_may_claim(folder, trace) -> None:
    path = folder / "largest"
    path.write_bytes(claiming(trace, layers=1024, experts=256))
    tracemalloc.start()
    trace_statistics.distances(Trace.load(path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 20


def test_names_are_printed_and_not_obeyed(folder, trace) -> None:
    """Escape sequences would move the cursor or retitle the terminal; markup would be a link."""
    path = folder / "n\x1b[2Jam[red]e"
    path.write_bytes(claiming(trace, model="a\x1b]0;owned\x07\x1b[2J\n\u202e[link=http://x]b[/link]"))
    shown = CliRunner().invoke(app, ["trace", "show", str(path)], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    assert not set(shown.output) & set("\x1b\x07\u202e")
    assert r"a\x1b]0;owned\x07\x1b[2J\n\u202e[link=http://x]b[/link]" in shown.output
    assert r"n\x1b[2Jam[red]e" in shown.output


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
@pytest.mark.parametrize(
    "load",
    [Trace.load, PredictorFile.read, Costs.read],
    ids=["trace", "predictors", "profile"],
)
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path, kind, load) -> None:
    path = tmp_path / "x"
    {"pipe": os.mkfifo, "folder": Path.mkdir, "device": lambda path: path.symlink_to("/dev/zero")}[kind](path)
    with pytest.raises(SpacError):
        load(path)


@pytest.mark.parametrize("name", ["../../outside", "/etc/passwd", "a/../../b", 5, None, "x\0y"])
def test_an_index_names_files_of_its_own_folder(tmp_path, name) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(SpacError):
        headers.read_checkpoint(tmp_path)
