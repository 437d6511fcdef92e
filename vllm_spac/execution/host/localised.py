"""The first stage of a layer: which of its rows and experts this process runs. Pure."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_spac.core import NO_EXPERT
from vllm_spac.execution.base import Rows
from vllm_spac.execution.row_shares import Share, numbered, runnable


class Routed(NamedTuple):
    """Rows of a layer with experts that can all be run.

    Attributes:
        on_device: [rows, top_k] on the device of ``x``, experts as the model numbers them; None: they are not there.
    """

    x: Tensor  # [rows, hidden]
    weights: Tensor  # [rows, top_k], 0 for pairs that add nothing
    ids: Tensor  # [rows, top_k] on the CPU, experts as this process numbers them
    on_device: Tensor | None = None
    of_model: Tensor | None = None  # the same on the CPU; None: those of ``ids``

    def pick(self, share: Share) -> Routed:
        """Returns the pairs of ``share``, which divides ``ids``."""
        return Routed(*share.pick(self.x, self.weights), share.ids)


class Localised(NamedTuple):
    """A layer's forward as this process runs it.

    Attributes:
        live: bool [rows, 1] on the CPU, which rows of ``routed`` run experts; None: all. No other result is used.
    """

    routed: Routed  # what is run
    at: Tensor | None  # int64 [m], the rows of the forward that ``routed`` has, ascending; None: all
    live: Tensor | None
    real: int  # leading rows of ``routed`` that belong to requests
    own: Tensor  # int [requests' rows, top_k] on the CPU, what they chose, as this process numbers experts; -1: none
    chosen: Tensor  # the same, as the model numbers them
    asked: Tensor  # ``chosen`` with an expert in place of each -1, for predictors
    weights: Tensor  # [requests' rows, top_k], of ``chosen``

    @property
    def empty(self) -> bool:
        """Whether nothing of the forward runs here."""
        return self.at is not None and not len(self.at)

    def divided(self, cold: Tensor) -> tuple[Share, Share]:
        """Returns the shares of ``routed`` that ``cold`` (bool, like its ids) has and has not, of rows that run."""
        runs = torch.ones_like(cold) if self.live is None else self.live.expand_as(cold)
        return Share.of(self.routed.ids, cold & runs), Share.of(self.routed.ids, ~cold & runs)

    def spread(self, part: Tensor, like: Tensor) -> Tensor:
        """Returns the forward's output, like ``like`` [rows, hidden], from that of ``routed``; 0 for other rows."""
        if self.at is None:
            return part
        out = torch.zeros_like(like)
        out[self.at.to(out.device)] = part
        return out


def localise(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    chosen: Tensor,
    rows: Rows,
    local_of: Tensor | None = None,
    *,
    whole: bool = False,
) -> Localised:
    """Returns what this process runs of a layer. Where others hold some experts, vLLM adds the parts of all behind it.

    Args:
        x, weights, ids, rows: as in ``Execution.forward``.
        chosen: ``ids`` on the CPU.
        local_of: as in ``Execution``.
        whole: the kernel leaves out experts of other processes: it runs all rows, as stock vLLM's does. Else only
            rows that chose an expert of this process run.
    """
    if local_of is not None:
        return _localise_part(x, weights, ids, chosen, rows, local_of, whole=whole)
    if rows.as_routed:  # each call into torch takes microseconds, in every layer of every token
        return Localised(Routed(x, weights, chosen, ids), None, None, len(x), chosen, chosen, chosen, weights)
    weights, run = weights.masked_fill(ids < 0, 0), runnable(chosen, rows.real)
    asked = told = run[: rows.real]
    live = None
    if rows.cut:
        live = (chosen >= 0).any(1, keepdim=True)
        live[rows.real :] = False
        told = asked.masked_fill(~live[: rows.real], NO_EXPERT)
    return Localised(Routed(x, weights, run), None, live, rows.real, told, told, asked, weights[: rows.real])


def _localise_part(
    x: Tensor, weights: Tensor, ids: Tensor, chosen: Tensor, rows: Rows, local_of: Tensor, *, whole: bool
) -> Localised:
    real, run, masked = slice(rows.real), runnable(chosen, rows.real), weights.masked_fill(ids < 0, 0)
    local = numbered(chosen, local_of, rows.real)
    share = Share.of(local, local >= 0)
    if whole and len(share.rows):
        needed = torch.full_like(local, int(share.ids[0, 0]))  # of rows that chose none of this process's experts
        needed[share.rows] = share.ids
        routed, at = Routed(x, masked, needed, ids if rows.as_routed else None, run), None
    else:
        routed, at = Routed(x, masked, local).pick(share), share.rows
    return Localised(routed, at, None, len(routed.x), local[real], chosen[real], run[real], masked[real])
