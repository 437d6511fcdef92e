"""``vllm-spac tune``: a short list of ways to serve, each measured in turns with the default."""
