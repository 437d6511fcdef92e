"""Checkpoints and folders of packed experts: read, checked, repacked."""
