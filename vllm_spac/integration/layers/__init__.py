"""vLLM's MoE layers: their routers, weights and kernels."""
