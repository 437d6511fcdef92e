"""Loads a shape in an engine: weights are drawn, and its routers get the stream; imported by ``engine.py`` alone.

vLLM's dummy weights are replaced: with them all tokens are alike, and errors do not show. Experts pass through the
layers' own loaders, expert by expert and layer by layer, as those of a checkpoint do.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from benchmarks.shapes import routing

_BANK = 1 << 25  # numbers that are drawn; each tensor is some of them
_ROOM = 1 << 17  # rows of a step, at most
_FP8 = 64.0  # values of FP8 weights are as wide; scales make them as wide as others
# All parts of a final state are about as wide, so that what a token is followed by depends on each: its request's
# direction, which each token of it has, what is a token's own, and what all layers add.
_OWN, _TOKEN = 0.2, 0.25
_ADDED = {"o_proj": 0.3, "down_proj": 1.0, "w2_weight": 1.0}  # width of what writes to states; by the root of layers
_SHARE = 0.4  # of a final state, that along its request's direction
_MARGIN = 12.0  # of the logits of a request's own tokens; what differs among them is 1 wide


def register() -> None:
    """Makes this process load drawn weights where ``load_format`` is ``dummy``."""
    register_model_loader("dummy")(RandomWeights)


class RandomWeights(BaseModelLoader):
    """Draws the weights of a model, and makes its routers follow the stream in its folder."""

    def download_model(self, model_config: Any) -> None:
        pass

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        draw(model, Bank(0, model_config.hf_text_config.num_hidden_layers))
        follow(model, routing.load(Path(model_config.model)))


class Bank:
    """Numbers from a normal distribution, of which each tensor gets others.

    Args:
        layers: of the model; the more, the less each adds.
    """

    def __init__(self, seed: int, layers: int = 1, size: int = _BANK) -> None:
        self._layers = layers
        self._numbers = torch.randn(size, generator=torch.Generator("cpu").manual_seed(seed))
        self._scaled: dict[tuple[float, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], width: float, dtype: torch.dtype) -> Tensor:
        """Returns a tensor whose numbers are ``width`` wide; those of the same name are the same."""
        count = math.prod(shape)
        if (bank := self._scaled.get((width, dtype))) is None:
            bank = self._scaled[width, dtype] = (self._numbers * width).to(dtype)
        if count > len(bank) // 2:
            return bank.repeat(-(-count // len(bank)))[:count].view(shape)
        at = zlib.crc32(name.encode()) % (len(bank) - count)
        return bank[at : at + count].view(shape)

    def gain(self, name: str) -> float:
        """Returns by how much the result of a matrix is wider than what it is multiplied with."""
        found = next((gain for part, gain in _ADDED.items() if part in name), None)
        return 1.0 if found is None else found / math.sqrt(self._layers)

    def rows(self, name: str, rows: int, width: int) -> Tensor:
        """Returns float32 [rows, width], of which no two rows are alike."""
        step = (len(self._numbers) - width) // (rows + 1)
        assert step > 1, "too many rows"
        at = zlib.crc32(name.encode()) % step
        return self._numbers.as_strided((rows, width), (step, 1), at)


def draw(model: nn.Module, bank: Bank) -> None:
    """Fills all parameters.

    Raises:
        NotImplementedError: a parameter is of a kind for which there is no rule.
    """
    done: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, RoutedExperts):
            _draw_experts(name, module, bank, done)
    for name, parameter in model.named_parameters():
        if id(parameter) not in done:
            _fill(name, parameter, bank)


def _draw_experts(name: str, layer: Any, bank: Bank, done: set[int]) -> None:
    """Loads a layer's experts; the parameters are those of its beginning, since the last one may pack the layer."""
    parameters = {key: (each, tuple(each.shape)) for key, each in layer.named_parameters(recurse=False)}
    done.update(id(each) for each, _ in parameters.values())
    for expert in range(layer.moe_config.num_experts):
        for key, (parameter, (_, *shape)) in parameters.items():
            for shard in ("w2",) if key.startswith("w2") else ("w1", "w3"):
                part = (shape[0] if shard == "w2" else shape[0] // 2, *shape[1:])
                called = f"{name}.{key}.{expert}.{shard}"
                weight = _drawn(called, part, parameter.dtype, bank)
                parameter.weight_loader(parameter, weight, called, shard_id=shard, expert_id=expert)


def _drawn(name: str, shape: tuple[int, ...], dtype: torch.dtype, bank: Bank) -> Tensor:
    """Returns a matrix whose result is ``gain`` times as wide as its input, or the scales of one in FP8 by blocks."""
    if "weight_scale_inv" in name:
        return torch.full(shape, bank.gain(name) / (_FP8 * math.sqrt(128 * shape[-1])))
    if "scale" in name or dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn):
        raise NotImplementedError(f"no rule draws {name}, {dtype} {list(shape)}")
    width = _FP8 if dtype == torch.float8_e4m3fn else bank.gain(name) / math.sqrt(shape[-1])
    return bank.take(name, shape, width, dtype)


def _fill(name: str, parameter: Tensor, bank: Bank) -> None:
    if name.endswith("embed_tokens.weight"):
        values = _vocabulary("embeddings", parameter, bank, _OWN, _TOKEN)
    elif name.endswith("lm_head.weight"):
        width = parameter.shape[1]  # a state's numbers are about 1 wide
        values = _vocabulary("head", parameter, bank, _MARGIN / (_SHARE * width), 1 / math.sqrt(width))
    elif parameter.dim() == 1:
        values = torch.full(parameter.shape, 1.0 if "norm" in name else 0.0)
    else:
        values = _drawn(name, tuple(parameter.shape), parameter.dtype, bank)
    parameter.data.copy_(values)


def _vocabulary(name: str, parameter: Tensor, bank: Bank, own: float, token: float) -> Tensor:
    """Returns a row for each token: ``own`` of its request's direction, ``token`` of its own."""
    tokens, width = parameter.shape
    requests = bank.rows("requests", routing.STREAMS, width)
    return bank.rows(name, tokens, width) * token + requests[torch.arange(tokens) % routing.STREAMS] * own


def follow(model: nn.Module, stream: routing.Stream) -> None:
    """Makes each router of ``model`` choose by the stream.

    Raises:
        ValueError: the stream is of another number of layers.
    """
    runners: list[Any] = [each for each in model.modules() if hasattr(each, "routed_experts")]
    layers = routing.table(stream).to(next(model.parameters()).device)
    if len(runners) != len(layers):
        raise ValueError(f"the stream has {len(layers)} layers, the model {len(runners)}")
    index = torch.zeros(_ROOM, dtype=torch.int64, device=layers.device)
    for runner, logits in zip(runners, layers, strict=True):
        runner.router._compute_routing = _streamed(runner.router._compute_routing, logits, index)
    forward, rows = model.forward, layers.shape[1]

    def placed(input_ids: Tensor, positions: Tensor, *args: Any, **kwargs: Any) -> Any:
        index[: len(positions)] = routing.rows_of(input_ids, positions, rows)
        return forward(input_ids, positions, *args, **kwargs)

    model.forward = placed  # of this object; inside of what a CUDA graph captures, outside of what is compiled


def _streamed(compute: Callable[..., Any], table: Tensor, index: Tensor) -> Callable[..., Any]:
    """Returns ``compute`` of a router whose logits are rows of ``table`` [rows, experts]."""

    def routed(hidden: Tensor, logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        return compute(hidden, table.index_select(0, index[: len(logits)]).to(logits.dtype), *args, **kwargs)

    return routed
