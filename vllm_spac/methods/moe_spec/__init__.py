"""MoE-Spec: a budget of experts per layer, ranked over all tokens of a verify step."""
