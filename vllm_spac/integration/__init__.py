"""The interface to vLLM: the only package that imports it."""
