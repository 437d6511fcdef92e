"""Layers whose loads the host chooses, between router and kernel; ``slots_execution`` shows it."""
