"""Rankings: which experts of a layer a verify step may use; MoE-Spec's, and ours."""
