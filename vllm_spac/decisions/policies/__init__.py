"""Which expert is evicted."""
