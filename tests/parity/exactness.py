"""When two runs must give the same greedy tokens, and the one place where tests compare them.

Stock vLLM's tokens may depend on the batch: if a kernel splits its work by the number of rows, the rounding of a row
depends on its neighbours, and a near-tie between the two best tokens is then decided by how steps are formed. On a CPU
with AMX this is what bfloat16 does; ``benchmarks/results/batches.md`` measured it. So there are two ways to compare:

- Both runs have the same steps: all requests are queued before the first one, and nothing time-dependent affects how
  many rows a step has. That excludes servers, and speculation with ``guard=on``. Any dtype will do.
- Otherwise in ``FLOAT32``: rounding there is 2**-16 of bfloat16's, so that a logit moves by some 1e-6, and the two best
  logits of the models here are farther apart (``gaps`` in the result of that script).
"""

from __future__ import annotations

from collections.abc import Sequence

FLOAT32 = {"dtype": "float32"}


def first_difference(ours: Sequence, theirs: Sequence) -> str | None:
    """Where two lists of answers (token ids or text) part; None where they are equal."""
    if len(ours) != len(theirs):
        return f"{len(ours)} answers beside {len(theirs)}"
    wrong = [number for number, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]]
    if not wrong:
        return None
    place = agreeing(ours[wrong[0]], theirs[wrong[0]])
    a, b = (answers[wrong[0]][place : place + 8] for answers in (ours, theirs))
    return f"answers {wrong} of {len(ours)} differ, number {wrong[0]} from {place} on: {a!r} instead of {b!r}"


def agreeing(ours: Sequence, theirs: Sequence) -> int:
    """Tokens before the first that differs."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(ours), len(theirs)))


def assert_same_tokens(run, stock, what: object = "") -> None:
    """``run`` gave the tokens of ``stock``; both are ``engines.Run``.

    Raises:
        ValueError: tokens of such runs may differ without any fault, so this comparison would be red by chance.
    """
    if run.dtype != stock.dtype:
        raise ValueError(f"{run.dtype} beside {stock.dtype}: nothing says that their tokens are equal")
    if run.dtype != "float32" and "guard" in run.stats:
        raise ValueError(f"guard=on forms steps by the clock, and {run.dtype} rounds by them: use FLOAT32 or guard=off")
    difference = first_difference(run.tokens, stock.tokens)
    assert difference is None, f"{what} {difference}"
