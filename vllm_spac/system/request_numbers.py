"""Tokens per second, time to first token and time per token of a server, from what it has counted at several times."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

WINDOW = 60.0  # seconds


class RequestNumbers:
    """Readings of one server's request counters (``integration.serving.requests.read``), for a minute."""

    def __init__(self) -> None:
        self._read: deque[tuple[float, Mapping[str, Any]]] = deque()

    def add(self, counted: Mapping[str, Any] | None, now: float | None = None) -> dict[str, str]:
        """Adds a reading and returns name -> formatted value of what is known, in the order in which it is shown.

        Rates and means are those of the last minute, or since the server's start at the first reading and where no
        request ended since.

        Args:
            counted: None: the server counts nothing.
            now: seconds of a clock that never goes back.

        Raises:
            TypeError, ValueError, KeyError: this is no reading.
        """
        if counted is None:
            return {}
        now = time.monotonic() if now is None else now
        if self._read and counted["tokens"] < self._read[-1][1]["tokens"]:  # the server was started again
            self._read.clear()
        while self._read and now - self._read[0][0] > WINDOW:
            self._read.popleft()
        began, before = self._read[0] if self._read else (now, None)
        self._read.append((now, counted))
        speed = "-" if before is None else f"{(counted['tokens'] - before['tokens']) / (now - began):,.1f}"
        return {
            "tokens/s, all requests": speed,
            "tokens generated": f"{counted['tokens']:,.0f}",
            "requests running": f"{counted['running']:.0f}",
            "requests waiting": f"{counted['waiting']:.0f}",
            "time to first token": _mean(counted, before, "first_token_seconds", "first_tokens"),
            "time per token of a request": _mean(counted, before, "token_seconds", "finished"),
        }


def _mean(counted: Mapping[str, Any], before: Mapping[str, Any] | None, seconds: str, count: str) -> str:
    """Returns the mean since ``before``, or since the start if nothing was counted since."""
    since = before if before is not None and counted[count] > before[count] else {seconds: 0, count: 0}
    number = counted[count] - since[count]
    return f"{1000 * (counted[seconds] - since[seconds]) / number:,.1f} ms" if number else "-"
