"""The ranks of one model: processes that each hold a part of every expert (tensor parallelism) or some of the experts.

Ranks meet in vLLM's collective operations, behind each layer. Slots, loads, waves and reads of ranks may differ,
because nothing collective happens within a layer. What decides the shape or the experts of a step must not differ: it
is decided from data that all ranks have, or is refused.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vllm_spac.errors import Remedy, SpacError, add, drop, use

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.spac")


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks of its model, which are all on this machine.

    Attributes:
        divide_experts: each rank holds some of the experts (expert parallelism), else a part of every expert.
    """

    rank: int = 0  # number of this process, from 0
    size: int = 1
    divide_experts: bool = False

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> Ranks:
        """Returns the ranks of a worker whose process groups exist."""
        parallel = vllm_config.parallel_config
        if parallel.tensor_parallel_size == 1:
            return cls()
        from vllm.distributed import get_tensor_model_parallel_rank

        size = parallel.tensor_parallel_size
        return cls(get_tensor_model_parallel_rank(), size, parallel.enable_expert_parallel)

    def least(self, value: int) -> int:
        """Returns the least ``value`` of all ranks, once all have given theirs."""
        if self.size == 1:
            return value
        from vllm.distributed.parallel_state import get_tp_group

        found = torch.tensor([value], dtype=torch.int64, device="cpu")
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MIN, group=get_tp_group().cpu_group)
        return int(found.item())

    def wait(self) -> None:
        """Waits until all ranks have called it."""
        self.least(0)

    def end_process(self, error: Exception) -> None:
        """Ends this process if vLLM would keep it after ``error`` in a step; called before the error is raised.

        vLLM's executor learns of errors of rank 0 alone. Another rank that fails would wait for the next step, and the
        others for it, in a collective operation that has no end. When its process ends, vLLM ends the engine.
        """
        if self.rank == 0:
            return
        unexpected = None if isinstance(error, SpacError) else error
        text = "%s (rank %d of %d); its process ends, and the engine with it"
        logger.critical(text, error, self.rank, self.size, exc_info=unexpected)
        logging.shutdown()
        os._exit(1)

    def describe(self) -> str:
        """Which rank the start-up line is about; empty if there is one."""
        if self.size == 1:
            return ""
        held = f"1/{self.size} of the experts" if self.divide_experts else f"1/{self.size} of every expert"
        return f", rank {self.rank} of {self.size} (each holds {held})"

    def facts(self) -> dict:
        """Labels of this rank's statistics; none if there is one rank."""
        if self.size == 1:
            return {}
        return {"rank": self.rank, "ranks": self.size, "divided": "experts" if self.divide_experts else "tensors"}


Refusal = tuple[bool, str, tuple[Remedy, ...]]  # whether it is so, what it is, what to do instead


def refusals(vllm_config: VllmConfig) -> Iterator[Refusal]:
    """Yields (whether it is in use, the option, what to do instead) for each kind of parallelism that cannot serve."""
    parallel = vllm_config.parallel_config
    ranks, experts_divided = parallel.tensor_parallel_size, parallel.enable_expert_parallel
    several = ranks > 1
    yield (
        parallel.pipeline_parallel_size > 1,
        "--pipeline-parallel-size above 1 (stages have other layers each, and would need slots, budgets and traces of "
        "their own)",
        (use(vllm_pipeline_parallel_size=1).but(", or --tensor-parallel-size"),),
    )
    divided = " with --tensor-parallel-size and --enable-expert-parallel" if experts_divided else ""
    yield (
        parallel.data_parallel_size > 1,
        "--data-parallel-size above 1 (vLLM divides experts among replicas too, and rows of other replicas reach a "
        "layer after its experts were loaded)",
        (use(vllm_data_parallel_size=1), Remedy(f"start one server per replica{divided}")),
    )
    for name in ("prefill", "decode"):
        above, one = getattr(parallel, f"{name}_context_parallel_size") > 1, {f"vllm_{name}_context_parallel_size": 1}
        yield above, f"--{name}-context-parallel-size above 1", (use(**one).but(", or --tensor-parallel-size"),)
    yield (
        several and parallel.nnodes > 1,
        "--nnodes above 1",
        (use(vllm_nnodes=1).but(": memory is divided among the ranks of one machine"),),
    )
    backend = parallel.distributed_executor_backend
    yield (
        several and backend != "mp",
        f"--tensor-parallel-size {ranks} with --distributed-executor-backend {backend} (it may not end the engine when "
        "one rank fails)",
        (use(vllm_distributed_executor_backend="mp"),),
    )
    if experts_divided:
        yield from _expert_refusals(vllm_config)


def _expert_refusals(vllm_config: VllmConfig) -> Iterator[Refusal]:
    model, ranks = vllm_config.model_config, vllm_config.parallel_config.tensor_parallel_size
    option = "--enable-expert-parallel"
    whole = drop("vllm_enable_expert_parallel").but(", and each rank holds a part of every expert")
    experts, top_k = model.get_num_experts(), model.get_num_experts_per_tok() or 1
    several = add(vllm_tensor_parallel_size=2)
    yield ranks == 1, f"{option} with one rank", (drop("vllm_enable_expert_parallel"), several)
    yield model.quantization is not None, f"{option} with quantised experts", (whole,)
    fits = use(vllm_tensor_parallel_size=math.gcd(experts, ranks))
    yield experts % ranks != 0, f"{option} with {experts} experts for {ranks} ranks", (whole, fits)
    yield (
        experts // ranks < top_k,
        f"{option} with {experts // ranks} experts per rank, fewer than the {top_k} of a token",
        (whole, Remedy("use a lower --tensor-parallel-size")),
    )
