"""llama.cpp beside the plugin at equal memory."""
