"""``vllm-spac``: the commands."""
