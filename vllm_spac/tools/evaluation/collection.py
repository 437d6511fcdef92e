"""Collects what routers read and chose for the tokens of texts, in memory, for training and judging predictors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vllm_spac.decisions.predictors._samples import SampleRecorder, Samples
from vllm_spac.decisions.predictors._trained import Gates
from vllm_spac.errors import ConfigError, UnsupportedError
from vllm_spac.methods.moe_spec.control import BudgetedLayer
from vllm_spac.methods.moe_spec.settings import RoutingRule
from vllm_spac.storage.checkpoint import router_weights
from vllm_spac.storage.checkpoint.headers import find_folder
from vllm_spac.system.host_memory import available_host_bytes, gib


def run_layer(vllm_config: Any, module: Any, hidden: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Returns the output [rows, d] of a managed layer's routed experts, by the layer's own kernel.

    Args:
        hidden: [rows, d].
        weights, ids: [rows, k]; k may differ from the model's.
    """
    from vllm.forward_context import set_forward_context

    with set_forward_context(None, vllm_config):
        return module.spac_forward(hidden, weights, ids)


_LEAST = 1e-6  # score whose logarithm stands for all smaller ones
_SHARE = 0.5  # of the available memory that samples may take


class Collected(NamedTuple):
    """Samples, and float32 [L, N, d], the mean output of each expert for the rows that selected it (0: none did)."""

    samples: Samples
    outputs: Tensor


class Collection:
    """A ``rerouting.Listener`` for texts that are each processed in one forward.

    Args:
        layers: the model's MoE layers, in the order of execution.

    Raises:
        ConfigError: so many rows take more than half of the available memory.
        UnsupportedError: the layers have different sizes.
    """

    def __init__(self, vllm_config: Any, layers: Sequence[BudgetedLayer], modules: Sequence[Any], rows: int) -> None:
        self._vllm_config, self._layers, self._modules = vllm_config, layers, modules
        if len({(layer.experts, layer.top_k) for layer in layers}) > 1:
            raise UnsupportedError("spac: the MoE layers of this model differ in size; predictors need equal ones")
        width, dtype = modules[0].moe_config.hidden_dim, vllm_config.model_config.dtype
        sizes = len(layers), layers[0].experts, layers[0].top_k, width
        _check_memory(rows, SampleRecorder.row_bytes(*sizes, dtype))
        self._recorder = SampleRecorder(*sizes, rows, dtype)
        self._sums = torch.zeros(len(layers), layers[0].experts, width)
        self._counts = torch.zeros(len(layers), layers[0].experts)

    def route(self, layer: int, hidden: Tensor, logits: Tensor, weights: Tensor, ids: Tensor) -> None:
        self._recorder.observe(layer, hidden, chosen_by(self._layers[layer].rule, logits), weights, ids)

    @torch.inference_mode()
    def end_text(self, tokens: int, outputs: bool) -> int:
        """Ends a text; with ``outputs``, runs its experts one by one. Returns the rows of all texts."""
        text = self._recorder.end_text(tokens)
        for layer in range(len(self._layers)) if outputs else ():
            self._add_outputs(layer, text)
        return self._recorder.rows

    def result(self) -> Collected:
        """Ends the collection: returns the samples and mean outputs of all texts."""
        return Collected(self._recorder.result(), self._sums / self._counts.clamp(min=1)[:, :, None])

    def _add_outputs(self, layer: int, text: Samples) -> None:
        """Adds the output of each expert for each row that selected it, by the layer's own kernel."""
        module = self._modules[layer]
        hidden = text.hidden[layer].repeat_interleave(text.top_k, 0).to(module.spac.device)
        ids = text.ids[layer].flatten()
        ones = torch.ones(len(ids), 1, device=hidden.device)
        outputs = run_layer(self._vllm_config, module, hidden, ones, ids[:, None].to(hidden.device))
        self._sums[layer].index_add_(0, ids.long(), outputs.float().cpu())
        self._counts[layer] += torch.bincount(ids.long(), minlength=text.experts)


def chosen_by(rule: RoutingRule, logits: Tensor) -> Tensor:
    """Returns float [rows, N], scores that order experts as the router does: logits, or those of its biased scores."""
    if rule.bias is None:
        return logits
    return (rule.probs(logits) + rule.bias).clamp(min=_LEAST).log()


def gates_of(model: str, layers: Sequence[str], samples: Samples) -> Gates | str:
    """Returns the routers and norms of a checkpoint that ``samples`` were taken from, or why they cannot be used."""
    try:
        gates = Gates(*router_weights.read(Path(find_folder(model)), layers))
    except UnsupportedError as error:
        return str(error)
    if gates.weight.shape != (samples.layers, samples.experts, samples.hidden.shape[2]):
        return "the routers of the checkpoint have other sizes than those that ran"
    return gates.problem(samples) or gates


def _check_memory(rows: int, row_bytes: int) -> None:
    room = int(available_host_bytes() * _SHARE)
    if rows * row_bytes > room:
        raise ConfigError(
            f"spac: {rows} tokens take {gib(rows * row_bytes)} of memory, more than half of what is available; use at "
            f"most --limit-tokens {room // row_bytes}"
        )
