"""Slots that the layers of a step may take, worked out on the device between two steps.

A layer that misses an expert may copy it into a slot before it computes, so that it crosses PCIe once. So between steps
the policy's formula (``decisions.policies.base``) says what a slot is worth to each expert, and slots are put in order,
the least valuable first. The layers compare these values (the rule is in ``vllm_spac.kernels.admit``). What a step used
is known to the next one: the host has no part in it, and its reports may be late.

An offer contains the slot's owner and is void if that has changed. Nothing else about an offer must hold for
correctness: accepting a bad one costs transferred bytes, never a wrong token.

With ``reuse`` and its three averages an update is some 140 small launches; on a GPU they are one CUDA graph. They run
beside what follows the layers, the head and the sampler, and the next step's layers start when they have finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from vllm_spac.core import NO_EXPERT, MoEShape
from vllm_spac.decisions.policies.base import Formula, Policy
from vllm_spac.execution.exchange import Event, Repeated, Stream
from vllm_spac.kernels.types import Offers


class SlotOffers:
    """Offers all slots but those of experts that have settled. Every slot has an owner.

    Args:
        formula: values slots; owned.
        settled: number of the first slots, whose experts have them for good.

    Attributes:
        offers: as the kernels read them, at fixed addresses; ``state`` is written by who begins and ends steps.
        ready: int32 [2], what ``state`` is when a step begins: the offers that are worth at least as much to some
            expert without a slot as to their owners.
    """

    def __init__(self, formula: Formula, slots: int, settled: int = 0) -> None:
        self.formula, self._settled = formula, settled
        device, keys = formula.kept.device, len(formula.kept)
        state, self.ready = (torch.zeros(2, dtype=torch.int32, device=device) for _ in range(2))
        places, owners = (torch.zeros(slots - settled, dtype=torch.int32, device=device) for _ in range(2))
        kept, used = (torch.zeros(count, device=device) for count in (slots - settled, keys))
        self.offers = Offers(state, places, owners, kept, used)

    @torch.inference_mode()
    def update(self, owner: Tensor, counts: Tensor | None = None) -> None:
        """A step has ended, or slots were filled: arguments as of ``Formula.observe``."""
        self.formula.observe(owner, counts)
        offers, used, slots = self.offers, self.offers.used, self.formula.order(owner[self._settled :]) + self._settled
        used.copy_(self.formula.used)
        offers.slots.copy_(slots)
        offers.owners.copy_(owner[slots])
        offers.kept.copy_(self.formula.kept[offers.owners])
        most = used.masked_fill(self.formula.held, -torch.inf).amax()
        self.ready[1:].copy_((offers.kept <= most).sum())


class OfferUpdates:
    """Updates offers after each step, on the stream for copies. Called by the thread that launches; never waits.

    What a step has written is copied on the model's stream, so that any forward may come before the next step.

    Args:
        written: int32 [keys + slots] on the device: the rows that generate and selected each expert, and the owners of
            slots, as the layers leave them.
        compute, copy: the stream that runs the model, and one for copies.
        settled: as of ``SlotOffers``.

    Attributes:
        made: the offers; the model's stream may read them between ``begin`` and ``end``.
    """

    def __init__(
        self,
        policy: Policy,
        shape: MoEShape,
        slots: int,
        written: Tensor,
        compute: Stream,
        copy: Stream,
        settled: int = 0,
    ) -> None:
        self._new = partial(policy.formula, len(shape.layers), shape.experts, written.device)
        self._shape, self._slots, self._compute, self._copy = shape, (slots, settled), compute, copy
        self._written, self._taken = written, torch.zeros_like(written)
        self.made = SlotOffers(self._new(), *self._slots)
        self._decode = Repeated(copy, partial(self._update, self.made, True))
        self._arrives: Event | None = None
        self._filled = False  # slots have been offered since they were filled
        self._prompt: Tensor | None = None  # the copy stream reads it, so it must not be freed meanwhile

    def compile(self) -> None:
        """Launches for offers that nobody reads what may be launched later, and captures what follows a decode step."""
        spare, layers = SlotOffers(self._new(), *self._slots), len(self._shape.layers)
        prompt = torch.zeros(layers, 1, self._shape.top_k, dtype=torch.int32, device=self._taken.device)
        self._join()
        self._compute.submit(self._taken.zero_)
        self._copy.wait(self._compute.record())
        self._copy.submit(self._update, spare, False, prompt)
        self._copy.submit(self._update, spare, True)
        self._decode.prepare()
        self._compute.wait(self._copy.record())

    def begin(self, to_layers: bool = True) -> None:
        """A step begins: what the model's stream runs from now on reads the latest offers, and its layers get them."""
        if not self._filled:
            self.end(generating=False)
        self._join()
        if not to_layers:
            return
        self._compute.submit(self.made.offers.state.copy_, self.made.ready)

    def end(
        self,
        *,
        generating: bool,
        counts: Tensor | None = None,
        prompt: Sequence[tuple[int, Tensor]] = (),
    ) -> None:
        """The layers of a step were launched; those outside of steps get no offers.

        Args:
            generating: it has rows that generate.
            counts: int32 [keys], in place of what ``written`` says of these.
            prompt: layers, and the experts that the last rows of a step of prompts selected there, int32 [rows, top_k].
        """
        self._filled = True
        self._compute.submit(self.made.offers.state.zero_)
        self._compute.submit(self._taken.copy_, self._written)
        if counts is not None:
            self._compute.submit(self._taken[: self._shape.total].copy_, counts)
        if prompt:
            by_layer, none = dict(prompt), torch.full_like(prompt[0][1], NO_EXPERT)
            self._prompt = torch.stack([by_layer.get(layer, none) for layer in range(len(self._shape.layers))])
        self._copy.wait(self._compute.record())
        if generating:
            self._decode.submit()
        else:
            self._copy.submit(self._update, self.made, False, self._prompt)
        self._arrives = self._copy.record()

    def _join(self) -> None:
        if self._arrives is not None:
            self._compute.wait(self._arrives)
            self._arrives, self._prompt = None, None

    def _update(self, made: SlotOffers, generating: bool, prompt: Tensor | None = None) -> None:
        counts, owner = self._taken.split([self._shape.total, self._slots[0]])
        if prompt is not None:
            made.formula.observe_prompt(prompt)
        made.update(owner, counts if generating else None)
