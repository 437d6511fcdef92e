"""Torch twins of the kernels, in a module of the same name and with the same signature: the CPU path, and what kernels
are compared with. They run without Triton.
"""
