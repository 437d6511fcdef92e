"""Which missing experts are loaded, and which the CPU computes."""
