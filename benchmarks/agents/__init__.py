"""Several agents at once: what they ask, recorded; engines that answer it; and what sharing steps could gain."""
