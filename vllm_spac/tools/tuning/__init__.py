"""``vllm-spac tune``: which configurations are measured next, in which engines, and what is kept."""
