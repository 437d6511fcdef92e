"""Loops over the rows and experts of a layer that cut its routing to a shortlist, compiled by Numba; see ``host_cut``.

Importing this module compiles them, in seconds the first time. The machine code is stored beside the module, or in the
user's cache where that cannot be written.
"""

from __future__ import annotations

import numba
import numpy as np

NO_MASS, SELECTED, SCORES = range(3)  # which mass a share refers to

_ROWS, _IDS = "float32[:,::1]", "int64[:,::1]"
_SIGNATURE = (
    f"Tuple((boolean, float64, int64, int64))({_ROWS}, {_ROWS}, int64[::1], {_ROWS}, {_IDS}, float64[::1], float64, "
    f"int64, int64, boolean, boolean, boolean, float64, int64, int64, int64, {_ROWS}, {_IDS})"
)


@numba.njit(cache=True)
def _choose(scores, open_to, chosen):
    """Writes the best experts of ``open_to``, the best first, ties by the lowest id; then, if too few, the others."""
    free = np.ones(len(scores), dtype=np.bool_)
    for place in range(len(chosen)):
        best = -1
        for expert in range(len(scores)):
            if not free[expert]:
                continue
            if (
                best < 0
                or (open_to[expert] and not open_to[best])
                or open_to[expert] == open_to[best]
                and open_to[expert]
                and scores[expert] > scores[best]
            ):
                best = expert
        chosen[place], free[best] = best, False


@numba.njit(cache=True)
def _within_groups(inside, scores, needed, groups, top_groups, summed):
    """bool [N]: members in the best groups of a row, see ``kernels.reference.cover.within_groups``."""
    size = len(scores) // groups
    worth = np.empty(groups, dtype=np.float32)
    for group in range(groups):
        first = second = np.float32(-np.inf)
        for score in scores[group * size : (group + 1) * size]:
            if score > first:
                first, second = score, first
            elif score > second:
                second = score
        worth[group] = first if summed == 1 else first + second
    best = np.empty(top_groups, dtype=np.int64)
    _choose(worth, np.ones(groups, dtype=np.bool_), best)
    narrowed, found = np.zeros(len(scores), dtype=np.bool_), 0
    for group in best:
        for expert in range(group * size, (group + 1) * size):
            if inside[expert]:
                narrowed[expert] = True
                found += 1
    return narrowed if found >= needed else inside


@numba.njit(cache=True)
def _held(probs, weights, ids, votes, mass_of):
    """float64 [N]: each expert's part of the mass."""
    held = np.zeros(probs.shape[1])
    for row in range(len(probs)):
        vote = votes[row] if len(votes) else 1.0
        if vote != 0 and mass_of == SCORES:
            for expert in range(len(held)):
                held[expert] += np.float64(probs[row, expert]) * vote
        elif vote != 0:
            for place in range(ids.shape[1]):
                held[ids[row, place]] += np.float64(weights[row, place]) * vote
    return held


@numba.njit(cache=True)
def shortlist(probs, order, weights, ids, votes, share, mass_of, least):
    """The shortlist as bool [N], and the best of it, see ``kernels.reference.shortlist``."""
    inside = np.zeros(probs.shape[1], dtype=np.bool_)
    if mass_of == NO_MASS or share >= 1:
        for expert in order:
            inside[expert] = True
        return inside, order[0]
    held = _held(probs, weights, ids, votes, mass_of)
    placed = np.empty_like(order)  # by selected mass: experts without mass behind those with mass
    count = 0
    for empty in range(2):
        for expert in order:
            if (empty == 1) == (mass_of == SELECTED and held[expert] == 0):
                placed[count] = expert
                count += 1
    total = 0.0
    for expert in placed:
        total += held[expert]
    found = 0.0
    for place in range(len(placed)):
        inside[placed[place]] = True
        found += held[placed[place]]
        if found >= share * total and place + 1 >= least:
            break
    return inside, placed[0]


@numba.njit(cache=True)
def _truncate(probs, weights, ids, inside, best, taken, chosen):
    """Writes a row without the experts outside, see ``kernels.reference.cover.truncated``."""
    stand_in = -1
    for expert in ids:
        if inside[expert] and (
            stand_in < 0 or probs[expert] > probs[stand_in] or (probs[expert] == probs[stand_in] and expert < stand_in)
        ):
            stand_in = expert
    if stand_in < 0:
        stand_in = best
    for place in range(len(ids)):
        kept = inside[ids[place]]
        taken[place] = weights[place] if kept else 0
        chosen[place] = ids[place] if kept else stand_in


@numba.njit(cache=True)
def _sum(values):
    total = np.float32(0)
    for value in values:
        total += value
    return total


@numba.njit(cache=True)
def _scale(values, total, scale):
    """Divides by ``total``, unless it is 0, and multiplies by ``scale``."""
    for place in range(len(values)):
        if total != 0:
            values[place] /= total
        values[place] *= np.float32(scale)


@numba.njit(_SIGNATURE, cache=True)
def cut_rows(
    probs, chosen_by, order, weights, ids, votes, share, mass_of, least, substitute, rescue, renormalize, scale,
    groups, top_groups, summed, taken, chosen,
):  # fmt: skip
    rows, top_k = ids.shape
    inside, best = shortlist(probs, order, weights, ids, votes, share, mass_of, least)
    used = np.zeros(len(inside), dtype=np.bool_)
    any_cut, dropped, emptied = False, 0.0, 0
    for row in range(rows):
        kept, lost, total = 0, 0.0, 0.0
        for place in range(top_k):
            total += weights[row, place]
            if inside[ids[row, place]]:
                kept += 1
            else:
                lost += weights[row, place]
        dropped += lost / max(total, 1e-30)
        if kept == 0:
            emptied += 1
        if kept == top_k:
            for place in range(top_k):
                taken[row, place], chosen[row, place] = weights[row, place], ids[row, place]
        else:
            any_cut = True
            needed = top_k if substitute else 1
            if substitute or (rescue and kept == 0):
                open_to = inside
                if groups > 0:
                    open_to = _within_groups(inside, chosen_by[row], needed, groups, top_groups, summed)
                _choose(chosen_by[row], open_to, chosen[row, :needed])
                for place in range(needed):
                    taken[row, place] = probs[row, chosen[row, place]]
            if substitute:
                _scale(taken[row], _sum(taken[row]) if renormalize else np.float32(1), scale)
            elif rescue and kept == 0:
                natural = np.float32(0)
                for place in range(top_k):
                    natural += probs[row, ids[row, place]]
                _scale(taken[row, :1], natural if renormalize else np.float32(1), scale)
                for place in range(1, top_k):
                    taken[row, place], chosen[row, place] = 0, chosen[row, 0]
            else:
                _truncate(probs[row], weights[row], ids[row], inside, best, taken[row], chosen[row])
        for place in range(top_k):
            if taken[row, place] != 0:
                used[chosen[row, place]] = True
    experts = 0
    for each in used:
        experts += each
    return any_cut, dropped, experts, emptied
