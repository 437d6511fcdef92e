"""``vllm-spac check --engines``: kernels, moving experts and engines beside plain sums and stock vLLM."""
