"""Extension of vLLM's worker class: the methods that ``collective_rpc`` calls."""

from __future__ import annotations

import logging
from typing import Any

from vllm_spac.errors import SpacError
from vllm_spac.integration.hooks.model_host import experts_of
from vllm_spac.integration.serving.live_view import LiveView
from vllm_spac.methods.moe_spec.settings import BudgetSettings

logger = logging.getLogger("vllm.spac")


class SpacWorker:
    """Mixin of vLLM's worker; ``self`` is the worker."""

    model_runner: Any  # attribute of the worker

    def spac_stats(self) -> dict:
        """Settings and counters of this worker, as plain data (see ``ModelExperts.stats``)."""
        return self._spac_experts().stats()

    def spac_holds_all(self) -> bool:
        """Whether each expert of this worker has a slot, so that none is read from outside."""
        return all(execution.holds_all for execution in self._spac_experts().runtime.executions)

    def spac_budget(self, settings: dict) -> dict:
        """Changes the budget (see ``BudgetSettings``) from the next step on; returns the settings now in force."""
        runtime = self._spac_experts().runtime
        runtime.rerouter.update_budget(BudgetSettings.parse(settings))
        logger.info("spac: mode=%s", runtime.budget.describe())
        return runtime.budget.settings.model_dump()

    def spac_try_budget(self, settings: dict) -> dict:
        """``spac_budget`` for an external request: {"settings": …, "mode": …}, or {"refused": why}, without a log."""
        try:
            changed = self.spac_budget(settings)
            return {"settings": changed, "mode": self._spac_experts().runtime.budget.describe()}
        except SpacError as error:
            return {"refused": str(error)}

    def spac_watch(self) -> dict:
        """What the live page shows of this worker (see ``LiveView.report``); watches it until ``spac_stop_watch``."""
        if not hasattr(self, "_spac_view"):
            self._spac_view = LiveView(self._spac_experts())
        return self._spac_view.report()

    def spac_stop_watch(self) -> None:
        """Ends what ``spac_watch`` began; does nothing otherwise."""
        if hasattr(self, "_spac_view"):
            self._spac_view.close()
            del self._spac_view

    def _spac_experts(self) -> Any:
        experts = experts_of(self.model_runner)
        if experts is None:
            raise RuntimeError("spac: this worker has no managed experts")
        return experts
