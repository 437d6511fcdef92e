"""Knobs and commands that are gone, and what replaces them: nothing but the refusal of their names reads this."""

FORMER: dict[str, str] = {
    "budget_ranking": "write --spac-budget 16@ranking=NAME",
    "budget_coverage": "write --spac-budget 16@coverage=truncation",
    "budget_when": "write --spac-budget 16@when=decode, or --spac-speculate restricted@when=all",
    "budget_votes": "write --spac-budget 16@votes=path@alpha=0.5",
    "calibration": "leave it out: no ranking and no policy goes by one",
    "predictor_file": "--spac-prefetch NAME@file=PATH names it",
    "execution": "use --spac-plane, with the same names",
    "decisions": "write --spac-plane pointers for device, and slots or table for host",
    "kernel": "write --spac-plane slots for vllm, and table or pointers for table",
    "staging": "leave it out: with --spac-plane pointers long prompts borrow slots, and no memory is reserved for them",
    "tree_shape": "write --spac-tree 16@depth=6@width=8",
    "workers": "--spac-executor processes@workers=3 says how many",
    "cluster": "--spac-executor cluster@file=FILE uses its workers",
    "trace": "use --spac-record trace=FILE",
    "timeline": "use --spac-record timeline=FILE",
    "page": "use --spac-http page",
    "control": "use --spac-http control",
}

FORMER_COMMANDS: dict[str, str] = {
    "doctor": "use vllm-spac check",
    "inspect": "use vllm-spac check MODEL",
    "selftest": "use vllm-spac check --engines",
    "profile": "use vllm-spac check --measure",
    "simulate": "use vllm-spac trace simulate",
    "trace timeline": "open the file in https://ui.perfetto.dev",
    "quality calibrate": "no ranking and no policy goes by a calibration",
    "quality budgets": "use one number for all layers, or a share, which bounds each layer by itself",
    "quality MODEL": "use vllm-spac quality sweep MODEL",
    "train-predictor": "use vllm-spac predictors train",
    "predictors MODEL": "use vllm-spac predictors measure MODEL",
}
