"""Speculating Experts: predictors that look one layer ahead, and execution by prediction."""
