"""Nothing is cut from a table, whatever its cells and the width of the terminal are."""

from __future__ import annotations

from io import StringIO

from hypothesis import given
from hypothesis import strategies as st
from rich import box
from rich.console import Console
from rich.table import Table

from vllm_spac.cli.tables import compact, print_table

WORDS = st.text("abcdefgh0123456789.%-", min_size=1, max_size=12)
CELLS = st.lists(WORDS, min_size=1, max_size=4).map(" ".join)


def printed(table: Table, width: int) -> list[str]:
    console = Console(file=StringIO(), width=width, color_system=None)
    print_table(console, table)
    return console.file.getvalue().splitlines()


@st.composite
def tables(draw: st.DrawFn) -> tuple[Table, list[list[str]]]:
    """A table of numbered columns, and its texts: heads and rows."""
    count = draw(st.integers(1, 14))
    heads, *rows = (draw(st.lists(CELLS, min_size=count, max_size=count)) for _ in range(draw(st.integers(2, 4))))
    left = [head for head in heads if draw(st.booleans())]
    if draw(st.booleans()):
        return compact("a title", heads, rows, left=left, nothing=()), [heads, *rows]
    table = Table(title="a title", box=draw(st.sampled_from([box.SIMPLE, box.HEAVY_HEAD, None])))
    for head in heads:
        table.add_column(head, justify="left" if head in left else "right", no_wrap=draw(st.booleans()))
    for row in rows:
        table.add_row(*row)
    return table, [heads, *rows]


@given(tables(), st.integers(60, 120))
def test_every_word_is_there_and_no_line_is_too_wide(case: tuple[Table, list[list[str]]], width: int) -> None:
    table, texts = case
    lines = printed(table, width)
    assert max(map(len, lines)) <= width
    found = " ".join(lines).split()
    wanted = [word for row in texts for text in row for word in text.split()]
    assert "…" not in "".join(lines)
    for word in wanted:
        assert found.count(word) >= wanted.count(word), (word, lines)


def test_numbers_stay_in_one_line_and_later_tables_repeat_the_first_column() -> None:
    heads = ["slots", *(f"figure {number}" for number in range(12))]
    rows = [["96 (25%)", *["1,234.56 GiB"] * 12], ["192 (50%)", *["7.00 GiB"] * 12]]
    lines = printed(compact("sizes", heads, rows), 80)
    assert sum("96 (25%)" in line for line in lines) == sum("192 (50%)" in line for line in lines) == 3
    assert sum(line.count("1,234.56 GiB") for line in lines) == 12
    assert sum("sizes" in line for line in lines) == 1


def test_a_word_that_is_wider_than_the_terminal_is_folded() -> None:
    lines = printed(compact("", ["fingerprint", "bytes"], [["f" * 100, "1"]], left=["fingerprint"]), 40)
    assert max(map(len, lines)) <= 40 and sum(line.count("f") for line in lines) == 101
