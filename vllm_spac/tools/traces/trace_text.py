"""The rows of a trace that are text, in the order of the text.

A trace has the rows of steps, without the names of requests. These rows are known to follow one another in the text of
one request, and are counted:

* a step in which one request generates and no prompt is processed: its row and its accepted drafts. Rejected drafts are
  not text. If the trace does not tell which were accepted, the row alone, and the sequence ends with it;
* a step in which several requests generate, either all with drafts or none, and no prompt is processed: request i of
  the next such step continues request i of this one, since a request joins the batch in a step that processes its
  prompt, and when one leaves, their number changes. Runners reorder requests only where some have drafts and some not;
* steps of prompt rows alone, the last of which emitted one token and the ones before it none, if the next step
  generates for one request: its prompt, which its generated text continues.

All other steps end every sequence and are not counted: prompts beside other rows, prompts of several requests, prompts
after which nothing was generated, drafts of several requests in a trace that has only the sum of their accepted tokens
(``spac-trace-1``), padding between rows, and steps that lack a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vllm_spac.recording.trace_file import ACCEPTED, DRAFT, PADDING, PREFILL, REJECTED, UNKNOWN, Trace


@dataclass(frozen=True, eq=False)
class Text:
    """Text rows of a trace, one sequence behind the other."""

    experts: int
    ids: np.ndarray  # uint8 or uint16 [tokens, layers, top_k]
    weights: np.ndarray | None  # float16 of the same shape, or None if the trace has none
    start: np.ndarray  # int64 [sequences + 1], where each sequence begins
    rows: int  # rows of the trace, those that are no text included

    @classmethod
    def of(cls, trace: Trace) -> Text:
        sequences = _Sequences(trace).read()
        rows = np.array([row for sequence in sequences for row in sequence], dtype=np.int64)
        step = np.searchsorted(trace.row_start, rows, side="right") - 1
        where = _first_rows(trace)[step] + (rows - trace.row_start[step])[:, None]
        weights = None if trace.weights is None else trace.weights[where]
        start = np.concatenate(([0], np.cumsum([len(sequence) for sequence in sequences], dtype=np.int64)))
        return cls(trace.facts.experts, trace.ids[where], weights, start, len(trace.row_kind))

    @property
    def layers(self) -> int:
        return self.ids.shape[1]

    @property
    def top_k(self) -> int:
        return self.ids.shape[2]

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def follows(self) -> np.ndarray:
        """bool [tokens], whether the token before is of the same sequence."""
        follows = np.ones(len(self), dtype=bool)
        follows[self.start[:-1]] = False
        return follows

    def windows(self, rows: int) -> np.ndarray:
        """Returns int64 [windows], where windows of ``rows`` tokens of a sequence begin, without overlap."""
        firsts = [np.arange(a, b - rows + 1, rows) for a, b in zip(self.start[:-1], self.start[1:], strict=True)]
        return np.concatenate([np.zeros(0, dtype=np.int64), *firsts])


def _first_rows(trace: Trace) -> np.ndarray:
    """Returns int64 [steps, layers], where the rows of a layer begin in ``ids``; -1 if the step lacks it."""
    first = np.full((trace.steps, trace.facts.layers), -1, dtype=np.int64)
    first[trace.record_step, trace.record_layer] = trace.record_start[:-1]
    return first


class _Sequences:
    """Finds the sequences of a trace, as lists of rows."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._done: list[list[int]] = []
        self._open: list[list[int]] = []  # of the requests of the last step, in its order
        self._prompt: list[int] = []  # rows of a prompt that may be that of the next step's request
        self._prompt_ends = False

    def read(self) -> list[list[int]]:
        trace = self._trace
        whole: list[bool] = np.all(_first_rows(trace) >= 0, axis=1).tolist()
        for step, emitted in enumerate(trace.step_tokens.tolist()):
            first, last = int(trace.row_start[step]), int(trace.row_start[step + 1])
            kinds = trace.row_kind[first:last]
            if first == last or not whole[step] or (kinds == PADDING).any():
                self._end()
            elif (kinds == PREFILL).all():
                self._read_prompt(range(first, last), emitted)
            elif (kinds == PREFILL).any():
                self._end()
            else:
                self._read_generated(first, kinds, emitted)
        self._end()
        return self._done

    def _read_prompt(self, rows: range, emitted: int) -> None:
        earlier = [] if self._prompt_ends else self._prompt
        self._end()
        if emitted <= 1:
            self._prompt, self._prompt_ends = [*earlier, *rows], emitted == 1

    def _read_generated(self, first: int, kinds: np.ndarray, emitted: int) -> None:
        """Reads a step without prompts, whose rows begin at ``first``, and whose requests emitted so many tokens."""
        starts = np.flatnonzero(kinds != DRAFT)
        accepted = self._accepted(first, kinds, emitted)
        drafts = np.diff([*starts, len(kinds)]) - 1
        unknown = bool((accepted == UNKNOWN).any())
        if len(starts) > 1 and (unknown or ((drafts > 0).any() and not (drafts > 0).all())):
            self._end()
            return
        if len(self._open) != len(starts):
            prompt = self._prompt if len(starts) == 1 and self._prompt_ends else []
            self._end()
            self._open = [list(prompt) for _ in starts]
        taken = np.flatnonzero(accepted == ACCEPTED)
        for sequence, rows in zip(self._open, np.split(taken, np.searchsorted(taken, starts[1:])), strict=True):
            sequence += (first + rows).tolist()
        if unknown:
            self._end()

    def _accepted(self, first: int, kinds: np.ndarray, emitted: int) -> np.ndarray:
        """``Trace.row_accepted`` of a step; of a trace of chains as far as it is known."""
        if self._trace.row_accepted is not None:
            return self._trace.row_accepted[first : first + len(kinds)]
        accepted = np.full(len(kinds), ACCEPTED)
        if emitted and (kinds != DRAFT).sum() == 1:
            accepted[emitted:] = REJECTED
        else:
            accepted[kinds == DRAFT] = UNKNOWN
        return accepted

    def _end(self) -> None:
        self._done += self._open
        self._open, self._prompt, self._prompt_ends = [], [], False
