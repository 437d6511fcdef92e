"""Knobs that are gone, and what replaces them: nothing but the refusal of their names reads this."""

FORMER: dict[str, str] = {
    "budget_ranking": "write --spac-budget 16@ranking=NAME",
    "budget_coverage": "write --spac-budget 16@coverage=truncation",
    "budget_when": "write --spac-budget 16@when=decode, or --spac-speculate restricted@when=all",
    "budget_votes": "write --spac-budget 16@votes=path@alpha=0.5",
    "calibration": "write --spac-budget 16@ranking=static@calibration=FILE, or --spac-policy pinned@calibration=FILE",
    "predictor_file": "--spac-prefetch NAME@file=PATH names it",
    "execution": "--spac-decisions and --spac-kernel say what it said",
    "workers": "--spac-executor processes@workers=3 says how many",
    "cluster": "--spac-executor cluster@file=FILE uses its workers",
}
