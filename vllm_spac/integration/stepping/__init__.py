"""Hooks of vLLM's model runners: steps, drafts and draft trees."""
