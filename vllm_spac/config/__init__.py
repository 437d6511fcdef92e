"""Knobs: their types, which go together, and a tuned profile of them."""
