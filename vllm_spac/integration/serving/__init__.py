"""HTTP routes, the live page, and what a worker process answers."""
