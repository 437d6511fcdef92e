"""Which of a layer's experts run where they lie, which are fetched first, and which run on the CPU."""
