"""One run of ``vllm-spac tune``: measures candidates in rounds, then the fastest and the default in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vllm_spac.config.tuned_profile import LRU, Candidate, combine
from vllm_spac.decisions.comparison import Ratio, Said, Tokens, compare_tokens
from vllm_spac.tools.tuning.halving import Halving, Run
from vllm_spac.tools.tuning.measurer import Answer, Engine, Measurer, MeasuringError
from vllm_spac.tools.tuning.progress import Measurement, ProgressFile
from vllm_spac.tools.tuning.turns import FEWEST, Pair, Prompt, take_turns

SEARCH = 0.65  # of the time; the rest is for the turns
PROMPTS = 3  # of the first round

Tell = Callable[[str, float], object]


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
        candidates: of ``candidates.candidates``, the default first.
        prompts: are used in order, as many as a round needs, and repeated in turns.
        seconds: of the whole run, without the first engine, which may have to pack the experts.
        tell: called with what is being measured, and the seconds spent.

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
    ) -> None:
        self.candidates = {candidate.name: candidate for candidate in candidates}
        self._default = candidates[0]
        self._prompts, self._tokens, self._seconds, self._seed = prompts, tokens, seconds, seed
        self._measurer, self._file, self._tell = measurer, file, tell
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
            self._observe(run, self._recorded.get((run.arm, run.round)) or self._measure(run))
        contender = self._contender()
        ratio = None if contender is None else self._compare(contender)
        choice = contender if contender is not None and ratio is not None and ratio.is_faster else self._default
        speeds = {name: speed for name in self.candidates if (speed := self._halving.speed(name)) is not None}
        untried = tuple(c for name, c in self.candidates.items() if name not in self._last)
        return TuneOutcome(choice, contender, ratio, speeds, self._last, self._compared, untried)

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
                found.near_ties = self._near_ties(candidate, engine)
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

    def _near_ties(self, candidate: Candidate, engine: Engine) -> bool:
        same = candidate.same_steps and engine.repeats
        return not same and (engine.near_ties or bool(candidate.departures))

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
