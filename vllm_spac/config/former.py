"""Knobs that are gone, and what replaces them: nothing but the refusal of their names reads this."""

FORMER: dict[str, str] = {
    "predictor_file": "--spac-prefetch NAME@file=PATH names it",
    "execution": "--spac-decisions and --spac-kernel say what it said",
}
