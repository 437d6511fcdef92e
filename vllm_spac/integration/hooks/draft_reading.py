"""What is chosen while a draft model drafts, forward by forward: passed on, and kept for the step that verifies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


class DraftReading:
    """One drafter's side of ``DraftStates`` and ``Runtime.observe_draft``."""

    def __init__(self, experts: Any) -> None:
        self._experts = experts

    @property
    def wanted(self) -> bool:
        """Whether a predictor looks at drafts of the requests that are served, not of those that vLLM warms up with."""
        return self._experts.runtime.observes_drafts and self._experts.runtime.in_step

    @property
    def forwards(self) -> int:
        """Forwards since ``begin``."""
        return self._experts.serving.draft_states.forwards

    def begin(self, requests: Sequence[str]) -> None:
        """Drafts are made for ``requests`` now."""
        self._experts.serving.draft_states.begin(requests)

    def read(self, tokens: Tensor, chosen: Tensor) -> None:
        """A forward has read ``tokens``, int [rows], of which the experts ``chosen`` were chosen."""
        found = self._experts.serving.draft_states
        found.add(tokens, chosen)
        self._experts.runtime.observe_draft(found.known())
