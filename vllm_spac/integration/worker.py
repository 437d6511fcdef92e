"""Mixed into vLLM's worker class: what ``collective_rpc`` can ask it."""

from __future__ import annotations

from vllm_spac.integration.loading import experts_of


class SpacWorker:
    """``self`` is the vLLM worker."""

    def spac_stats(self) -> dict:
        """Counters and choices of this worker, as plain data (see ``ModelExperts.stats``)."""
        experts = experts_of(self.model_runner)
        if experts is None:
            raise RuntimeError("spac: this worker has no managed experts")
        return experts.stats()
