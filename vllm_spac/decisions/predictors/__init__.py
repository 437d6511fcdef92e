"""Which experts will be needed."""
