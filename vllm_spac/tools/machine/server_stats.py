"""The counters of a running server, fetched over HTTP.

Tokens per second, TTFT and TPOT follow from what it has counted at several times.
"""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_spac.errors import SpacError
from vllm_spac.system.untrusted import parse_json

_TIMEOUT_SECONDS = 10
_MOST_BYTES = 16 << 20  # of an answer


def fetch(url: str, api_key: str | None = None) -> dict[str, Any]:
    """Returns the counters of the server at ``url``: ``workers``, and ``requests`` (null: it counts none).

    Raises:
        SpacError: no server answers, it is not vLLM's, it refuses the key, or it runs without the plugin.
    """
    address = f"{url}/spac/stats"
    if api_key and not (api_key.isascii() and api_key.isprintable()):
        raise SpacError("the key (--api-key) has characters that no HTTP header can carry")
    try:
        request = urllib.request.Request(address)
        if api_key:
            request.add_unredirected_header("Authorization", f"Bearer {api_key}")  # for this server and no other
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:
            counters = parse_json(response.read(_MOST_BYTES).decode())
        workers = counters["workers"]
        if not isinstance(workers, list) or not all(isinstance(worker, dict) for worker in workers):
            raise TypeError("no list of workers")
    except urllib.error.HTTPError as error:
        if error.code == 404:
            raise SpacError(
                f"the server at {url} runs without spac; start it with --plugin spac, or, if all experts fit its GPU, "
                "with --plugin spac --spac-slots 100%"
            ) from error
        if error.code == 401:
            problem = "refuses this key" if api_key else "wants a key"
            raise SpacError(f"the server at {url} {problem}; name its own with --api-key or VLLM_API_KEY") from error
        raise SpacError(f"{address} answers {error.code} {error.reason}; see the log of that server") from error
    except urllib.error.URLError as error:
        raise SpacError(f"no server answers at {url} ({error.reason}); is vllm serve running there?") from error
    except TimeoutError as error:
        raise SpacError(f"the server at {url} does not answer within {_TIMEOUT_SECONDS} s") from error
    except (ValueError, KeyError, TypeError, OSError, http.client.HTTPException) as error:
        raise SpacError(f"what listens at {url} is not vllm serve: {address} gives no counters") from error
    return counters


WINDOW = 60.0  # seconds


class RequestNumbers:
    """Readings of one server's request counters (``live_page.read_requests``), for a minute."""

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


class WaitShares:
    """Readings of how long each worker's layers have waited for experts, for a minute."""

    def __init__(self) -> None:
        self._read: deque[tuple[float, tuple[float, ...]]] = deque()

    def add(self, seconds: Sequence[float], now: float | None = None) -> tuple[float | None, ...]:
        """Adds a reading and returns the share of the last minute of each worker; None at the first reading."""
        now, waits = time.monotonic() if now is None else now, tuple(seconds)
        if self._read and (len(waits) != len(self._read[-1][1]) or sum(waits) < sum(self._read[-1][1])):
            self._read.clear()  # the server was started again
        while self._read and now - self._read[0][0] > WINDOW:
            self._read.popleft()
        began, before = self._read[0] if self._read else (now, ())
        self._read.append((now, waits))
        if now <= began:
            return (None,) * len(waits)
        return tuple((after - earlier) / (now - began) for after, earlier in zip(waits, before, strict=True))


def _mean(counted: Mapping[str, Any], before: Mapping[str, Any] | None, seconds: str, count: str) -> str:
    """Returns the mean since ``before``, or since the start if nothing was counted since."""
    since = before if before is not None and counted[count] > before[count] else {seconds: 0, count: 0}
    number = counted[count] - since[count]
    return f"{1000 * (counted[seconds] - since[seconds]) / number:,.1f} ms" if number else "-"
