"""Balancers: which of a layer's missing experts are loaded into fast memory, and which run on the CPU."""
