"""What the routers of a model with random weights choose: a stream of recorded or of synthetic choices.

Random routers choose at random, and no cache would hit. So row r of the stream is what a token gets at each layer, and
a token's row follows from itself: its position, plus a distance for the number of its request. The vocabulary is
divided among ``STREAMS`` requests (token modulo ``STREAMS``), and embeddings are such that a request stays with its
own tokens. So rows depend on no state, in any batch, with stock vLLM and the plugin alike, and in CUDA graphs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.common import TRACES, PlanError
from vllm_spac.recording.trace_file import Trace
from vllm_spac.tools.planning.planned_routing import assumed
from vllm_spac.tools.traces.synthetic import synthetic_trace
from vllm_spac.tools.traces.trace_text import Text

STREAMS = 64  # requests with rows of their own
ROWS = 16_384  # of a synthetic stream
FILE = "stream.safetensors"
DEFAULT, RECORDED = "high", "recorded"
_CARVED = TRACES / "real" / "none1.trace"
_LOWEST = -4.0  # logit of the least of the chosen experts
_OTHERS = -12.0  # of all that are not chosen


@dataclass(frozen=True, eq=False)
class Stream:
    """Choices: ``ids`` int16 and ``logits`` float32, [rows, layers, top_k], and the number of ``experts``."""

    ids: np.ndarray
    logits: np.ndarray
    experts: int

    def describe(self) -> dict[str, float]:
        """Returns facts for a result: rows, and the share of a token's experts that the one before chose, too."""
        same = (self.ids[1:, :, :, None] == self.ids[:-1, :, None, :]).any(-1).mean()
        return {"rows": len(self.ids), "overlap": float(same)}


def check(stream: str) -> None:
    """Raises PlanError if no stream is called so."""
    names = [each.name for each in assumed()]
    if stream not in (*names, RECORDED) and not stream.endswith(".trace"):
        raise PlanError(f"stream={stream}: use {', '.join(names)} (as of vllm-spac plan), {RECORDED}, or FILE.trace")


def make(stream: str, layers: int, experts: int, top_k: int, rows: int = ROWS) -> Stream:
    """Returns the choices of so many layers.

    Args:
        stream: an assumption of ``vllm-spac plan``; a trace; or ``recorded``, that of the carved model.
        rows: of a synthetic one.

    Raises:
        PlanError: a trace does not fit.
        ConfigError: it cannot be read.
    """
    for each in assumed():
        if each.name == stream:
            drawn = synthetic_trace(
                layers=layers, experts=experts, top_k=top_k, steps=rows, skew=each.skew, reuse=each.reuse
            )
            assert drawn.weights is not None
            ids, weights = (part.reshape(rows, layers, top_k) for part in (drawn.ids, drawn.weights))
            return Stream(ids.astype(np.int16), _logits(weights), experts)
    path = _CARVED if stream == RECORDED else Path(stream)
    return _widened(Text.of(Trace.load(path)), str(path), layers, experts, top_k)


def _widened(text: Text, name: str, layers: int, experts: int, top_k: int) -> Stream:
    """Returns recorded choices for more experts and layers than were recorded.

    For twice as many experts, two parts of the text are side by side, each with its best half of the choices and with
    experts of its own: neighbours share as many as recorded. Layers beyond the recorded ones are these again, from
    another place of the text on.
    """
    sides = experts // text.experts
    if text.experts * sides != experts or top_k % max(1, sides) or top_k // max(1, sides) > text.top_k:
        raise PlanError(
            f"stream={name} has {text.top_k} of {text.experts} experts, which cannot be put side by side to {top_k} of "
            f"{experts}; use another trace, or a synthetic stream"
        )
    rows, each = len(text) // sides, top_k // sides
    if rows < STREAMS:
        raise PlanError(f"stream={name} has {rows} rows, fewer than {STREAMS}; use a longer trace")
    weights = np.ones(text.ids.shape, np.float16) if text.weights is None else text.weights
    order = np.argsort(-weights, axis=2, kind="stable")[:, :, :each]
    ids, best = (np.take_along_axis(part, order, axis=2) for part in (text.ids.astype(np.int16), weights))
    parts = [slice(side * rows, (side + 1) * rows) for side in range(sides)]
    wide_ids = np.concatenate([ids[part] + side * text.experts for side, part in enumerate(parts)], axis=2)
    wide = np.concatenate([best[part] for part in parts], axis=2)
    turns = -(-layers // text.layers)

    def stacked(values: np.ndarray) -> np.ndarray:
        turned = [np.roll(values, -turn * rows // turns, axis=0) for turn in range(turns)]
        return np.concatenate(turned, axis=1)[:, :layers]

    return Stream(stacked(wide_ids), _logits(stacked(wide)), experts)


def _logits(weights: np.ndarray) -> np.ndarray:
    """Returns logits that give these weights, within bounds."""
    found = np.log(np.maximum(weights.astype(np.float32), 1e-6))
    return np.maximum(found - found.max(axis=-1, keepdims=True), _LOWEST)


def save(stream: Stream, folder: Path) -> None:
    """Writes it into the folder of a model."""
    tensors = {"ids": torch.from_numpy(stream.ids.copy()), "logits": torch.from_numpy(stream.logits).half()}
    save_file(tensors | {"experts": torch.tensor([stream.experts])}, folder / FILE)


def load(folder: Path) -> Stream:
    """Reads what ``save`` wrote."""
    found = load_file(folder / FILE)
    return Stream(found["ids"].numpy(), found["logits"].float().numpy(), int(found["experts"]))


def table(stream: Stream) -> Tensor:
    """Returns the routers' logits, bfloat16 [layers, rows, experts]."""
    rows, layers, _ = stream.ids.shape
    found = torch.full((layers, rows, stream.experts), _OTHERS, dtype=torch.bfloat16)
    ids = torch.from_numpy(stream.ids.astype(np.int64)).transpose(0, 1)
    return found.scatter_(2, ids, torch.from_numpy(stream.logits).transpose(0, 1).to(torch.bfloat16))


def rows_of(tokens: Tensor, positions: Tensor, rows: int) -> Tensor:
    """Returns the rows of a stream of so many that tokens at these positions get, int64 [tokens]."""
    return (positions + tokens % STREAMS * (rows // STREAMS)) % rows


def ids_of(request: int, draws: list[int], vocabulary: int) -> list[int]:
    """Returns token ids of request number ``request`` from numbers that were drawn from all of them."""
    most = vocabulary // STREAMS * STREAMS
    return [draw % most // STREAMS * STREAMS + request % STREAMS for draw in draws]
