"""The drafts of a trace: how deep each is in its tree, and how many of each depth were accepted."""

from __future__ import annotations

import numpy as np

from vllm_spac.traces.format import ACCEPTED, DRAFT, UNKNOWN, Trace


def draft_depths(trace: Trace) -> np.ndarray:
    """Returns int64 [sum rows]: drafts on the path to each draft, itself included; 0 for other rows."""
    depths = [0] * len(trace.row_kind)
    drafts = np.flatnonzero(trace.row_kind == DRAFT)
    back = np.ones_like(drafts) if trace.row_back is None else trace.row_back[drafts]
    for row, distance in zip(drafts.tolist(), back.tolist(), strict=True):
        depths[row] = 1 + (depths[row - distance] if row else 0)  # a trace of chains may begin with a draft
    return np.array(depths, dtype=np.int64)


def accepted_by_depth(trace: Trace) -> list[tuple[int, int]]:
    """Returns (drafts, accepted drafts) at depth 1, 2, ..., of those whose acceptance is recorded."""
    if trace.row_accepted is None:
        return []
    depths = draft_depths(trace)
    known = (depths > 0) & (trace.row_accepted != UNKNOWN)
    drafts = np.bincount(depths[known])[1:]
    accepted = np.bincount(depths[known & (trace.row_accepted == ACCEPTED)], minlength=len(drafts) + 1)[1:]
    return list(zip(drafts.tolist(), accepted.tolist(), strict=True))
