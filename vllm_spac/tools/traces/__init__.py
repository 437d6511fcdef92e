"""Recorded routing: shown, and replayed on a virtual clock by the decisions of serving."""
