"""Which experts a verify step may touch in a layer: MoE-Spec's rankings, and ours."""
