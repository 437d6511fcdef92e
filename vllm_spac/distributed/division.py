"""How the rows of a prompt are divided among the workers that have its layer. Pure.

Rows are whole: each is computed by one worker, with all of its experts, so that results keep the bits of vLLM's kernel,
in which a row does not depend on the others. A worker has up to two parts at a time, so that one travels while the
other is computed (OD-MoE, section 3.3: mini-batches).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PART_ROWS = 128  # rows of a part
WINDOW = 2  # parts that one worker has at a time


@dataclass(frozen=True, slots=True)
class Load:
    """What a worker has to do for a layer.

    Attributes:
        parts, rows: of the open requests to it.
        pace: seconds per row that it took lately; None while nothing is known.
    """

    parts: int = 0
    rows: int = 0
    pace: float | None = None


def parts(rows: int, workers: int, part_rows: int = PART_ROWS) -> list[slice]:
    """Divides the rows of a layer into parts of consecutive rows.

    As many parts for each of ``workers``, of equal size but for one row; up to ``part_rows`` rows are one part.

    Args:
        rows: at least 1.
        workers: that have the layer, at least 1.
        part_rows: most rows of a part.
    """
    assert rows > 0 and workers > 0
    if rows <= part_rows:
        return [slice(0, rows)]
    count = min(rows, workers * -(-rows // (workers * part_rows)))
    ends = [rows * number // count for number in range(count + 1)]
    return [slice(start, stop) for start, stop in zip(ends, ends[1:], strict=False)]


def sent(waiting: Sequence[tuple[int, Sequence[int]]], loads: Mapping[int, Load], divided: bool) -> list[int | None]:
    """Returns for each part that waits the worker to send it to now; None: it waits until one has answered.

    Args:
        waiting: rows of each part, and the workers that may compute it, the one to be asked first in front.
        loads: of these workers.
        divided: the layer's rows are divided: each part goes to the worker that would finish it first, parts that wait
            for a worker counted, too. Else it goes to the first of its workers.
    """
    known = [load.pace for load in loads.values() if load.pace is not None]
    usual = sum(known) / len(known) if known else 1.0
    pace = {worker: usual if load.pace is None else load.pace for worker, load in loads.items()}
    parts_of = {worker: load.parts for worker, load in loads.items()}
    rows_of = {worker: load.rows for worker, load in loads.items()}
    found: list[int | None] = []
    for rows, workers in waiting:
        if not workers:
            found.append(None)
            continue
        ends = [(rows_of[worker] + rows) * pace[worker] for worker in workers]
        worker = workers[ends.index(min(ends)) if divided else 0]  # the first of equals
        found.append(worker if parts_of[worker] < WINDOW else None)
        parts_of[worker] += 1
        rows_of[worker] += rows
    return found
