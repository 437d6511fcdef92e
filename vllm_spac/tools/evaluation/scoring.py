"""Compares a model's predictions for texts with its earlier ones for the same texts: perplexity, KL, top-1."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from vllm_spac.errors import SpacError


class Scores:
    """Accumulates scores over rows that each predict a known next token."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []  # float64 [rows, 5] each

    def add(self, logits: Tensor, reference: Tensor, following: Tensor) -> None:
        """Adds some rows.

        Args:
            logits, reference: float [rows, V].
            following: int64 [rows], the true next tokens.
        """
        assert logits.shape == reference.shape and len(following) == len(logits)
        ours, theirs = (each.to(torch.float32).log_softmax(-1) for each in (logits, reference))
        loss, other = (-each.gather(1, following[:, None])[:, 0].double() for each in (ours, theirs))
        divergence = (theirs.exp() * (theirs - ours)).sum(-1, dtype=torch.float64)
        best = logits.argmax(-1)
        agreed, right = best == reference.argmax(-1), best == following
        columns = loss, loss - other, divergence, agreed.double(), right.double()
        self._parts.append(torch.stack(columns, 1).cpu())

    def snapshot(self) -> dict:
        """Returns the scores as plain data.

        Returns:
            ``tokens`` predicted, ``perplexity`` exp(mean loss), ``perplexity_change`` exp(mean difference of the
            losses) - 1, ``accuracy``: share of rows whose best token is the next one, ``agreement``: the reference's,
            ``kl``: mean KL(reference || this) in nats. All but the perplexity with their standard error over tokens.
        """
        rows = torch.cat(self._parts)
        loss, difference, divergence, agreement, accuracy = rows.mean(0).tolist()
        errors = rows.std(0, correction=0).div(math.sqrt(len(rows))).tolist()
        return {
            "tokens": len(rows),
            "perplexity": math.exp(loss),
            "perplexity_change": math.expm1(difference),
            "perplexity_change_error": math.exp(difference) * errors[1],
            "accuracy": accuracy,
            "accuracy_error": errors[4],
            "agreement": agreement,
            "agreement_error": errors[3],
            "kl": max(0.0, divergence),
            "kl_error": errors[2],
        }


_BLOCK = 64  # rows whose logits are in memory at a time


class Scoring:
    """Keeps the final hidden states of all rows; logits are computed from them in blocks.

    Args:
        model: the target model, a vLLM module, run by calling it.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._hook: Any = None
        self._hidden: list[Tensor] = []  # of the current text
        self._reference: list[Tensor] = []  # one per text
        self._scores, self._texts, self._is_reference = Scores(), 0, False

    def begin(self, reference: bool) -> None:
        """Starts scoring the following texts, against themselves if they are the ``reference``."""
        assert self._hook is None, "the previous scores were not collected"
        if reference:
            self._reference.clear()
        self._scores, self._texts, self._is_reference = Scores(), 0, reference
        self._hook = self._model.register_forward_hook(self._keep)

    def end_text(self, ids: list[int]) -> None:
        """Scores the next text of the reference, ``ids``, which the model processed in one or several forwards.

        Raises:
            SpacError: the model ran another number of rows.
        """
        hidden = torch.cat(self._hidden)
        self._hidden.clear()
        if len(hidden) != len(ids):
            raise SpacError(f"spac: the model ran {len(hidden)} rows for a text of {len(ids)} tokens; this is a bug")
        if self._is_reference:
            self._reference.append(hidden)
        other, following = self._reference[self._texts], torch.tensor(ids[1:], device=hidden.device)
        for start in range(0, len(following), _BLOCK):
            rows = slice(start, min(start + _BLOCK, len(following)))
            ours, theirs = (self._model.compute_logits(states[rows]) for states in (hidden, other))
            self._scores.add(ours, theirs, following[rows])
        self._texts += 1

    def end(self) -> dict:
        """Ends scoring; returns the scores of the texts since ``begin``."""
        self._hook.remove()
        self._hook = None
        return self._scores.snapshot()

    def _keep(self, module: torch.nn.Module, arguments: tuple, output: Tensor | tuple[Tensor, ...]) -> None:
        states = output[0] if isinstance(output, tuple) else output  # a tuple also has hidden states for a draft model
        self._hidden.append(states.detach().clone())
