"""What `make soak` must detect: growth, which noise is not, and requests that are never forgotten."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "soak"))

import soak  # noqa: E402
from trend import trend  # noqa: E402

STEPS = np.linspace(0, 1e5, 1200)
MIB = 2**20


def drifting(seed: int) -> np.ndarray:
    """Noise as memory has it: 1 MiB up or down for minutes, by which neighbours are alike."""
    rng = np.random.default_rng(seed)
    noise = np.zeros(len(STEPS))
    for i in range(1, len(STEPS)):
        noise[i] = 0.98 * noise[i - 1] + rng.normal(0, 0.2 * MIB)
    return 3e9 + noise


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_not_growth(seed):
    assert not trend(STEPS, drifting(seed), 8 * MIB).grows


@pytest.mark.parametrize("seed", range(20))
def test_a_leak_is(seed):
    found = trend(STEPS, drifting(seed) + 400 * STEPS, 8 * MIB)  # 400 bytes a step
    assert found.grows
    assert found.growth == pytest.approx(0.5 * 400 * 1e5, rel=0.2)  # the noise is a seventh of it


@pytest.mark.parametrize("at", [0.3, 0.5, 0.9])
def test_neither_warm_up_nor_one_step_is(at):
    once = np.where(at * STEPS[-1] <= STEPS, 64 * MIB, 0)
    assert not trend(STEPS, drifting(0) + once, 8 * MIB).grows
    warm = 300 * MIB * np.minimum(STEPS / 2e4, 1)
    assert not trend(STEPS, drifting(1) + warm, 8 * MIB).grows


def test_memory_that_saturates_in_a_short_run_is_not():
    """As a worker's did within 7,000 steps: 200 MiB, of which half is there after 600 of them."""
    steps = STEPS * 0.07
    saturating = 200 * MIB * (1 - np.exp(-steps / 850))
    assert not trend(steps, drifting(2) + saturating, 8 * MIB).grows
    assert trend(steps, drifting(2) + 10e3 * steps, 8 * MIB).grows


def test_one_descriptor_a_thousand_steps_is():
    assert trend(STEPS, 40 + STEPS // 1000 + np.random.default_rng(0).integers(0, 9, len(STEPS)), 3).grows
    assert not trend(STEPS, np.full(len(STEPS), 40), 3).grows


@pytest.mark.parametrize(
    ("v2", "remembered", "answered", "says"),
    [
        (True, soak.REMEMBERED, 1000, []),
        (True, soak.REMEMBERED + 1, 1000, ["the guard remembers 41 requests, and at most 40 were there at once"]),
        (True, 0, 1000, ["the guard remembered no request"]),
        (True, 3, 50, ["too few requests to tell whether they are forgotten"]),
        (False, 0, 1000, ["the guard chose one length only"]),
    ],
)
def test_a_guard_that_does_not_forget_fails_a_soak_of_v2(
    monkeypatch: pytest.MonkeyPatch, v2: bool, remembered: int, answered: int, says: list[str]
) -> None:
    monkeypatch.setattr(soak, "V2", v2)
    seen = soak.Tally(compared=answered - 20, aborted=10, lossy=10, lossy_differ=3)
    stats = {"misses": 9, "slots": 1, "steps": {"verify": 5}, "guard": {"steps": {"4": 7}}}
    assert soak.problems(seen, {}, stats, 2, remembered) == says
