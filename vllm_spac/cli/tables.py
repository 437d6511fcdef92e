"""Tables that fit a terminal of 80 columns as long as their cells allow it."""

from __future__ import annotations

from collections.abc import Container, Sequence

from rich import box
from rich.table import Table


def compact(
    title: str,
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: Sequence[str] = (),
    nothing: Container[str] = ("", "-"),
) -> Table:
    """Returns a table without the columns whose cells are all ``nothing``; the first one is always shown.

    Args:
        title, heads: markup of rich.
        rows: cells, markup of rich; a row without cells separates those before and behind it.
        left: the columns of text; the others are numbers, on the right.
        nothing: cells that say nothing.
    """
    table = Table(title=title, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True)
    filled = [row for row in rows if row]
    kept = [place for place in range(len(heads)) if place == 0 or any(row[place] not in nothing for row in filled)]
    for place in kept:
        table.add_column(heads[place], justify="left" if heads[place] in left else "right")
    for row in rows:
        if row:
            table.add_row(*(row[place] for place in kept))
        else:
            table.add_section()
    return table
