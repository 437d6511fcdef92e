"""The carved model: how it is built, and its texts."""
