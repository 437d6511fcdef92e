"""MoE-SpAc: utility of experts over drafts, and a threshold between loads and CPU."""
