"""``vllm-spac selftest``: kernels, moving experts and engines beside plain sums and stock vLLM, on this machine."""
