"""One run of ``vllm-spac tune``: measures candidates in rounds, then the fastest and the default in turns.

What it found is put into rows of the profile, and into sentences.
"""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vllm_spac.config.tuned_profile import DEFAULT, LRU, Candidate, Measured, combine
from vllm_spac.config.types import flag
from vllm_spac.decisions.comparison import Ratio, Said, Tokens, compare_tokens
from vllm_spac.tools.tuning.halving import Halving, Run
from vllm_spac.tools.tuning.measurer import Answer, Engine, Measurer, MeasuringError
from vllm_spac.tools.tuning.progress import Measurement, ProgressFile
from vllm_spac.tools.tuning.turns import FEWEST, Pair, Prompt, take_turns

SEARCH = 0.65  # of the time; the rest is for the turns
PROMPTS = 3  # of the first round

Tell = Callable[[str, float], object]
Report = Callable[[str], object]


@dataclass(frozen=True)
class TuneOutcome:
    """What a run found.

    Attributes:
        choice: the default unless another candidate was faster in the turns.
        contender: what was compared with the default in turns; None: nothing was faster in the rounds.
        ratio: of ``contender`` over the default; None: no or too few turns.
        speeds: tokens per second over the default's, by name; last: the last measurement of each.
        tokens: how tokens compare with the default's, by name.
        untried: candidates for which there was no time.
    """

    choice: Candidate
    contender: Candidate | None
    ratio: Ratio | None
    speeds: dict[str, float] = field(default_factory=dict)
    last: dict[str, Measurement] = field(default_factory=dict)
    tokens: dict[str, Tokens] = field(default_factory=dict)
    untried: tuple[Candidate, ...] = ()

    @property
    def undecided(self) -> bool:
        """Whether the time was too short: to try everything before the default is kept, or to compare in turns."""
        if self.contender is None:
            return bool(self.untried)
        return self.ratio is None or (bool(self.untried) and not self.ratio.is_faster)


