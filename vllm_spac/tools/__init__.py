"""Tools beside an engine: what they find is for people, and no engine needs them."""
