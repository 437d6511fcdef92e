"""CUDA graphs: none where layers need the host, full ones of decode steps where none does, or what the user chose.

A full graph repeats in every replay what the host decided at capture. That would be wrong if experts are loaded between
layers, routing is recorded, or the host applies a budget within the forward. An execution that does not need the host
is controlled between steps only, and so is its budget; with a slot for each expert there is
nothing to decide.

Piecewise graphs have to be split at our op. Then torch.compile fuses up to the MoE layers instead of up to attention,
and rounds at other places: bfloat16 tokens are those of stock vLLM *split at its MoE layers*, not of stock as it
starts (both measured on an H100, to the token). So nothing is split unless the user asks for such graphs, and with the
defaults every rounding is stock's.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_spac.config import rules
from vllm_spac.config.config import SpacConfig
from vllm_spac.core import MoEShape
from vllm_spac.errors import Remedy, UnsupportedError, drop, use
from vllm_spac.execution.address_table import MANY_ROWS
from vllm_spac.integration.hooks.device import is_cpu

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

logger = logging.getLogger("vllm.spac")

MOE_LAYER = "vllm::spac_moe_layer"  # registered in ``layers.custom_ops``, which imports vLLM's MoE layers
_PIECEWISE = Remedy(
    """add --compilation-config '{"cudagraph_mode": "PIECEWISE"}' or --enforce-eager""",
    {"--compilation-config.cudagraph_mode": "PIECEWISE"},
)
_ROUNDING = "torch.compile then rounds at other places than without the plugin, which may turn near-ties"
_PIECES = f"""graphs between the layers: --compilation-config '{{"cudagraph_mode": "PIECEWISE"}}'; {_ROUNDING}"""


def needs_host(config: SpacConfig) -> tuple[str, tuple[Remedy, ...]] | None:
    """Why layers need the host and which flags avoid it, or None if they do not need it."""
    if config.has_workers:
        return "rows go to expert workers between layers", ()
    if config.execution_class.needs_host and config.parsed_slots.share != 1:
        return "experts are loaded between layers", (use(plane="pointers"), use(slots="100%"))
    if config.trace is not None:
        return "routing is recorded between layers", (rules.untraced(config),)
    if not config.execution_class.needs_host:
        return None
    if config.parsed_budget.bounds:
        return "a budget is applied between layers", (drop("budget"),)
    if config.control:
        return "a budget may be applied between layers", (rules.uncontrolled(config),)
    return None


def hold_budget(config: SpacConfig) -> bool:
    """Whether full graphs of this engine hold the launches of a budget that is in force or may be set later."""
    asked = config.control or config.parsed_budget.bounds or config.speculate != "off"
    return not config.execution_class.needs_host and asked and needs_host(config) is None


def request(engine_args: EngineArgs, config: SpacConfig) -> None:
    """Sets the mode of ``EngineArgs`` to one that needs no split if the user did not choose a mode.

    Raises:
        UnsupportedError: the user chose an option that needs full graphs.
    """
    from vllm.config import CUDAGraphMode

    if is_cpu() or engine_args.enforce_eager:
        return
    if (engine_args.speculative_config or {}).get("enable_adaptive_verification"):
        raise UnsupportedError(
            "spac: enable_adaptive_verification needs full CUDA graphs, and leaves it to the device which rows of a "
            "step count; drop it from --speculative-config"
        )
    asked = engine_args.compilation_config.cudagraph_mode
    if asked is not None:
        check_mode(asked.name, config, breakable=False)
        return
    found = needs_host(config)
    if found is None and config.execution_class.keeps_bits:
        return  # vLLM's own layers, in its own graphs
    engine_args.compilation_config = copy.deepcopy(engine_args.compilation_config)
    engine_args.compilation_config.cudagraph_mode = CUDAGraphMode.NONE if found else CUDAGraphMode.FULL_DECODE_ONLY
    if found:
        logger.info("spac: no CUDA graphs: %s; %s", found[0], _PIECES)


def add_splitting_op(vllm_config: VllmConfig, config: SpacConfig) -> None:
    """Adds our op to the splitting ops of a checked configuration; vLLM's own, or the user's, are kept.

    Only piecewise graphs are split: full ones contain the layers. If all experts have slots and vLLM's own kernels
    run, piecewise graphs may contain the layers too, unless ``PIECEWISE`` was requested.

    Raises:
        UnsupportedError: as ``check_mode``.
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
    check_mode(mode.name, config, breakable=envs.VLLM_USE_BREAKABLE_CUDAGRAPH)
    if CUDAGraphMode.PIECEWISE in (mode.decode_mode(), mode.mixed_mode()):
        compilation.splitting_ops = with_moe_layer(compilation.splitting_ops)
        logger.info(
            "spac: CUDA graphs are %s, split at the MoE layers: %s; %s",
            mode.name,
            (host or ("as requested", None))[0],
            _ROUNDING,
        )
    else:
        held = "the MoE layers and a budget" if hold_budget(config) else "the MoE layers"
        logger.info("spac: CUDA graphs are %s: they hold %s, which need no host", mode.name, held)


