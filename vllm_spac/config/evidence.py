"""Where a value other than a knob's default wins: the column *wins in* of ``KNOBS.md``.

Of the results in ``benchmarks/results``, of toy models where nothing else is said. Knobs that are not here win in none.
"""

from __future__ import annotations

# Knob -> (the value that wins and by what, the file).
WINS: dict[str, tuple[str, str]] = {
    "store": ("host, on a CPU, over slots, host memory and disk", "paired_three_tiers_host_toy.json"),
    "host_memory": ("1380MiB, over none", "paired_three_tiers_disk_toy.json"),
    "policy": ("layer_lru, in hits, on the carved model without drafts, a quarter in slots", "real_policies.json"),
    "prefetch": ("shadow", "paired_shadow_local_large.json"),
    "guard": ("on@lookups=on, where the text repeats", "repeating_real.json"),
    "tree": ("4 and more, in tokens per step; in time none", "toy_trees.json"),
    "cpu_experts": (
        "waterfill, on a scaled machine; on an H100, with an older kernel, none ever paid",
        "scaled_rtx4090_toy_local.json",
    ),
    "executor": ("processes, with all experts in memory, over a disk", "paired_workers_toy.json"),
    "plane": ("pointers, on an H100, over slots; table, for formats that vLLM reads in no slots", "gpu_h100.json"),
    "budget": ("16 and 24 with when=decode, where all experts have slots, LOSSY", "resident_budgets_toy.json"),
    "speculate": ("restricted, in bytes, LOSSY", "toy_speculated.json"),
}