class Session:
    """One run.

    Args:
        prompts: are used in order, as many as a round needs, and repeated in turns.
        seconds: of the whole run, without the first engine, which may have to pack the experts.
        tell: called with what is being measured, and the seconds spent.
        report: called with what each measurement found, in a sentence.

    Attributes:
        candidates: with the combination that was found to be worth trying.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        prompts: Sequence[Prompt],
        tokens: int,
        seconds: float,
        measurer: Measurer,
        file: ProgressFile,
        tell: Tell = lambda text, spent: None,
        seed: int = 0,
        report: Report = lambda text: None,
    ) -> None:
        self.candidates = {candidate.name: candidate for candidate in candidates}
        self._default = candidates[0]
        self._prompts, self._tokens, self._seconds, self._seed = prompts, tokens, seconds, seed
        self._measurer, self._file, self._tell, self._report = measurer, file, tell, report
        kept = [candidate.name for candidate in candidates if candidate.group == "baseline"]
        kept += [name for name in (LRU,) if name in self.candidates]
        self._halving = Halving(list(self.candidates), kept, SEARCH * seconds, seed)
        self._said: list[Said] = []
        self._last: dict[str, Measurement] = {}
        self._compared: dict[str, Tokens] = {}
        self._joined = False
        self._recorded = {(run.arm, run.round): run for run in file.content.runs}

    def run(self) -> TuneOutcome:
        """Measures until the time is spent; each measurement is saved.

        Raises:
            MeasuringError: the default cannot be measured.
        """
        while (run := self._halving.next()) is not None:
            if run.round == 1 and not self._joined:
                self._join()
            known = self._recorded.get((run.arm, run.round))
            self._observe(run, known or self._measure(run))
            if known is None:
                self._report(self._sentence(run))
        contender = self._contender()
        ratio = None if contender is None else self._compare(contender)
        return self._outcome(contender, ratio)

    def stopped(self) -> TuneOutcome:
        """Returns what was found until now, of a run that is stopped; nothing is chosen without all turns."""
        return self._outcome(self._contender(), None)

    def _outcome(self, contender: Candidate | None, ratio: Ratio | None) -> TuneOutcome:
        choice = contender if contender is not None and ratio is not None and ratio.is_faster else self._default
        speeds = {name: speed for name in self.candidates if (speed := self._halving.speed(name)) is not None}
        untried = tuple(c for name, c in self.candidates.items() if name not in self._last)
        return TuneOutcome(choice, contender, ratio, speeds, self._last, self._compared, untried)

    def _sentence(self, run: Run) -> str:
        """Says what a measurement found, and how long the rest takes at most."""
        found, speed = self._last[run.arm], self._halving.speed(run.arm)
        rate = f"{statistics.median(found.rates):.1f} tokens/s" if found.rates else "failed"
        compared = f", {speed:.2f} times the default's" if speed is not None and run.arm != self._default.name else ""
        wrong = (tokens := self._compared.get(run.arm)) is not None and tokens.verdict == "wrong"
        text = ", and wrong tokens" if wrong else compared
        left = max(0.0, self._seconds - self._halving.spent)
        return f"round {run.round + 1}, {run.arm}: {rate}{text}; at most {minutes(left)} left"

    def _join(self) -> None:
        """Adds the combination of what was faster than the default, if there are several such changes."""
        self._joined = True
        faster = [self.candidates[name] for name in self._halving.ranked() if (self._halving.speed(name) or 0) > 1]
        found = combine(self._default, [candidate for candidate in faster if not candidate.is_stock])
        if found is not None:
            self.candidates[found.name] = found
            self._halving.join(found.name)

    def _measure(self, run: Run) -> Measurement:
        """Measures one candidate in an engine of its own, and saves it."""
        self._tell(f"round {run.round + 1}: {run.arm}", self._halving.spent)
        candidate, begin = self.candidates[run.arm], self._measurer.clock()
        prompts = self._prompts[: PROMPTS << run.round]
        found = Measurement(arm=run.arm, round=run.round, seconds=0.0)
        try:
            with self._measurer.start(candidate) as engine:
                engine.answer(prompts[0], 2)  # warm
                answers = [engine.answer(prompt, self._tokens) for prompt in prompts]
                found.rates = [answer.rate for answer in answers]
                found.first_token = [answer.first_token for answer in answers]
                found.answers = [list(answer.ids) for answer in answers]
                same = candidate.same_steps and engine.repeats
                found.near_ties = not same and (engine.near_ties or bool(candidate.departures))
                found.nbytes, found.exclusive = engine.nbytes, engine.exclusive
                if candidate is self._default:
                    found.said = [self._explained(engine, number, answer) for number, answer in enumerate(answers)]
        except MeasuringError as error:
            found.problem, found.rates = str(error), []
        found.seconds = self._measurer.clock() - begin
        if found.rates or candidate is not self._default:  # a default that failed is measured again
            self._file.content.runs.append(found)
            self._file.save()
        return found

    def _explained(self, engine: Engine, number: int, answer: Answer) -> Said:
        """Returns the default's answer to a prompt, with the second best tokens where near-ties may be decided."""
        if number < len(self._said):
            return self._said[number]
        rounding = any(candidate.departures for candidate in self.candidates.values())
        if engine.near_ties or rounding:
            return engine.explain(self._prompts[number], self._tokens)
        return Said(ids=tuple(answer.ids))

    def _observe(self, run: Run, found: Measurement) -> None:
        """Gives a measurement to the scheduler; one with wrong tokens counts as failed."""
        candidate = self.candidates[run.arm]
        self._last[run.arm] = found
        if candidate is self._default:
            if found.problem:
                raise MeasuringError(found.problem)
            if len(found.said) > len(self._said):
                self._said = found.said
        first = run.round == 0 and candidate is self._default
        rates = found.rates
        if rates and not candidate.is_stock and "lossy" not in candidate.departures:
            tokens = compare_tokens(self._said[: len(found.answers)], found.answers, found.near_ties)
            self._compared[run.arm] = tokens
            rates = [] if tokens.verdict == "wrong" and candidate is not self._default else rates
        self._halving.observe(run, rates, found.seconds)
        if first:
            self._halving.free(found.seconds)

    def _contender(self) -> Candidate | None:
        """Returns the fastest candidate of the plugin, if it was faster than the default in its last round."""
        for name in self._halving.ranked():
            candidate = self.candidates[name]
            if candidate is self._default:
                return None
            if not candidate.is_stock:
                return candidate
        return None

    def _compare(self, contender: Candidate) -> Ratio | None:
        """Compares ``contender`` with the default in turns; None if tokens are wrong, or for too few turns."""
        kept = self._file.content
        kept.turns = [turn for turn in kept.turns if turn.arm == contender.name]
        measured = self._last[self._default.name], self._last[contender.name]
        pair = Pair(
            self._default,
            contender,
            nbytes=sum(found.nbytes for found in measured),
            exclusive=any(found.exclusive for found in measured),
            near_ties=measured[1].near_ties,
        )
        before, text = self._halving.spent, f"in turns: {contender.name} and the default"
        self._tell(text, before + kept.final)
        take_turns(
            pair,
            list(zip(self._prompts, self._said, strict=False)),
            self._tokens,
            self._measurer,
            self._file,
            self._seconds - before,
            self._seed,
            lambda spent: self._tell(text, before + spent),
        )
        wrong = [turn for turn in kept.turns if turn.wrong]
        if wrong:
            self._compared[contender.name] = Tokens("wrong", len(kept.turns), len(wrong), float("inf"))
        if wrong or len(kept.turns) < FEWEST:
            return None
        return Ratio.of([turn.other / turn.default for turn in kept.turns], self._seed)


