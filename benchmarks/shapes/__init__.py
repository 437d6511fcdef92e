"""Models of published shapes, with random weights and a stream of choices in place of routing: nothing to download."""
