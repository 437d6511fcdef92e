"""How hard tests try: ``make test`` draws a part of the examples, always the same, ``make test-rest`` all of them."""

from __future__ import annotations

import os

THOROUGH = os.environ.get("SPAC_TESTS") == "thorough"
_PART, _LEAST = 5, 10


def examples(count: int) -> int:
    """Returns how many examples hypothesis draws of a property that is tried with ``count`` thoroughly."""
    return count if THOROUGH else min(count, max(_LEAST, count // _PART))
