"""What the routers of a draft model choose while it drafts, which stock vLLM keeps inside its layers."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from vllm_spac.core import MoEShape
from vllm_spac.errors import UnsupportedError
from vllm_spac.integration.hooks import drafts, model_host, patches
from vllm_spac.integration.layers import routers
from vllm_spac.integration.stepping import self_drafting

if TYPE_CHECKING:
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

logger = logging.getLogger("vllm.spac")


def install() -> None:
    """Hooks the loading of V1's draft model: of its routers, if a predictor looks at them, and of an MTP head; once."""
    patches.wrap(f"{patches.PROPOSER}.load_model", _loading)
    self_drafting.install()


def install_in_v2() -> None:
    """Hooks the loading of V2's draft model, for its routers; a second call does nothing."""
    patches.wrap(f"{patches.SPECULATOR}.load_model", _loading_in_v2)


def _loading(load_model: Callable):
    def loaded(self: SpecDecodeBaseProposer, target_model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        experts = model_host.experts_in(target_model)
        if experts is not None and drafts.of_itself(self.vllm_config):
            _share(experts, self, target_model)
            return
        with model_host.drafting_for(experts):
            load_model(self, target_model, *args, **kwargs)
        _hook(experts, self.model)

    return loaded


def _share(experts: Any, drafter: SpecDecodeBaseProposer, target_model: torch.nn.Module) -> None:
    """Lets the target draft for itself; a predictor is told what its routers choose, whether it runs or not."""
    self_drafting.take(drafter, target_model)
    chose = None
    if experts.reads_draft_routing:
        [execution] = experts.runtime.executions
        shape = execution.shape
        experts.draft_routing = routing = DraftRouting(len(shape.layers), shape.top_k, experts.device)
        chose = routing.chose
    experts.drafts_itself(chose)


def _loading_in_v2(load_model: Callable):
    def loaded(self: DraftModelSpeculator, target_model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        load_model(self, target_model, *args, **kwargs)
        _hook(model_host.experts_in(target_model), self.model)

    return loaded


def _hook(experts: Any, model: torch.nn.Module) -> None:
    """Hooks the routers of a draft ``model``, if a predictor of ``experts``, those of its target, looks at them."""
    if experts is not None and experts.reads_draft_routing:
        [execution] = experts.runtime.executions
        experts.draft_routing = DraftRouting.hooked(model, execution.shape)


class DraftRouting:
    """The experts that the routers of a draft model choose for the tokens that it drafts from.

    Args:
        layers: MoE layers of the draft model, which call ``chose``.
        top_k: experts per token.
        device: of its routers.
    """

    def __init__(self, layers: int, top_k: int, device: torch.device) -> None:
        self._layers, self._top_k, self._device = layers, top_k, device
        self._chosen: dict[int, Tensor] = {}  # of a forward: int [rows, k] by layer
        self._rows: Tensor | None = None  # that the first forward drafts from; None: of each further one, all
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
            routers.observe(layer, partial(found.chose, number))
        return found

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        """Context in which forwards are observed; ``take`` is called after each."""
        self._reads = True
        try:
            yield
        finally:
            self._reads, self._rows = False, None
            self._chosen.clear()

    @contextlib.contextmanager
    def reading(self, drafter: SpecDecodeBaseProposer) -> Iterator[None]:
        """As ``observing``, of V1's ``drafter``, which tells the rows that its first forward drafts from."""
        prepare: Any = drafter.set_inputs_first_pass

        def prepared(*args: Any, **kwargs: Any) -> tuple:
            found = prepare(*args, **kwargs)
            self._rows = found[1]  # the last token of each request, among all that the forward reads
            return found

        drafter.set_inputs_first_pass = prepared
        try:
            with self.observing():
                yield
        finally:
            del drafter.set_inputs_first_pass  # from this object; its class has it

    def take(self, requests: int, drafted_from: Tensor | None = None) -> Tensor:
        """Returns the experts of the tokens that the last forward drafted from, int64 [requests, layers, k].

        The expert with the greatest weight is first. -1 if a layer was not observed, which is logged once.

        Args:
            drafted_from: int [requests], their rows; None: those that ``reading`` was told of, or else the first ones.
        """
        found = self._rows if drafted_from is None else drafted_from
        rows = slice(requests) if found is None else found.long()
        chosen, self._rows = [self._chosen[layer] for layer in sorted(self._chosen)], None
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

    def chose(self, layer: int, weights: Tensor, ids: Tensor) -> None:
        """The router of a layer chose ``weights`` and ``ids`` [rows, k] in the forward that runs."""
        if self._reads:
            order = weights.argsort(stable=True, dim=1, descending=True)
            self._chosen[layer] = ids.gather(1, order)  # a copy: the original may be overwritten


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
