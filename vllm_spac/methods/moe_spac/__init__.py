"""MoE-SpAc: utility of experts over drafts, and a threshold for reads ahead."""
