"""The model's own routers on what the layers of its draft model compute, before the step that verifies (SP-MoE)."""

from __future__ import annotations

from collections.abc import Iterable

from vllm_spac.decisions.predictors.base import START, Guess, Predictor, PredictorInputs, Signal


class DraftGate(Predictor):
    """Names, for each row whose token the draft model has read, the experts that the model's routers score highest.

    SP-MoE's cross-model predictor (section 3.2): the attention output of draft layer l goes through the router of
    target layer l, as it is, and nothing is trained. What a router reads is that output added to the residual, behind
    the norm, so here it is what the MLP of the draft layer reads. The draft model needs the model's width. With another
    depth, layers are mapped proportionally. A row whose token it has not read, such as the last draft, names none.
    """

    needs = frozenset({Signal.DRAFT_GATES})

    def __init__(self, num_experts: int) -> None:
        self._keys = num_experts

    def guesses(self, inputs: PredictorInputs) -> Iterable[Guess]:
        if inputs.layer == START:
            assert inputs.draft_ids is not None
            yield Guess.of_chosen(inputs.draft_ids, self._keys)
