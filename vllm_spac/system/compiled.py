"""Loops over arrays that numba compiles, where a layer of every token would call numpy several times.

A call into numpy or torch takes a microsecond or more, and several of them push each other and the interpreter out of
a core's caches. What is compiled is kept in no file: numba's are pickles.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


@cache
def compiled(function: F) -> F:
    """Returns a function of numbers and arrays, compiled at its first call with their types: half a second each."""
    from numba import njit  # which takes a while to import

    return cast(F, njit(function))
