"""Hooks of V1's drafter: which model drafts, and what its layers choose while it does."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from vllm_spac.decisions.predictors.base import Signal
from vllm_spac.integration.hooks import drafts, model_host, patches
from vllm_spac.integration.stepping import draft_routing
from vllm_spac.integration.stepping.draft_routing import DraftChoices, DraftRouting
from vllm_spac.integration.stepping.v1 import self_drafting

if TYPE_CHECKING:
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

logger = logging.getLogger("vllm.spac")


def install() -> None:
    """Hooks the loading of V1's draft model: of its routers, if a predictor looks at them, and of an MTP head; once."""
    patches.install(f"{patches.PROPOSER}.load_model", _loading)
    self_drafting.install()


def _loading(load_model: Callable):
    def loaded(self: SpecDecodeBaseProposer, target_model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        experts = model_host.experts_in(target_model)
        if experts is not None and drafts.of_itself(self.vllm_config):
            _share(experts, self, target_model)
            return
        with model_host.drafting_for(experts):
            load_model(self, target_model, *args, **kwargs)
        draft_routing.install_hooks(experts, self.model)

    return loaded


def _share(experts: Any, drafter: SpecDecodeBaseProposer, target_model: torch.nn.Module) -> None:
    """Lets the target draft for itself; a predictor is told what its routers choose, whether it runs or not."""
    chose = None
    if Signal.DRAFT_ROUTING in experts.signals:
        [execution] = experts.runtime.executions
        shape = execution.shape
        experts.draft_routing = routing = DraftRouting(len(shape.layers), shape.top_k, experts.device)
        chose = routing.observe_choice
    layers = [self_drafting.in_slots(layer) for layer in experts.layers]
    self_drafting.attach(drafter, target_model, self_drafting.SelfDrafting(experts.runtime, layers, chose))
    logger.info("spac: the model drafts for itself, with the experts in slots; no draft model is loaded")


@contextlib.contextmanager
def reading(choices: DraftChoices, drafter: SpecDecodeBaseProposer) -> Iterator[None]:
    """As ``DraftChoices.observing``, of ``drafter``, which tells the rows that its first forward drafts from."""
    prepare: Any = drafter.set_inputs_first_pass

    def prepared(*args: Any, **kwargs: Any) -> tuple:
        found = prepare(*args, **kwargs)
        choices.begin(found[1])  # among all rows that the forward reads
        return found

    drafter.set_inputs_first_pass = prepared
    try:
        with choices.observing():
            yield
    finally:
        del drafter.set_inputs_first_pass  # from this object; its class has it
