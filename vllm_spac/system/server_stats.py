"""Fetches the counters of a running server over HTTP."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
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
            raise SpacError(f"the server at {url} runs without spac; start it with --plugin spac") from error
        if error.code == 401:
            given = "refuses this key" if api_key else "wants a key"
            raise SpacError(f"the server at {url} {given}; name its own with --api-key or VLLM_API_KEY") from error
        raise SpacError(f"{address} answers {error.code} {error.reason}; see the log of that server") from error
    except urllib.error.URLError as error:
        raise SpacError(f"no server answers at {url} ({error.reason}); is vllm serve running there?") from error
    except TimeoutError as error:
        raise SpacError(f"the server at {url} does not answer within {_TIMEOUT_SECONDS} s") from error
    except (ValueError, KeyError, TypeError, OSError, http.client.HTTPException) as error:
        raise SpacError(f"what listens at {url} is not vllm serve: {address} gives no counters") from error
    return counters
