"""Tables of which nothing is cut, however narrow the terminal is; untrusted text is escaped."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from copy import copy
from dataclasses import replace

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Column, Table

from vllm_spac.errors import printable

_WIDE = 10_000  # columns, to measure cells without a terminal


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


def print_table(console: Console, table: Table) -> None:
    """Prints ``table`` in as many tables, one below another, as the terminal needs; each has the first column."""
    for part in fitting(console, table):
        console.print(part)


def fitting(console: Console, table: Table) -> Iterator[Table]:
    """Yields ``table``, or its columns divided among tables that are as wide as the terminal at most.

    Text is wrapped at spaces; numbers (columns on the right) are not. A word that is wider than the terminal is folded.
    """
    rest, caption = list(table.columns), table.caption
    first, title = rest.pop(0), table.title
    while True:
        taken = [first]
        while rest and _least(console, table, [*taken, rest[0]]) <= console.width or (rest and len(taken) == 1):
            taken.append(rest.pop(0))
        part = _of(table, taken)
        part.title, part.caption, title = title, None if rest else caption, None
        _widen(console, part)
        yield part
        if not rest:
            return


def _of(table: Table, columns: Sequence[Column]) -> Table:
    part = copy(table)
    part.columns = [replace(column, _index=place) for place, column in enumerate(columns)]
    return part


def _least(console: Console, table: Table, columns: Sequence[Column]) -> int:
    """Returns the columns of a terminal that these need, with borders and padding."""
    part = _of(table, columns)
    for column, found in zip(part.columns, _ranges(console, part), strict=True):
        column.width = found.minimum
    return _measured(console, part)


def _widen(console: Console, part: Table) -> None:
    """Sets the widths: at least what each column needs, and of what is left what makes its cells fit in one line."""
    ranges = _ranges(console, part)
    widths = [found.minimum for found in ranges]
    for column, width in zip(part.columns, widths, strict=True):
        column.no_wrap, column.overflow, column.width = False, "fold", width
    left = console.width - _measured(console, part)
    if left < 0:  # wider than the terminal, together with the first column
        widest = widths.index(max(widths))
        widths[widest] = max(1, widths[widest] + left)
    while left > 0 and (lacks := [found.maximum - width for found, width in zip(ranges, widths, strict=True)]):
        if max(lacks) <= 0:
            break
        widths[lacks.index(max(lacks))] += 1
        left -= 1
    for column, width in zip(part.columns, widths, strict=True):
        column.width = width


def _ranges(console: Console, part: Table) -> list[Measurement]:
    """Returns the widths of each column's text: the least without cutting, and the one that wraps nothing."""
    options = console.options.update(width=_WIDE)
    found: list[Measurement] = []
    for column in part.columns:
        head, *cells = (Measurement.get(console, options, text) for text in (column.header, *column.cells))
        whole = column.no_wrap or column.justify == "right"
        texts = [
            head.maximum if column.no_wrap else head.minimum,
            column.min_width or 0,
            *(cell.maximum if whole else cell.minimum for cell in cells),
        ]
        least, most = max(texts), max([head.maximum, *texts, *(cell.maximum for cell in cells)])
        edge = int(part.collapse_padding and not found)  # rich counts the first column's padding as one too few
        found.append(Measurement(least + edge, most + edge))
    return found


def _measured(console: Console, part: Table) -> int:
    return Measurement.get(console, console.options.update(width=_WIDE), part).maximum


def print_text(console: Console, text: str) -> None:
    """Prints markup as it is: no number is coloured, and the terminal, not rich, breaks its lines."""
    console.print(text, highlight=False, soft_wrap=True)


def shown(text: object) -> str:
    """Escapes ``text`` for rich: markup and control characters are printed literally, not interpreted."""
    return escape(printable(text))


def examples(commands: str) -> str:
    """Returns the end of a command's help: ``commands``, one a line; an indented line continues the one before it."""
    return "[bold]Examples[/]" + commands.rstrip().replace("\n", "\n\n").replace("\n\n  ", "\n") + "\n"
