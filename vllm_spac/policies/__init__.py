"""Eviction policies: which resident expert is evicted for a missing one."""
