"""CUDA graphs: of whole steps where no layer needs the host, else split at our op, or none.

A graph of a whole forward repeats for ever what the host decided while it was captured. Where experts are loaded
between layers, routing is recorded, or the host applies a budget, that would be wrong. Where an execution does not need
the host, the host decides between steps alone, also of a budget whose ranking can be replayed; with a slot for each
expert it decides nothing.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_spac import components
from vllm_spac.config import SpacConfig
from vllm_spac.core import MoEShape
from vllm_spac.errors import UnsupportedError
from vllm_spac.execution.pointers.staging import ROWS

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

logger = logging.getLogger("vllm.spac")

MOE_LAYER = "vllm::spac_moe_layer"  # registered in ``opaque``, whose import brings vLLM's MoE layers along
_PIECEWISE = """--compilation-config '{"cudagraph_mode": "PIECEWISE"}' or --enforce-eager"""


def needs_host(config: SpacConfig) -> tuple[str, str] | None:
    """(what the host does in a layer, the flag without which it does nothing there), or None."""
    if config.execution_class.needs_host and config.parsed_slots.share != 1:
        return "experts are loaded between the pieces", "use --spac-execution pointers or --spac-slots 100%"
    if config.trace is not None:
        return "routing is recorded between the pieces", "drop --spac-trace"
    if not config.execution_class.needs_host and components.find("budget.rankings", config.budget_ranking).replayable:
        return None
    for name in ("budget", "budget_mass", "budget_file"):
        if getattr(config, name) is not None:
            return "a budget is applied between the pieces", f"drop --spac-{name.replace('_', '-')}"
    if config.control:
        return "a budget may be applied between the pieces", "drop --spac-control"
    return None


def hold_budget(config: SpacConfig) -> bool:
    """Whether full graphs of this engine hold the launches of a budget: one that is in force or may be set later."""
    budgets = config.budget, config.budget_mass, config.budget_file
    asked = config.control or any(budget is not None for budget in budgets)
    return not config.execution_class.needs_host and asked and needs_host(config) is None


def request(engine_args: EngineArgs, config: SpacConfig) -> None:
    """Ask for piecewise graphs in an ``EngineArgs`` whose user left the mode to vLLM, if full ones cannot be.

    Raises:
        UnsupportedError: the user asked for what needs full graphs.
    """
    from vllm.config import CUDAGraphMode
    from vllm.platforms import current_platform

    if current_platform.is_cpu() or engine_args.enforce_eager:
        return
    if (engine_args.speculative_config or {}).get("enable_adaptive_verification"):
        raise UnsupportedError(
            "spac: enable_adaptive_verification needs full CUDA graphs, and leaves it to the device which rows of a "
            "step count; drop it from --speculative-config"
        )
    asked = engine_args.compilation_config.cudagraph_mode
    if asked is not None:
        check(asked.name, config, breakable=False)
    elif needs_host(config):
        engine_args.compilation_config = copy.deepcopy(engine_args.compilation_config)
        engine_args.compilation_config.cudagraph_mode = CUDAGraphMode.PIECEWISE


def split(vllm_config: VllmConfig, config: SpacConfig) -> None:
    """Split the pieces of a checked configuration at our op too; vLLM's own ops to split at, or the user's, stay.

    Graphs of vLLM's own kernels over experts that all have a slot may hold them: these are left as they are, unless
    ``PIECEWISE`` was asked for.

    Raises:
        UnsupportedError: as ``check``.
    """
    from vllm import envs
    from vllm.config import CUDAGraphMode

    compilation = vllm_config.compilation_config
    mode = compilation.cudagraph_mode
    if mode == CUDAGraphMode.NONE:
        return
    host = needs_host(config)
    if host is None and config.execution_class.keeps_bits and mode != CUDAGraphMode.PIECEWISE:
        logger.info("spac: CUDA graphs are %s, as without the plugin; hits in them are not counted", mode.name)
        return
    check(mode.name, config, breakable=envs.VLLM_USE_BREAKABLE_CUDAGRAPH)
    compilation.splitting_ops = with_moe_layer(compilation.splitting_ops)
    if mode == CUDAGraphMode.PIECEWISE:
        reason, _ = host or ("as was asked for", None)
        logger.info("spac: CUDA graphs are PIECEWISE, split at the MoE layers: %s", reason)
    else:
        held = "the MoE layers and a budget" if hold_budget(config) else "the MoE layers"
        logger.info("spac: CUDA graphs are %s: the full ones hold %s, which need no host", mode.name, held)


def check(mode: str, config: SpacConfig, breakable: bool) -> None:
    """Refuse graphs that would hold our op while it needs the host.

    Args:
        mode: name of vLLM's ``CUDAGraphMode``.
        breakable: whether graphs are split while they are captured (``VLLM_USE_BREAKABLE_CUDAGRAPH``), by vLLM's ops.

    Raises:
        UnsupportedError: says which flag helps.
    """
    if mode not in ("NONE", "PIECEWISE") and (found := needs_host(config)) is not None:
        reason, instead = found
        raise UnsupportedError(
            f"spac: cudagraph_mode {mode} captures steps in one piece, and {reason}; {instead}, or add {_PIECEWISE}"
        )
    if breakable and mode != "NONE":
        raise UnsupportedError(
            "spac: VLLM_USE_BREAKABLE_CUDAGRAPH=1, which vLLM sets for some models, splits graphs at vLLM's own ops "
            "only; set VLLM_USE_BREAKABLE_CUDAGRAPH=0 or add --enforce-eager"
        )


def check_staging(vllm_config: VllmConfig, shape: MoEShape) -> None:
    """Refuse full graphs of prompts so long that they are to be staged, which the host does layer by layer.

    Full graphs of decode steps may be as wide: they read missing experts in place.

    Raises:
        UnsupportedError: says which flag helps.
    """
    from vllm.config import CUDAGraphMode

    compilation = vllm_config.compilation_config
    captures_prompts = (compilation.cudagraph_mode or CUDAGraphMode.NONE).mixed_mode() == CUDAGraphMode.FULL
    staged_from = -(-ROWS * shape.experts // shape.top_k)
    if captures_prompts and (compilation.max_cudagraph_capture_size or 0) >= staged_from:
        raise UnsupportedError(
            f"spac: cudagraph_mode FULL captures prompts of up to {compilation.max_cudagraph_capture_size} rows, and "
            f"those of {staged_from} and more are staged, which no graph can hold; use --spac-staging off, or "
            """--compilation-config '{"cudagraph_mode": "FULL_AND_PIECEWISE"}'"""
        )


def most_rows(vllm_config: VllmConfig) -> int:
    """Rows of the largest forward, padded for a graph or not."""
    captured = vllm_config.compilation_config.max_cudagraph_capture_size or 0
    return max(vllm_config.scheduler_config.max_num_batched_tokens, captured)


def with_moe_layer(ops: Sequence[str] | None) -> list[str]:
    """The ops to split at, and ours among them, once."""
    return [*(op for op in ops or () if op != MOE_LAYER), MOE_LAYER]
