"""The drafts of a trace: how deep each is in its tree, and how many of each depth were accepted."""

from __future__ import annotations

import numpy as np

from vllm_spac.traces.format import ACCEPTED, DRAFT, UNKNOWN, Trace


def draft_depths(trace: Trace) -> np.ndarray:
    """Returns int64 [sum rows]: drafts on the path to each draft, itself included; 0 for other rows."""
    drafts = trace.row_kind == DRAFT
    back = drafts.astype(np.int64) if trace.row_back is None else trace.row_back.astype(np.int64)
    depths = np.zeros(len(drafts), dtype=np.int64)
    ancestor = np.arange(len(drafts))
    while (below := drafts[ancestor]).any():
        depths += below
        ancestor = np.where(below, ancestor - back[ancestor], ancestor)
    return depths


def accepted_by_depth(trace: Trace) -> list[tuple[int, int]]:
    """Returns (drafts, accepted drafts) at depth 1, 2, ..., of those whose acceptance is recorded."""
    if trace.row_accepted is None:
        return []
    depths = draft_depths(trace)
    known = (depths > 0) & (trace.row_accepted != UNKNOWN)
    drafts = np.bincount(depths[known])[1:]
    accepted = np.bincount(depths[known & (trace.row_accepted == ACCEPTED)], minlength=len(drafts) + 1)[1:]
    return list(zip(drafts.tolist(), accepted.tolist(), strict=True))
