"""Recorded routing and timelines: shown, and replayed on a virtual clock by the decisions of serving."""
