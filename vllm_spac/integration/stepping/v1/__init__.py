"""What is of vLLM's V1 model runner only. It goes as a whole when no supported vLLM needs it."""
