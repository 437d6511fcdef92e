"""EAGLE draft trees, without vLLM."""
