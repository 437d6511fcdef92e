"""The ranks of one model: processes that hold a part of every expert, some of the experts, or some of the layers.

Ranks of a layer meet in vLLM's collective operations behind it, and pipeline stages where one sends to the next. Slots,
loads, waves and reads of ranks may differ, because nothing collective happens within a layer. What decides the shape or
the experts of a step must not differ: it is decided from data that all ranks have, or is refused.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import select
import socket
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm_spac.errors import Remedy, SpacError, add, drop, use
from vllm_spac.integration.hooks import device
from vllm_spac.storage.checkpoint import quant_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.spac")

_CONNECTING = 300  # seconds
_ALIVE = (  # a machine that vanishes is noticed after 8 seconds
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks of its model.

    Attributes:
        divide_experts: each rank of a layer holds some of its experts (expert parallelism), else a part of each.
        stages: of the pipeline, with as many ranks each.
        part: of the model's layers, that this rank's stage has.
        nodes: machines, with as many ranks each, in the order of these.
        here: part of the model that the ranks of this machine have together.
    """

    rank: int = 0  # number of this process, from 0, stage by stage
    size: int = 1
    divide_experts: bool = False
    stages: int = 1
    part: float = 1.0
    nodes: int = 1
    here: float = 1.0

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> Ranks:
        """Returns the ranks of a worker whose process groups exist."""
        parallel, model = vllm_config.parallel_config, vllm_config.model_config
        beside, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        if beside == stages == 1:
            return cls()
        from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
        from vllm.distributed.utils import get_pp_indices

        stage, layers = get_pp_group().rank_in_group, model.get_total_num_hidden_layers()
        ends = (get_pp_indices(layers, number, stages) for number in range(stages))
        parts = [(end - start) / layers for start, end in ends]
        rank, size, nodes = stage * beside + get_tensor_model_parallel_rank(), stages * beside, parallel.nnodes
        first = rank - rank % (size // nodes)
        here = sum(parts[other // beside] / beside for other in range(first, first + size // nodes))
        return cls(rank, size, parallel.enable_expert_parallel, stages, parts[stage], nodes, here)

    @property
    def beside(self) -> int:
        """Ranks that have the same layers, this one included."""
        return self.size // self.stages

    @property
    def stage(self) -> int:
        return self.rank // self.beside

    @property
    def place(self) -> tuple[int, int]:
        """(number, count) of this rank among those of its machine."""
        count = self.size // self.nodes
        return self.rank % count, count

    @property
    def share(self) -> float:
        """What this rank may take of the memory that those of its machine have together."""
        return self.part / self.beside / self.here

    def least(self, value: int) -> int:
        """Returns the least ``value`` of the ranks that have the same layers, once all of these have given theirs."""
        return value if self.beside == 1 else self._least(value, "get_tp_group")

    def least_of_all(self, value: int) -> int:
        """Returns the least ``value`` of all ranks, once all have given theirs."""
        return value if self.size == 1 else self._least(value, "get_world_group")

    def _least(self, value: int, group: str) -> int:
        from vllm.distributed import parallel_state

        found, those = torch.tensor([value], dtype=torch.int64, device="cpu"), getattr(parallel_state, group)()
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MIN, group=those.cpu_group)
        return int(found.item())

    def wait(self) -> None:
        """Waits until all ranks have called it."""
        self.least_of_all(0)

    def share_word(self) -> Tensor:
        """Returns int32 [1] of memory that all ranks of this machine see, 0 at first, once all have called it."""
        if self.size == 1:
            return torch.zeros(1, dtype=torch.int32, device="cpu")
        from vllm.distributed import get_world_group

        with contextlib.ExitStack() as opened:
            path = None
            if self.rank == 0:
                file = opened.enter_context(tempfile.NamedTemporaryFile(prefix="spac-"))
                file.truncate(torch.int32.itemsize)
                path = file.name
            path = get_world_group().broadcast_object(path, src=0)
            word = torch.from_file(path, shared=True, size=1, dtype=torch.int32)
            self.wait()
        return word

    def watch(self, address: str) -> None:
        """Ends this process when one of another machine is gone; on one machine vLLM's executor does.

        A rank whose peer is gone may wait without end, for it or for vLLM's next step.

        Args:
            address: of the first rank's machine, to which the others connect.
        """
        if self.nodes == 1:
            return
        from vllm.distributed import get_world_group

        secret, place, links = secrets.token_bytes(16), ("", 0), []
        listener = socket.create_server((address, 0), backlog=self.size) if self.rank == 0 else None
        if listener is not None:
            place = listener.getsockname()[:2]
        place, secret = get_world_group().broadcast_object((place, secret), src=0)
        if listener is None:
            links.append(socket.create_connection(place, timeout=_CONNECTING))
            links[0].sendall(secret)
        else:
            listener.settimeout(_CONNECTING)
            while len(links) < self.size - 1:
                link, _ = listener.accept()
                link.settimeout(_CONNECTING)
                if link.recv(len(secret), socket.MSG_WAITALL) == secret:
                    links.append(link)
            listener.close()
        for link in links:
            link.settimeout(None)
            for level, option, value in _ALIVE:
                link.setsockopt(level, option, value)
        threading.Thread(target=self._end_with, args=(links,), name="spac-ranks", daemon=True).start()

    def _end_with(self, links: list[socket.socket]) -> None:
        select.select(links, [], [])  # nothing is ever sent: one has ended
        logger.critical("spac: a rank beside this one (rank %d of %d) is gone; its process ends", self.rank, self.size)
        logging.shutdown()
        os._exit(1)

    def end_process(self, error: Exception) -> None:
        """Ends this process if vLLM would keep it after ``error`` in a step; called before the error is raised.

        vLLM's executor learns of errors of the last stage's first rank alone. Another rank that fails would wait for
        the next step, and the others for it, in an operation that has no end. When its process ends, vLLM ends the
        engine.
        """
        if self.rank == self.size - self.beside:
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
        held = f"1/{self.beside} of the experts" if self.divide_experts else f"1/{self.beside} of every expert"
        each = f" (each holds {held})" if self.beside > 1 else ""
        stage = f", stage {self.stage} of {self.stages}" if self.stages > 1 else ""
        return stage + f", rank {self.rank} of {self.size}{each}" * (self.beside > 1)

    def facts(self) -> dict:
        """Labels of this rank's statistics; none if there is one rank."""
        if self.size == 1:
            return {}
        inner = "experts" if self.divide_experts else "tensors"
        divided = ["layers"] * (self.stages > 1) + [inner] * (self.beside > 1)
        stage = {"stage": self.stage} if self.stages > 1 else {}
        return {"rank": self.rank, "ranks": self.size, **stage, "divided": " and ".join(divided)}


Refusal = tuple[bool, str, tuple[Remedy, ...]]  # whether it is so, what it is, what to do instead


def several(vllm_config: VllmConfig) -> tuple[int, str, Remedy]:
    """Returns how many ranks serve the model, the flags that say so, and how to have one."""
    parallel = vllm_config.parallel_config
    sizes = {name: getattr(parallel, name) for name in ("pipeline_parallel_size", "tensor_parallel_size")}
    above = {name: size for name, size in sizes.items() if size > 1}
    flags = " ".join(f"--{name.replace('_', '-')} {size}" for name, size in above.items())
    return math.prod(sizes.values()), flags, use(**{f"vllm_{name}": 1 for name in above or sizes})


def refusals(vllm_config: VllmConfig) -> Iterator[Refusal]:
    """Yields (whether it is in use, the option, what to do instead) for each kind of parallelism that cannot serve."""
    parallel = vllm_config.parallel_config
    (ranks, flags, _), experts_divided = several(vllm_config), parallel.enable_expert_parallel
    if parallel.pipeline_parallel_size > 1:
        yield from _stage_refusals(vllm_config)
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
    backend = parallel.distributed_executor_backend
    yield (
        ranks > 1 and backend != "mp",
        f"{flags} with --distributed-executor-backend {backend} (it was not run: vLLM's CPU build refuses Ray)",
        (use(vllm_distributed_executor_backend="mp"),),
    )
    if experts_divided:
        yield from _expert_refusals(vllm_config)


def _stage_refusals(vllm_config: VllmConfig) -> Iterator[Refusal]:
    """What does not go with pipeline stages, of which the last one alone samples and drafts."""
    parallel = vllm_config.parallel_config
    option, one = f"--pipeline-parallel-size {parallel.pipeline_parallel_size}", use(vllm_pipeline_parallel_size=1)
    mode = getattr(vllm_config.compilation_config.mode, "name", "NONE")
    yield (
        device.is_cpu() and mode == "NONE" and not vllm_config.use_v2_model_runner,
        f"{option} with --enforce-eager on a CPU (stock vLLM fails at the first request)",
        (drop("vllm_enforce_eager"), one),
    )
    yield (
        vllm_config.speculative_config is not None,
        f"{option} with drafts (the last stage alone has the drafter, and stock vLLM fails in the others)",
        (drop("vllm_speculative_config"), one),
    )
    yield (
        parallel.enable_expert_parallel,
        f"{option} with --enable-expert-parallel (no engine has run it)",
        (drop("vllm_enable_expert_parallel"), one),
    )


def _expert_refusals(vllm_config: VllmConfig) -> Iterator[Refusal]:
    model, ranks = vllm_config.model_config, vllm_config.parallel_config.tensor_parallel_size
    option = "--enable-expert-parallel"
    whole = drop("vllm_enable_expert_parallel").but(", and each rank holds a part of every expert")
    experts, top_k = model.get_num_experts(), model.get_num_experts_per_tok() or 1
    several = add(vllm_tensor_parallel_size=2)
    yield ranks == 1, f"{option} with one rank", (drop("vllm_enable_expert_parallel"), several)
    entry = quant_config.of(model.hf_config.to_dict())
    yield (
        model.quantization == "moe_wna16" and entry is not None and quant_config.has_zero_points(entry),
        f"{option} with zero points and --quantization moe_wna16 (vLLM's loader has them of the first rank's experts)",
        (whole, use(plane="table", vllm_quantization=None)),
    )
    fits = use(vllm_tensor_parallel_size=math.gcd(experts, ranks))
    yield experts % ranks != 0, f"{option} with {experts} experts for {ranks} ranks", (whole, fits)
    yield (
        experts // ranks < top_k,
        f"{option} with {experts // ranks} experts per rank, fewer than the {top_k} of a token",
        (whole, Remedy("use a lower --tensor-parallel-size")),
    )
