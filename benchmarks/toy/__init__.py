"""The toy models: their weights, texts, copies and drafters."""
