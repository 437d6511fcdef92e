"""The experts that are chosen by a draft model while it drafts: by its own routers, or on what its layers compute.

Stock vLLM keeps both inside the layers.
"""

from __future__ import annotations

import contextlib
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from vllm_spac.core import MoEShape
from vllm_spac.decisions.predictors.base import Signal
from vllm_spac.errors import UnsupportedError
from vllm_spac.integration.layers import custom_ops, routers
from vllm_spac.storage.checkpoint import router_weights
from vllm_spac.storage.checkpoint.headers import find_folder

logger = logging.getLogger("vllm.spac")


def install_hooks(experts: Any, model: torch.nn.Module) -> None:
    """Hooks the layers of a draft ``model``, if a predictor of ``experts``, those of its target, looks at them."""
    looks = frozenset() if experts is None else experts.signals
    if Signal.DRAFT_ROUTING in looks:
        [execution] = experts.runtime.executions
        experts.draft_routing = DraftRouting.hooked(model, execution.shape)
    elif Signal.DRAFT_GATES in looks:
        [execution] = experts.runtime.executions
        shape, vllm_config, (k, _) = execution.shape, experts.vllm_config, experts.config.of_drafts
        weight, bias, _ = router_weights.read(Path(find_folder(vllm_config.model_config.model)), shape.layers)
        scheduler, depth = vllm_config.scheduler_config, vllm_config.model_config.get_total_num_hidden_layers()
        weight, bias = (each.to(experts.device, vllm_config.model_config.dtype) for each in (weight, bias))
        rows = scheduler.max_num_batched_tokens + scheduler.max_num_seqs  # a draft model reads one more of each request
        mapped = [_number(name) for name in shape.layers], depth
        experts.draft_routing = DraftGates(model, weight, bias, mapped, k or shape.top_k, rows)


class DraftChoices(ABC):
    """The experts that are chosen for the tokens that a draft model drafts from.

    ``take`` is called after each of its forwards.
    """

    def __init__(self) -> None:
        self._rows: Tensor | None = None  # that the first forward drafts from; None: of each further one, all

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        """Context in which forwards are observed."""
        try:
            yield
        finally:
            self._rows = None

    def begin(self, rows: Tensor) -> None:
        """The first forward drafts from ``rows``, int [requests], the last token of each request."""
        self._rows = rows

    def take(self, requests: int, drafted_from: Tensor | None = None) -> Tensor:
        """Returns the experts of the tokens that the last forward drafted from, int64 [requests, layers, k].

        The expert with the greatest weight is first.

        Args:
            drafted_from: int [requests], their rows; None: those of ``begin``, or else the first ones.
        """
        found, self._rows = self._rows if drafted_from is None else drafted_from, None
        return self._taken(slice(requests) if found is None else found.long(), requests)

    @abstractmethod
    def _taken(self, rows: Any, requests: int) -> Tensor:
        """As ``take``, of these rows of the last forward."""


class DraftRouting(DraftChoices):
    """The experts that the routers of a draft model choose for the tokens that it drafts from.

    Args:
        layers: MoE layers of the draft model, which call ``observe_choice``.
        top_k: experts per token.
        device: of its routers.
    """

    def __init__(self, layers: int, top_k: int, device: torch.device) -> None:
        super().__init__()
        self._layers, self._top_k, self._device = layers, top_k, device
        self._chosen: dict[int, Tensor] = {}  # of a forward: int [rows, k] by layer
        self._reads = self._warned = False

    @classmethod
    def hooked(cls, model: torch.nn.Module, shape: MoEShape) -> Self:
        """Returns what hears of the routers of a draft ``model``, before its first forward: they are hooked for good.

        Args:
            shape: of the target's MoE layers, whose experts stand for those of the same number in the draft model.

        Raises:
            UnsupportedError: it has other layers or experts, or a kernel that routes them itself.
        """
        layers = [module for module in model.modules() if hasattr(module, "routed_experts")]
        _check(layers, shape)
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        found = cls(len(layers), shape.top_k, device)
        for number, layer in enumerate(layers):
            routers.observe(layer, partial(found.observe_choice, number))
        return found

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        self._reads = True
        try:
            with super().observing():
                yield
        finally:
            self._reads = False
            self._chosen.clear()

    def _taken(self, rows: Any, requests: int) -> Tensor:
        """-1 if a layer was not observed, which is logged once."""
        chosen = [self._chosen[layer] for layer in sorted(self._chosen)]
        self._chosen.clear()
        if len(chosen) == self._layers:
            return torch.stack([ids[rows] for ids in chosen], 1).long()
        if not self._warned:
            self._warned = True
            logger.error(
                "spac: %d of the draft model's %d MoE layers were observed; nothing is guessed from what they choose",
                len(chosen),
                self._layers,
            )
        return torch.full((requests, self._layers, self._top_k), -1, device=self._device)

    def observe_choice(self, layer: int, weights: Tensor, ids: Tensor) -> None:
        """The router of a layer chose ``weights`` and ``ids`` [rows, k] in the forward that runs."""
        if self._reads:
            order = weights.argsort(stable=True, dim=1, descending=True)
            self._chosen[layer] = ids.gather(1, order)  # a copy: the original may be overwritten


