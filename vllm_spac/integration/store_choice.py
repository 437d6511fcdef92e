"""Where an engine on a GPU keeps experts if its user named no store: in host memory, or on a disk where that is short.

Counted by headers and free memory, as ``vllm-spac plan`` counts this machine. With a disk, host memory holds experts
without a slot, as many as it has room for. Where the GPU reads host memory in place there need be no disk, as long as
slots have room for the experts that host memory has none for: they have slots for good.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm_spac.cache.sizing import asked, settling
from vllm_spac.config.config import SpacConfig
from vllm_spac.config.types import SlotCount
from vllm_spac.errors import ConfigError
from vllm_spac.integration import whole_models
from vllm_spac.storage.checkpoint import quantisation
from vllm_spac.storage.checkpoint.quantisation import FormatKernels
from vllm_spac.system.host_memory import SYSTEM_RESERVE, available_host_bytes, gib

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.engine.arg_utils import EngineArgs

    from vllm_spac.integration.whole_models import Count
    from vllm_spac.storage.checkpoint.headers import Checkpoint

_LEAST = 1 << 28  # bytes of host memory that are worth a tier of their own


def choose(
    engine_args: EngineArgs, config: SpacConfig, model: ModelConfig, entry: Mapping | None, in_place: bool
) -> tuple[dict[str, object], str] | None:
    """Returns knobs of a store that has room, and why; None where the default has, or the user named a store.

    CPU experts leave no other unless the GPU reads ``in_place``: host memory that is short is then an error when it is
    reserved.

    Raises:
        ConfigError: host memory has no room for the model's n-gram tables.

    Args:
        entry: how the checkpoint's experts are quantised; None: not at all.
        in_place: the GPU will read host memory in place, where all experts without a slot are, or that are not only on
            the disk.
    """
    named = config.store is not None or config.host_memory is not None or config.has_workers
    bound = (config.cpu_experts != "off" and not in_place) or config.parsed_slots.share == 1
    if named or bound or config.store_on("cuda") != "host":
        return None
    if entry is None and model.quantization is not None:
        return None  # quantised while it is loaded, which is refused
    found = whole_models.count(engine_args, model)
    if config.parsed_slots == SlotCount() and found and found.fits:
        return None  # each expert gets a slot
    ours = entry is not None and quantisation.refusal(entry, FormatKernels.OURS) is None
    kernels = FormatKernels.OURS if ours else FormatKernels.GPU
    checkpoint = whole_models.sizes(str(engine_args.model), model.hf_config.to_dict(), kernels)
    if checkpoint is None:
        return None
    tables = whole_models.host_tables(engine_args, checkpoint)
    needed, available = sum(checkpoint.layer_bytes.values()), available_host_bytes() - tables
    if available < 0:
        raise ConfigError(
            f"spac: vLLM keeps {gib(tables)} of n-gram tables in host memory, of which {gib(available + tables)} are "
            "free; use a machine with more, or a checkpoint with smaller tables"
        )
    if needed <= (spare := max(0, available - SYSTEM_RESERVE)):
        return None
    if in_place and found and _settle(found, checkpoint, config.parsed_slots, spare, engine_args.tensor_parallel_size):
        return None
    if in_place and spare >= _LEAST:  # layers read what is on the disk through room for one of them
        spare = max(_LEAST, spare - max(checkpoint.layer_bytes.values()))
    elif config.plane == "pointers" or config.cpu_experts != "off":
        return None
    knobs: dict[str, object] = {"store": "disk"}
    tier = "no experts"
    if spare >= _LEAST:
        knobs["host_memory"] = spare >> 20 << 20
        tier = f"as many as {gib(spare)} hold"
    beside = f" beside {gib(tables)} of n-gram tables" if tables else ""
    return knobs, (
        f"store=disk: the experts take {gib(needed)}, and {gib(available)} of host memory are free{beside}, of which "
        f"{gib(SYSTEM_RESERVE)} are left to the system; host memory holds {tier} (--spac-host-memory)"
    )


def _settle(counted: Count, checkpoint: Checkpoint, slots: SlotCount, spare: int, ranks: int) -> bool:
    """Whether slots have room for the experts that ``spare`` bytes of host memory have none for."""
    experts = sum(checkpoint.layer_bytes.values())
    nbytes = experts // checkpoint.total
    room = counted.usable - counted.kv - counted.working - (counted.weights - experts // ranks)
    most = max(0, room) * ranks // nbytes
    wanted = asked(slots, len(checkpoint.layer_bytes), checkpoint.experts, checkpoint.top_k)
    count = most if wanted is None else min(most, wanted)
    return settling(checkpoint.total, nbytes, spare, count, checkpoint.experts) > 0
