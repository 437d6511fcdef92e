"""The routing of a draft model that is a copy of the model, taken as the model's own (OD-MoE's SEP)."""

from __future__ import annotations

from collections.abc import Iterable

from vllm_spac.decisions.predictors.base import START, Guess, Predictor, PredictorInputs, Signal


class Shadow(Predictor):
    """Names, for each row whose token the draft model has read, the experts that its routers chose in every layer.

    OD-MoE's SEP (scaled emulative prediction) runs a quantised copy of the model beside it. A copy has the model's
    layers and experts, so its choice is taken as it is, and nothing is trained. Here the copy is the draft model, and
    the tokens that it reads are the drafts that the model verifies. Of a row's experts the one with the greatest weight
    is the likeliest. A row whose token it has not read, such as the last draft, names none.
    """

    needs = frozenset({Signal.DRAFT_ROUTING})

    def __init__(self, num_experts: int) -> None:
        self._keys = num_experts

    def guesses(self, inputs: PredictorInputs) -> Iterable[Guess]:
        if inputs.layer == START:
            assert inputs.draft_ids is not None
            yield Guess.of_chosen(inputs.draft_ids, self._keys)
