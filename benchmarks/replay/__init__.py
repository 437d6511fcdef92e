"""Recorded routing, and what follows from it."""
