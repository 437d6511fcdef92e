"""Executors: compute experts on the CPU, from the store's memory, without loading them into fast memory."""
