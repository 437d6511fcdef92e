"""CUDA graphs: experts are loaded between captured pieces, so graphs are split at our op, or there are none.

A graph of a whole forward would repeat for ever what was decided while it was captured.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence

from vllm_spac.errors import UnsupportedError

logger = logging.getLogger("vllm.spac")

MOE_LAYER = "vllm::spac_moe_layer"  # registered in ``opaque``, whose import brings vLLM's MoE layers along
_USE_PIECEWISE = """use --compilation-config '{"cudagraph_mode": "PIECEWISE"}' or --enforce-eager"""


def request(engine_args) -> None:
    """Ask for piecewise graphs in an ``EngineArgs`` whose user left the mode to vLLM, which would take full ones too.

    Raises:
        UnsupportedError: the user asked for what needs full graphs.
    """
    from vllm.config import CUDAGraphMode
    from vllm.platforms import current_platform

    if current_platform.is_cpu() or engine_args.enforce_eager:
        return
    if (engine_args.speculative_config or {}).get("enable_adaptive_verification"):
        raise UnsupportedError(
            "spac: enable_adaptive_verification needs full CUDA graphs, in which no expert can be loaded; "
            "drop it from --speculative-config"
        )
    asked = engine_args.compilation_config.cudagraph_mode
    if asked is None:
        engine_args.compilation_config = copy.deepcopy(engine_args.compilation_config)
        engine_args.compilation_config.cudagraph_mode = CUDAGraphMode.PIECEWISE
    else:
        check(asked.name, breakable=False)


def split(vllm_config) -> None:
    """Split the graphs of a checked configuration at our op; vLLM's own ops to split at, or the user's, stay.

    Raises:
        UnsupportedError: as ``check``.
    """
    from vllm import envs
    from vllm.config import CUDAGraphMode

    compilation = vllm_config.compilation_config
    if compilation.cudagraph_mode == CUDAGraphMode.NONE:
        return
    check(compilation.cudagraph_mode.name, breakable=envs.VLLM_USE_BREAKABLE_CUDAGRAPH)
    compilation.splitting_ops = with_moe_layer(compilation.splitting_ops)
    logger.info("spac: CUDA graphs are PIECEWISE, split at the MoE layers: experts are loaded between the pieces")


def check(mode: str, breakable: bool) -> None:
    """Refuse graphs that would hold our op.

    Args:
        mode: name of vLLM's ``CUDAGraphMode``.
        breakable: whether graphs are split while they are captured (``VLLM_USE_BREAKABLE_CUDAGRAPH``), by vLLM's ops.

    Raises:
        UnsupportedError: says which flag helps.
    """
    if mode not in ("NONE", "PIECEWISE"):
        raise UnsupportedError(
            f"spac: cudagraph_mode {mode} captures the MoE layers, and no expert can be loaded in a captured graph; "
            f"{_USE_PIECEWISE}"
        )
    if breakable and mode != "NONE":
        raise UnsupportedError(
            "spac: VLLM_USE_BREAKABLE_CUDAGRAPH=1, which vLLM sets for some models, splits graphs at vLLM's own ops "
            "only; set VLLM_USE_BREAKABLE_CUDAGRAPH=0 or add --enforce-eager"
        )


def with_moe_layer(ops: Sequence[str] | None) -> list[str]:
    """The ops to split at, and ours among them, once."""
    return [*(op for op in ops or () if op != MOE_LAYER), MOE_LAYER]
