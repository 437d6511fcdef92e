"""Fast memory: which expert is in which slot, and what is loaded when."""