_MLP = re.compile(r"(?P<model>.*)layers\.(?P<layer>\d+)\.(?:mlp|block_sparse_moe|feed_forward|moe)$")


class DraftGates(DraftChoices):
    """The experts that the model's routers score highest on what the MLPs of a draft model read.

    That is the output of a layer's attention, added to the residual and behind the norm (SP-MoE, section 3.2). The
    scores are the routers' logits: what else a router may do, such as to bias or to group experts, is left out.

    Args:
        model: the draft model, before its first forward: its layers are hooked for good.
        weight, bias: [L, N, d] and [L, N], of the routers.
        mapped: the number of each MoE layer among all layers of the model, and how many these are. The draft layer at
            the same part of its model stands for it.
        k: experts of each layer.
        rows: of the largest forward.

    Raises:
        UnsupportedError: it has no layers that can be observed.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        weight: Tensor,
        bias: Tensor,
        mapped: tuple[list[int], int],
        k: int,
        rows: int,
    ) -> None:
        found = {match: module for name, module in model.named_modules() if (match := _MLP.match(name))}
        mlps = {int(match["layer"]): module for match, module in found.items()}
        if sorted(mlps) != list(range(len(found))) or not mlps:
            raise UnsupportedError(
                "spac: prefetch=draft_gate (--spac-prefetch) cannot work here: the draft model has no layers whose MLP "
                "is known by its name; use a dense decoder of this model's width, or --spac-prefetch gate"
            )
        super().__init__()
        self._chosen: list[Tensor] = []  # of each draft layer that stands for some: int32 [rows, of these, k]
        layers, depth = mapped
        for number, ours in groupby(range(len(layers)), lambda layer: layers[layer] * len(mlps) // depth):
            mlp, own = mlps[number], list(ours)
            chosen = torch.zeros(rows, len(own), k, dtype=torch.int32, device=weight.device)
            for name, value in (("gate", weight[own]), ("bias", bias[own]), ("chosen", chosen)):
                mlp.register_buffer(f"spac_{name}", value, persistent=False)  # which compiled code reads as weights
            mlp.register_forward_pre_hook(_choose, with_kwargs=True)
            self._chosen.append(chosen)  # which each forward overwrites

    def _taken(self, rows: Any, requests: int) -> Tensor:
        return torch.cat([chosen[rows] for chosen in self._chosen], 1).long()


def _choose(mlp: Any, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
    hidden = args[0] if args else next(iter(kwargs.values()))
    custom_ops.write_choice(hidden, mlp.spac_gate, mlp.spac_bias, mlp.spac_chosen)


def _check(layers: list[Any], shape: MoEShape) -> None:
    what = "spac: prefetch=shadow (--spac-prefetch) cannot work here:"
    names = [layer.routed_experts.layer_name for layer in layers]
    ours, theirs = (list(map(_number, each)) for each in (shape.layers, names))
    if ours != theirs:
        raise UnsupportedError(
            f"{what} the MoE layers of this model are {_listed(ours)}, those of the draft model {_listed(theirs)}; "
            "use a copy of this model as draft model"
        )
    for layer in layers:
        sizes = layer.routed_experts.moe_config.num_experts, layer.routed_experts.top_k
        if sizes != (shape.experts, shape.top_k):
            raise UnsupportedError(
                f"{what} a layer of this model has {shape.experts} experts, top-{shape.top_k}, and one of the draft "
                f"model {sizes[0]}, top-{sizes[1]}; use a copy of this model as draft model"
            )
        if layer.is_monolithic:
            raise UnsupportedError(
                f"{what} the draft model's experts run in a kernel that also routes, so that nothing is known of its "
                "choice; use a draft model in bf16, or --spac-prefetch off"
            )


def _number(name: str) -> int:
    """The number of a layer in its model, from its name."""
    return int(next(iter(re.findall(r"\.(\d+)\.", name)), -1))


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"
