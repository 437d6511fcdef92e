"""How the carved model and its drafters were fitted."""
