"""Figures: what measures them, their results, and the pages that show both. Importable in a checkout, not installed."""
