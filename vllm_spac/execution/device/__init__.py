"""Layers whose loads the GPU chooses (``plane=pointers``): slots assigned in the layer, the rest read in place."""
