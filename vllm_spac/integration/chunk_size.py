"""How many rows of prompts a step computes on a GPU, where the user named none: as many as the link's time covers.

Each chunk of a prompt reads nearly every expert without a slot: in chunks of vLLM's 2,048 tokens, a prompt of 8,192
would read them four times.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING

from vllm_spac.cache.sizing import MoEWidths
from vllm_spac.config.config import SpacConfig
from vllm_spac.decisions import costs, prompt_chunks
from vllm_spac.decisions.costs import PROFILE, Costs
from vllm_spac.errors import ConfigError, printable
from vllm_spac.integration.hooks import device
from vllm_spac.integration.loading.fast_memory import widths
from vllm_spac.storage.checkpoint import quant_config, quantisation
from vllm_spac.storage.checkpoint.headers import INNER, first_number
from vllm_spac.storage.checkpoint.quantisation import FormatKernels

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    from vllm_spac.integration.hooks.device import DeviceFacts

logger = logging.getLogger("vllm.spac")


def choose(engine_args: EngineArgs, config: SpacConfig, usage: UsageContext | None) -> Iterator[str]:
    """Sets ``--max-num-batched-tokens`` on a GPU whose user did not, if that is more than vLLM's own; yields why.

    Args:
        usage: how vLLM is used, on which its own default depends.
    """
    if usage is None or engine_args.max_num_batched_tokens is not None or config.parsed_slots.share == 1:
        return
    facts, memory = device.query(), device.total_memory()
    if facts is None or memory is None:
        return
    ranks = engine_args.tensor_parallel_size
    usual, requests = (found.get(usage, 0) for found in engine_args.get_batch_defaults(ranks))
    model = engine_args.create_model_config()
    longest = (engine_args.max_model_len or model.max_model_len) * (engine_args.max_num_seqs or requests)
    known, origin = _costs(config, facts)
    usable = int(engine_args.gpu_memory_utilization * memory)
    stages = engine_args.pipeline_parallel_size
    rows = min(_rows(model, ranks, stages, config, known, usable, memory), longest)
    if rows > usual:
        engine_args.max_num_batched_tokens = rows
        yield (
            f"--max-num-batched-tokens {rows}: each chunk of a prompt reads the missing experts, and has as many rows "
            f"as are computed meanwhile, or fit into memory ({origin})"
        )


def _rows(
    model: ModelConfig, ranks: int, stages: int, config: SpacConfig, known: Costs, usable: int, memory: int
) -> int:
    facts, experts = model.hf_config.to_dict(), model.get_num_experts()
    moe = MoEWidths(model.get_num_experts_per_tok(), model.get_hidden_size(), first_number(facts, INNER))
    found = widths(model, SimpleNamespace(tensor_parallel_size=ranks), [moe])
    each = experts * _expert_bytes(moe, config, model, quant_config.of(facts)) // ranks
    total = each * model.get_total_num_hidden_layers() // stages
    share = config.parsed_slots.share
    return prompt_chunks.rows(
        known,
        missing=prompt_chunks.missing(total, usable) if share is None else 1 - float(share),
        layer_bytes=each,
        layer_values=found.multiplied // ranks,
        row_bytes=found.row,
        memory=memory,
    )


def _expert_bytes(moe: MoEWidths, config: SpacConfig, model: ModelConfig, entry: object) -> int:
    shapes = (2 * moe.inner, moe.hidden), (moe.hidden, moe.inner)
    kernels = FormatKernels.OURS if config.execution_class.repacks else FormatKernels.GPU
    if not isinstance(entry, dict) or quantisation.refusal(entry, kernels) is not None:
        return sum(model.dtype.itemsize * rows * columns for rows, columns in shapes)
    return sum(quantisation.stored_bytes(entry, shape, kernels) for shape in shapes)


def _costs(config: SpacConfig, facts: DeviceFacts) -> tuple[Costs, str]:
    """Returns the costs of this machine, and where they are from: measured here, else a data sheet."""
    path = config.folder / PROFILE
    if path.exists():
        try:
            return Costs.read(path, here=True, disk_dir=config.folder), f"by the rates in {path}"
        except ConfigError as error:
            logger.warning("%s", printable(f"spac: {error}; chunks of prompts are sized by a data sheet"))
    found = costs.of_gpu(facts.name, facts.capability)
    return found.as_attained(), f"by the data sheet of {found.name}; vllm-spac check --measure measures this machine"
