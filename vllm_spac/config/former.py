"""Knobs that are gone, and what replaces them: nothing but the refusal of their names reads this."""

FORMER: dict[str, str] = {
    "execution": "--spac-decisions and --spac-kernel say what it said",
    "workers": "--spac-executor processes@workers=3 says how many",
    "cluster": "--spac-executor cluster@file=FILE uses its workers",
}
