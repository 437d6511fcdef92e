"""Stores of the packed experts: disk, host memory, or the slots themselves."""
