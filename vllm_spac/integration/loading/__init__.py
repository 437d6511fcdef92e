"""A model is loaded: its experts are packed, its slots filled, its parts assembled."""
