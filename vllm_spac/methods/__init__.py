"""The five papers, and draft trees: a folder each. The serving core knows none of them."""
