"""A machine: what is wrong with it, and what loads, experts and the host take on it (``vllm-spac check``)."""
