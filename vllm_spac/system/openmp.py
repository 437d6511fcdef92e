"""Settings of OpenMP that make idle threads spin: they take the processors of the threads that read missed experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

_MOST = {
    "GOMP_SPINCOUNT": 10**8,  # about a second
    "KMP_BLOCKTIME": 200,  # milliseconds: Intel's default
}
VARIABLES = ("OMP_WAIT_POLICY", *_MOST)


def spinning(environment: Mapping[str, str]) -> Iterator[str]:
    """Yields each variable of ``environment`` that lets idle threads spin for longer than a layer waits.

    The defaults do not: GNU's threads spin for some milliseconds, and vLLM sets those of Intel to one.
    """
    if environment.get("OMP_WAIT_POLICY", "").strip().lower() == "active":
        yield "OMP_WAIT_POLICY"
    for name, most in _MOST.items():
        value = environment.get(name, "").strip().lower()
        if value in ("infinite", "infinity") or (value.isdecimal() and int(value) > most):
            yield name
