"""A machine: what loads, experts and the host take on it (``profile``), and what is wrong with it (``doctor``)."""
