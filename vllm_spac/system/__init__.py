"""The machine, its files and threads."""
