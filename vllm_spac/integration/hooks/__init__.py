"""What the other folders need of vLLM: each wrapped name (``patches``), versions, graphs, ranks, the drafter."""
