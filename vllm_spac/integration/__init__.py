"""vLLM: the entry points, the flags, and what is refused before a model is loaded."""
