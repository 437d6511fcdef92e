"""The five papers' figures and tables, on the toy and the carved model."""