def check_mode(mode: str, config: SpacConfig, breakable: bool) -> None:
    """Refuses graphs that would contain our op while it needs the host.

    Args:
        breakable: whether vLLM's ops split graphs during capture (``VLLM_USE_BREAKABLE_CUDAGRAPH``).

    Raises:
        UnsupportedError: names the flag that helps.
    """
    if mode not in ("NONE", "PIECEWISE") and (found := needs_host(config)) is not None:
        reason, instead = found
        raise UnsupportedError.refused(
            f"spac: cudagraph_mode {mode} captures steps in one piece, and {reason}", *instead, _PIECEWISE
        )
    if breakable and "PIECEWISE" in mode:  # full graphs hold whatever runs in them, also then
        raise UnsupportedError(
            "spac: VLLM_USE_BREAKABLE_CUDAGRAPH=1, which vLLM sets for some models, splits graphs at vLLM's own ops "
            "only; set VLLM_USE_BREAKABLE_CUDAGRAPH=0 or add --enforce-eager"
        )


def check_long_prompts(vllm_config: VllmConfig, shape: MoEShape, ranks: int = 1) -> None:
    """Refuses full graphs of prompts that are long enough to borrow slots, which the host does layer by layer.

    Full graphs of decode steps may have as many rows: they read missing experts in place.

    Args:
        ranks: that divide the experts of a layer.

    Raises:
        UnsupportedError: names the flag that helps.
    """
    from vllm.config import CUDAGraphMode

    compilation = vllm_config.compilation_config
    captures_prompts = (compilation.cudagraph_mode or CUDAGraphMode.NONE).mixed_mode() == CUDAGraphMode.FULL
    many = -(-MANY_ROWS * ranks * shape.experts // shape.top_k)
    if captures_prompts and (compilation.max_cudagraph_capture_size or 0) >= many:
        raise UnsupportedError(
            f"spac: cudagraph_mode FULL captures prompts of up to {compilation.max_cudagraph_capture_size} rows, and "
            f"those of {many} and more borrow slots, which no graph can hold; use "
            """--compilation-config '{"cudagraph_mode": "FULL_AND_PIECEWISE"}'"""
        )


def most_rows(vllm_config: VllmConfig) -> int:
    """Maximum number of rows of a forward, including the padding for a graph."""
    captured = vllm_config.compilation_config.max_cudagraph_capture_size or 0
    return max(vllm_config.scheduler_config.max_num_batched_tokens, captured)


def with_moe_layer(ops: Sequence[str] | None) -> list[str]:
    """Returns the splitting ops ``ops`` with ours appended, once."""
    return [*(op for op in ops or () if op != MOE_LAYER), MOE_LAYER]
