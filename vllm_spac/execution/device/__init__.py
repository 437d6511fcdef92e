"""Layers whose loads the GPU chooses (``decisions=device``): slots assigned in the layer, the rest read in place."""
