"""How many running requests share a step, and for how long they do before others have their turn. Pure, no clock.

While the same few requests have every step, the experts that were loaded for them stay in the slots. So where missing
experts take most of a step, requests that take turns get more tokens per second together than requests that share all
steps; elsewhere they get fewer. Which it is, is measured: steps of all running requests and steps of half of them take
turns (``payback``), then steps of a quarter and of the better of the two, and so on: two requests may need as many
loads as eight, and one far fewer. A request waits while others have their turn, at most as long as the user allows.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Sequence
from functools import partial

from vllm_spac.decisions.guard.payback import Payback, Verdict

# Steps of a turn at most, and of a block of those compared: longer turns gain little (results/real_streams.json). All
# of a block counts, since the loads that a turn begins with come with it.
TURN = 64
MOST = 16  # pairs of blocks
_FADES = 0.9  # of the longest step, with each shorter one


class Slices:
    """Sets requests aside, and learns from the tokens per second of steps with fewer requests and with more.

    Args:
        gap: seconds, the longest time between two tokens of a request, but for steps that take longer than those
            before them, and the step of the second token.

    Attributes:
        sizes: requests that share a step in both kinds of steps that were compared last, the fewer first.
    """

    def __init__(self, gap: float) -> None:
        self._gap = gap
        self.sizes = (0, 0)
        self._paybacks = defaultdict[tuple[int, int], Payback](partial(Payback, TURN, 0, MOST))
        self._compared: list[Payback] = []  # those that the next step counts for; the last one may be comparing
        self._had: dict[str, int] = {}  # steps of each request in which others were set aside
        self._ran: dict[str, float] = {}  # when its last step ended
        self._sharing: list[str] = []  # whose turn it is
        self._steps = 0  # of the turn
        self._began = self._planned = 0.0  # when it began; when the last step did
        self._step = 0.0  # seconds that a step is expected to take

    def plan(self, requests: Sequence[str], now: float) -> set[str]:
        """A step is about to be planned. Returns the requests that are set aside in it.

        Args:
            requests: all that have left their prompts, in the scheduler's order.
            now: monotonic time in seconds.
        """
        self._planned = now
        self._ran = {request: self._ran.get(request, now) for request in requests}
        most = max(self._had.values(), default=0)
        self._had = {request: self._had.get(request, most) for request in requests}
        size = self._size(len(requests))
        sharing = [request for request in self._sharing if request in self._ran]
        late = {request for request in requests if now + self._step - self._ran[request] > self._gap}
        if len(sharing) > size or not late.issubset(sharing) or self._is_over(len(requests), size, now):
            sharing, self._began, self._steps = [], now, 0
        others = sorted((request for request in requests if request not in sharing), key=self._had.__getitem__)
        room = size - len(sharing)
        self._sharing = sharing + others[:room] + [request for request in others[room:] if request in late]
        self._steps += 1
        aside = set(requests).difference(self._sharing)
        if aside:
            self._had.update((request, self._had[request] + 1) for request in self._sharing)
        return aside

    def end_step(self, ran: Collection[str], tokens: int, now: float) -> Verdict | None:
        """The step that was planned last has ended. Returns what was found, if steps were compared for long enough.

        Args:
            ran: all requests of the step; it is not compared if others than those of ``plan`` are among them, as
                prompts, or fewer.
            tokens: that they emitted.
            now: monotonic time in seconds.
        """
        seconds = now - self._planned
        self._step = max(seconds, _FADES * self._step + (1 - _FADES) * seconds)
        for request in self._ran.keys() & set(ran):
            self._ran[request] = now
        if not tokens or set(ran) != set(self._sharing):
            return None
        verdict = None
        for payback in self._compared:
            verdict = payback.end_step(tokens, seconds)
        return verdict

    def _size(self, requests: int) -> int:
        """Returns how many of ``requests`` share the next step."""
        self._compared, size, half = [], requests, requests
        for halvings in itertools.count(1):
            half, larger = -(-requests // 2**halvings), half
            if half == larger or not self._step or (-(-requests // half) - 1) * self._step > self._gap:
                break
            payback = self._paybacks[(requests - 1).bit_length(), halvings]
            self._compared.append(payback)
            self.sizes = half, size
            size = size if payback.stopped else half
            if payback.compares:
                break
        return size

    def _is_over(self, requests: int, size: int, now: float) -> bool:
        """Whether a turn of ``size`` of the ``requests`` has been long enough."""
        others = -(-requests // size) - 1 if size else 0
        return others > 0 and (self._steps >= TURN or others * (now + self._step - self._began) > self._gap)
