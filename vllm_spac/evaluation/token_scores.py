"""Compares a model's predictions with those of a reference, over many rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Scores:
    """Accumulates scores over rows that each predict a known next token.

    Args:
        reference: whether these are the reference's own scores.

    Attributes:
        texts: number of texts scored; counted by the caller.
    """

    def __init__(self, reference: bool = False) -> None:
        self.reference = reference
        self.texts = 0
        self._rows = 0
        self._loss = self._difference = self._difference_squares = self._divergence = 0.0
        self._agreed = 0

    def add(self, logits: Tensor, reference: Tensor, following: Tensor) -> None:
        """Adds some rows.

        Args:
            logits, reference: float [rows, V].
            following: int64 [rows], the true next tokens.
        """
        assert logits.shape == reference.shape and len(following) == len(logits)
        ours, theirs = (each.to(torch.float32).log_softmax(-1) for each in (logits, reference))
        columns = following[:, None]
        loss, other = (-each.gather(1, columns)[:, 0].double() for each in (ours, theirs))
        self._rows += len(following)
        self._loss += float(loss.sum())
        self._difference += float((loss - other).sum())
        self._difference_squares += float((loss - other).square().sum())
        self._divergence += float((theirs.exp() * (theirs - ours)).sum(dtype=torch.float64))
        self._agreed += int((logits.argmax(-1) == reference.argmax(-1)).sum())

    def snapshot(self) -> dict:
        """Returns the scores as plain data.

        Returns:
            ``tokens`` predicted, ``perplexity`` exp(mean loss), ``perplexity_change`` exp(mean difference of the
            losses) - 1, with its standard error over tokens, ``agreement``: share of rows whose best token is the
            reference's, with its standard error, ``kl``: mean KL(reference || this) in nats.
        """
        assert self._rows, "no row was scored"
        rows, mean, agreed = self._rows, self._difference / self._rows, self._agreed / self._rows
        spread = max(0.0, self._difference_squares / rows - mean**2)
        return {
            "tokens": rows,
            "perplexity": math.exp(self._loss / rows),
            "perplexity_change": math.expm1(mean),
            "perplexity_change_error": math.exp(mean) * math.sqrt(spread / rows),
            "agreement": agreed,
            "agreement_error": math.sqrt(agreed * (1 - agreed) / rows),
            "kl": max(0.0, self._divergence / rows),
        }
