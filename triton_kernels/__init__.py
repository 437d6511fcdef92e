"""Kernels of vllm_spac and their torch twins, imported as ``vllm_spac.kernels`` and under no other name.

vLLM prefers any importable top-level module called ``triton_kernels`` to its vendored library of that name, and
every MoE model makes it look: if this folder could be imported under its own name, MXFP4 models would break and
all others would log errors. ``setup.py`` maps the folder to ``vllm_spac.kernels``; the checkout itself must not
get onto ``sys.path``, which is why pytest runs with ``--import-mode=importlib``.
"""
