"""Engines in processes of their own: beside stock vLLM, in turns, and on a GPU."""
