"""Knobs: their types, and which go together."""