def minutes(seconds: float) -> str:
    """Formats a time that is left."""
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def best_so_far(outcome: TuneOutcome) -> str:
    """Says what a run that was stopped would serve with, as far as it came."""
    if outcome.contender is None:
        return "the default is the fastest so far" if len(outcome.last) > 1 else "nothing was compared so far"
    name = outcome.contender.name
    speed = outcome.speeds[name]
    return f"the fastest so far is {name}: {speed:.2f} times the default's tokens/s, not compared in turns yet"


def measured(outcome: TuneOutcome, candidates: Sequence[Candidate]) -> tuple[Measured, ...]:
    """Returns what was measured of each candidate, the fastest first and those without a speed last."""
    rows = [_row(outcome, candidate) for candidate in candidates]
    return tuple(sorted(rows, key=lambda row: -(row.speed or 0.0)))


def _row(outcome: TuneOutcome, candidate: Candidate) -> Measured:
    name, last = candidate.name, outcome.last.get(candidate.name)
    if last is None:
        return Measured(name=name, note=candidate.note, problem="no time was left")
    tokens = outcome.tokens.get(name)
    wrong = tokens is not None and tokens.verdict == "wrong" and name != DEFAULT
    return Measured(
        name=name,
        speed=None if wrong else outcome.speeds.get(name),
        tokens_per_second=statistics.median(last.rates) if last.rates else None,
        first_token=statistics.median(last.first_token) if last.first_token else None,
        rounds=last.round + 1,
        tokens="" if tokens is None else str(tokens),
        note=candidate.note,
        problem=last_line(last.problem) if last.problem else "other tokens than the default's" if wrong else "",
    )


def last_line(log: str) -> str:
    """Returns the last line of a log that says anything."""
    return next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "it says nothing")


def sentences(outcome: TuneOutcome) -> Iterator[str]:
    """Yields what was decided, and why."""
    name = None if outcome.contender is None else outcome.contender.name
    if name is None:
        if outcome.untried:
            yield "nothing that was tried so far was faster than the default"
        else:
            yield "nothing was faster than the default: it is kept"
        return
    if (tokens := outcome.tokens.get(name)) is not None and tokens.verdict == "wrong":
        yield f"{name} was the fastest and gave other tokens in turns with the default, which is kept"
    elif outcome.ratio is None:
        yield f"{name} was the fastest so far; the time was too short to compare it with the default in turns"
    else:
        yield f"in turns, {name} over the default, tokens per second: {outcome.ratio}"
        if not outcome.ratio.is_faster:
            yield "the interval includes 1, so the default is kept"
    if tokens is not None and tokens.verdict == "near-ties":
        exact = """--engine '{"dtype": "float32"}'"""
        yield f"its tokens are the default's but for {tokens}; {exact} allows no difference"
    if outcome.contender is not None and outcome.contender.note:
        yield f"{name} is {outcome.contender.note}"


def errors(outcome: TuneOutcome) -> Iterator[str]:
    """Yields a sentence on each candidate whose tokens were wrong."""
    for name, tokens in outcome.tokens.items():
        if tokens.verdict == "wrong":
            what = "does not repeat its own tokens" if name == DEFAULT else "is never kept"
            yield f"{name}: tokens are {tokens}; it {what}; please report this with the command and the model"


def command(model: str, candidate: Candidate, disk_dir: Path | None) -> str:
    """Returns the command that serves so without a profile."""
    options: list[str] = []
    for name, value in (candidate.knobs or {}).items():
        options += [flag(name), str(value)]
    if disk_dir is not None:
        options += [flag("disk_dir"), str(disk_dir)]
    if candidate.drafts is not None:
        options += ["--speculative-config", json.dumps(dict(candidate.drafts))]
    return shlex.join(["vllm", "serve", model, "--plugin", "spac", *options])
