"""SP-MoE: experts are read while the drafter drafts."""
