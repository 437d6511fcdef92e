"""Admissions: which missed experts get slots under ``execution=pointers``, and when."""

DEFAULT = "layer"
