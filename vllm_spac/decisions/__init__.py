"""Decisions without I/O: costs, comparisons, cutoffs; the file of trained predictors."""
