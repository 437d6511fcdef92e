"""Keeps what a V1 drafter computes of a text: its state after each token, while the target model reads the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vllm_spac.errors import SpacError

if TYPE_CHECKING:
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer


class DraftReader:
    """Observes the forwards of a drafter by a hook of its module; the first one of a text reads all of its tokens.

    Args:
        drafter: EAGLE, EAGLE-3 or a draft model.
    """

    def __init__(self, drafter: SpecDecodeBaseProposer) -> None:
        self._drafter = drafter
        self._found: tuple[Tensor, Tensor] | None = None
        self._hook = drafter.model.register_forward_hook(self._forward, with_kwargs=True)

    @property
    def width(self) -> int:
        """Size of a state (D)."""
        return self._drafter.draft_model_config.get_hidden_size()

    def take(self, ids: Sequence[int]) -> Tensor:
        """Returns the states of the text ``ids``, float [tokens, D]; NaN for a token that the drafter did not read.

        Raises:
            SpacError: its last forwards were not of this text.
        """
        found, self._found = self._found, None
        skipped = 1 if self._drafter.pass_hidden_states_to_model else 0  # EAGLE begins with the second token
        wanted = torch.tensor(list(ids[skipped:]))
        if found is None or not torch.equal(found[0][: len(wanted)].cpu().long(), wanted):
            raise SpacError("spac: the drafter has not read the text in one forward; this is a bug")
        states = torch.full((len(ids), self.width), float("nan"), dtype=found[1].dtype)
        states[skipped:] = found[1][: len(wanted)].cpu()
        return states

    def close(self) -> None:
        """Observes no more."""
        self._hook.remove()

    def _forward(self, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        if self._found is None:
            states = output[0] if isinstance(output, tuple) else output
            self._found = kwargs["input_ids"].clone(), states.clone()
