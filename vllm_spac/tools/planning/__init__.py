"""``vllm-spac plan``: how to serve a model on a machine, calculated."""
