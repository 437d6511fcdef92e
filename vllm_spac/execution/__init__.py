"""Runs the rows of a layer over its experts: the host decides (slots), or the device does (pointers)."""
