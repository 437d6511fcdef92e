"""Another plane for an engine whose driver pins too little host memory to read experts in place.

How much can be pinned is known once the driver refuses, when the layers are built. They are those of our kernels, which
``plane=table`` launches over slots, too. Layout and rounding stay; experts are copied, from pageable memory as well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_spac.config.config import SpacConfig
from vllm_spac.errors import PinError, printable
from vllm_spac.integration.hooks import graphs
from vllm_spac.integration.hooks.ranks import Ranks
from vllm_spac.system.host_memory import pin_remedy

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

logger = logging.getLogger("vllm.spac")

INSTEAD = "table"
_CHOSEN = "spac_chosen"  # key of vLLM's additional_config, beside the knobs: the plugin chose the plane
_WHY = "spac_plane"  # another: why it was changed


def prepare(engine_args: EngineArgs) -> None:
    """Lets an engine change the plane, which its user did not name."""
    engine_args.additional_config = {**engine_args.additional_config, _CHOSEN: "plane"}


def refused(pin: Callable[[], None], vllm_config: VllmConfig, ranks: Ranks) -> str:
    """Calls ``pin``; returns why it failed on any rank, or ``""``.

    Raises:
        PinError: it failed, and the user named the plane.
    """
    if vllm_config.additional_config.get(_CHOSEN) != "plane":
        pin()
        return ""
    problem = ""
    try:
        pin()
    except PinError as error:
        problem = error.problem.removeprefix("spac: ")
    return "" if ranks.least_of_all(not problem) else problem or "another rank cannot pin its part of host memory"


def change(vllm_config: VllmConfig, problem: str) -> SpacConfig:
    """Changes the plane in ``vllm_config``, and takes the layers out of its CUDA graphs; returns the knobs.

    ``problem``: why, as of ``refused``.
    """
    config, before = vllm_config.additional_config, vllm_config.additional_config["spac"]["plane"]
    reason = f"{problem}; {pin_remedy()}"
    config["spac"] = {**config["spac"], "plane": INSTEAD}  # in place: vLLM's copies of its configuration share it
    config[_WHY] = f"{INSTEAD} instead of {before}: {reason}"
    graphs.remove_layers(vllm_config)
    mode = getattr(vllm_config.compilation_config.cudagraph_mode, "name", "NONE")
    text = f"spac: plane={INSTEAD} instead of {before}, with CUDA graphs {mode}: {reason}"
    logger.warning("%s", printable(text))
    return SpacConfig.parse(config["spac"])


def facts(vllm_config: VllmConfig) -> dict[str, str]:
    """Why the plane was changed, for the statistics; nothing if it was not."""
    why = vllm_config.additional_config.get(_WHY)
    return {} if why is None else {"plane_change": why}
