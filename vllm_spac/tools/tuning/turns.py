"""Lets two engines answer the same prompts in turns, so that a drift of the machine affects both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from vllm_spac.config.tuned_profile import Candidate
from vllm_spac.decisions.comparison import Said, compare_tokens, orders
from vllm_spac.tools.tuning.measurer import Answer, Engine, Measurer
from vllm_spac.tools.tuning.progress import ProgressFile, Turn

Prompt = str | Sequence[int]

FEWEST, MOST = 6, 40  # turns: of fewer, no interval is given
_OF_START = 5  # turns of a start, where the engines take turns in memory too: two pairs of starts are FEWEST
_RESERVE = 1 << 30  # bytes of host memory left free beside two engines


@dataclass(frozen=True)
class Pair:
    """Two candidates.

    Attributes:
        exclusive: whether only one can run at a time.
    """

    default: Candidate
    other: Candidate
    nbytes: int
    exclusive: bool
    near_ties: bool


def take_turns(
    pair: Pair,
    prompts: Sequence[tuple[Prompt, Said]],
    tokens: int,
    measurer: Measurer,
    file: ProgressFile,
    seconds: float,
    seed: int,
    tell: Callable[[float], object],
) -> None:
    """Adds turns to ``file``, which is saved after each, until there are ``MOST`` or the time is spent.

    Both engines stay alive where memory allows it; else one is started after the other, each equally often first.

    Args:
        prompts: with the default's answers; repeated as often as needed.
        seconds: that all turns may take, those of earlier processes included.
        tell: called with the seconds that turns have taken, after each.

    Raises:
        MeasuringError: an engine did not start, or ended.
    """
    kept, begin = file.content, measurer.clock()
    before = kept.final

    def record(prompt: int, answers: Sequence[Answer]) -> None:
        first, other = answers
        said = prompts[prompt][1]
        wrong = "lossy" not in pair.other.departures and (
            compare_tokens([said], [other.ids], pair.near_ties).verdict == "wrong"
        )
        kept.turns.append(Turn(arm=pair.other.name, default=first.rate, other=other.rate, wrong=wrong))
        kept.final = before + measurer.clock() - begin
        file.save()
        tell(kept.final)

    def goes_on() -> bool:
        return len(kept.turns) < MOST and before + measurer.clock() - begin < seconds

    if pair.exclusive or measurer.room() < pair.nbytes + _RESERVE:
        _alternating(pair, prompts, tokens, measurer, len(kept.turns), goes_on, record, seed)
    elif goes_on():
        with ExitStack() as stack:
            engines = [stack.enter_context(measurer.start(candidate)) for candidate in (pair.default, pair.other)]
            for engine in engines:
                engine.answer(prompts[0][0], 2)  # warm
            _together(engines, prompts, tokens, len(kept.turns), goes_on, record, seed)
    kept.final = before + measurer.clock() - begin
    file.save()


_Record = Callable[[int, Sequence[Answer]], None]


def _together(
    engines: Sequence[Engine],
    prompts: Sequence[tuple[Prompt, Said]],
    tokens: int,
    done: int,
    goes_on: Callable[[], bool],
    record: _Record,
    seed: int,
) -> None:
    for number, order in enumerate(orders(seed)):
        if not goes_on():
            return
        prompt = (done + number) % len(prompts)
        answers = {which: engines[which].answer(prompts[prompt][0], tokens) for which in order}
        record(prompt, [answers[0], answers[1]])


def _alternating(
    pair: Pair,
    prompts: Sequence[tuple[Prompt, Said]],
    tokens: int,
    measurer: Measurer,
    done: int,
    goes_on: Callable[[], bool],
    record: _Record,
    seed: int,
) -> None:
    candidates = pair.default, pair.other
    for order in orders(seed):
        if not goes_on():
            return
        asked = [(done + number) % len(prompts) for number in range(_OF_START)]
        answers: dict[int, list[Answer]] = {}
        for which in order:
            with measurer.start(candidates[which]) as engine:
                engine.answer(prompts[0][0], 2)  # warm
                answers[which] = [engine.answer(prompts[number][0], tokens) for number in asked]
        for place, number in enumerate(asked):
            record(number, [answers[0][place], answers[1][place]])
        done += _OF_START
