"""Says once in the log that reads ahead pause."""

from __future__ import annotations

import logging

from vllm_spac.cache.allowance import PAUSE

logger = logging.getLogger("vllm.spac")


class PauseNotice:
    """Takes what ``Allowance.end_step`` returns; ``prefetch``: the predictor's name."""

    def __init__(self, prefetch: str) -> None:
        self._prefetch, self._told = prefetch, False

    def tell(self, judged: tuple[int, int] | None) -> None:
        """Logs the first pause."""
        if judged is None or self._told:
            return
        self._told = True
        logger.warning(
            "spac: prefetch=%s pauses: layers used %d of the last %d experts that it read ahead; it is tried again "
            "every %d steps, or use --spac-prefetch off",
            self._prefetch,
            *judged,
            PAUSE,
        )
