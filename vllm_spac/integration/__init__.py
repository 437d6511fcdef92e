"""The one seam: every import of vLLM is in this package."""
