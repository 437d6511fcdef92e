"""As many forwards of V2's drafter as the next step has drafts: none while the guard has left them out for long.

The scheduler plans the drafts of a step while the one before it runs. vLLM's EAGLE heads follow the plan, and read the
accepted tokens also where none are planned, so that their KV cache stays whole. A draft model makes all of its drafts,
whatever is planned, and the runner throws away what is too much. Once the guard rests, the drafter does not run at all
except over prompts, as with V1: a step then costs what it costs without a drafter. A request that lived through that is
drafted worse when drafts are tried again, since the drafter has not read its last tokens; a new one is not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch


class DrafterForwards:
    """Around ``propose`` of one V2 speculator, outside of whatever else is around it.

    Args:
        speculator: with a draft model; its ``propose`` is replaced on this object.
        rests: whether no drafts have been planned for so long that the drafter need not stay ready.
        ready: whether steps are of requests: vLLM warms up with batches that look like them.
        loops: it makes ``num_speculative_steps`` drafts, whatever is planned.

    Attributes:
        left_out: steps in which the drafter did not run.
    """

    def __init__(
        self, speculator: Any, rests: Callable[[], bool], ready: Callable[[], bool], loops: bool = False
    ) -> None:
        self._speculator, self._rests, self._ready, self._loops = speculator, rests, ready, loops
        self._propose, speculator.propose = speculator.propose, self.propose
        self.left_out = 0

    def propose(
        self,
        input_batch: InputBatch,
        *args: Any,
        num_speculative_tokens: int | None = None,
        dummy_run: bool = False,
        dp_sync_state: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """Around the speculator's; ranks of data parallelism, which run it together, always run it."""
        speculator, planned = self._speculator, num_speculative_tokens
        real = self._ready() and not dummy_run and dp_sync_state is None and planned is not None
        if real and planned == 0 and self._rests() and not input_batch.is_prefilling_np.any():
            self.left_out += 1
            return speculator.draft_tokens[: input_batch.num_reqs]  # vLLM writes -1 into what is not planned
        given = {"num_speculative_tokens": planned, "dummy_run": dummy_run, "dp_sync_state": dp_sync_state}
        if not real or not self._loops or planned is None:
            return self._propose(input_batch, *args, **given, **kwargs)
        most, speculator.num_speculative_steps = speculator.num_speculative_steps, max(1, planned)
        try:
            self._propose(input_batch, *args, **given, **kwargs)
        finally:
            speculator.num_speculative_steps = most
        return speculator.draft_tokens[: input_batch.num_reqs]
