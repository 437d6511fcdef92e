"""Kernels that compute experts on the CPU, where they are stored."""
