"""What is of vLLM's V2 model runner only."""
