"""How a worker is tested before it is asked: a row of its experts, computed on both sides, and what it takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm_spac.cpu_kernels.base import Kernel
from vllm_spac.errors import ConfigError, SpacError
from vllm_spac.methods.od_moe.division import ProcessorRates
from vllm_spac.methods.od_moe.roster import name
from vllm_spac.methods.od_moe.service import Service
from vllm_spac.methods.od_moe.wire import FrameKind, Header, Limits, decode, encode, raw, run_payload
from vllm_spac.methods.od_moe.worker_link import WorkerLink
from vllm_spac.storage.base import allocate
from vllm_spac.system.timing import median

_ANSWER = 60.0  # seconds to wait for one
_MEASURED = 0.005  # seconds


class Sample(NamedTuple):
    """A row of a layer, with as many of its experts as a token uses, and its output.

    Attributes:
        layer: number of the layer.
        x: [1, hidden].
        weights: float32 [1, top_k].
        ids: int32 [1, top_k].
        out: [1, hidden] like ``x``.
    """

    layer: int
    x: Tensor
    weights: Tensor
    ids: Tensor
    out: Tensor


def sample(link: WorkerLink, service: Service, worker: int, kernel: Kernel, dtype: torch.dtype) -> Sample:
    """Computes a row here, with experts that the worker gives: they and its kernel are tested by it.

    Args:
        link: to the worker.
        service: what it serves.
        worker: its number, which seeds the row.
        kernel: of this process.
        dtype: of the row.
    """
    top_k, layer, shape = service.top_k, service.mine[0], service.shape
    experts = allocate(shape.tensors, top_k, "cpu")
    for expert in range(top_k):
        frame = link.ask(FrameKind.FETCH, _ANSWER, layer=shape.key(layer, expert))
        for tensor_name, tensor in frame.expert(shape).items():
            experts[tensor_name][expert].copy_(tensor)
    # vLLM loads models with their dtype as torch's default, and its kernel takes routing weights in float32 only.
    random = torch.Generator().manual_seed(worker)
    x = torch.randn(1, service.hidden, generator=random, dtype=torch.float32).to(dtype)
    ids = torch.arange(top_k, dtype=torch.int32)[None]
    weights = torch.full((1, top_k), 1 / top_k, dtype=torch.float32)
    return Sample(layer, x, weights, ids, kernel(x, weights, ids, experts).to(x.dtype))


def check(link: WorkerLink, worker: int, given: Sample, fingerprint: bytes) -> np.ndarray:
    """Returns which experts have a slot at the worker afterwards, as ``Frame.resident``.

    Raises:
        ConfigError: the worker's output for its sample has other bits than this process's.
    """
    sizes = {"rows": 1, "hidden": given.x.shape[1], "top_k": given.ids.shape[1], "dtype": given.x.dtype}
    payload = run_payload(given.x, given.weights, given.ids)
    frame = link.ask(FrameKind.RUN, _ANSWER, payload, layer=given.layer, fingerprint=fingerprint, **sizes)
    if frame.header.kind != FrameKind.ROWS or not torch.equal(frame.rows(), given.out):
        raise ConfigError(
            f"spac: {name(worker)} at {link.address} computes other bits than this process for the same experts; "
            "use machines with the same processors, and the same vLLM"
        )
    return frame.resident()


def rates(worker: int, ready: Mapping[str, Any], message: float) -> ProcessorRates:
    """Returns what a worker measured when its slots were filled; ``SpacError`` if it is no measurement."""
    found = ready.get("rates")
    values: list[Any] = [found.get(each) for each in ("expert", "row", "load")] if isinstance(found, dict) else [None]
    if not all(type(value) is float and 0 <= value < math.inf for value in values):
        raise SpacError(f"spac: {name(worker)} does not say how fast it is")
    expert, row, load = map(float, values)
    return ProcessorRates(expert, row, load, message)


def message_seconds(service: Service, dtype: torch.dtype) -> float:
    """Measures the seconds that this process takes to write a request with one row and to read its answer."""
    hidden, top_k, limits = service.hidden, service.top_k, Limits()
    x, weights = torch.zeros(1, hidden, dtype=dtype), torch.zeros(1, top_k)

    def both() -> None:
        encode(Header(FrameKind.RUN, rows=1, hidden=hidden, top_k=top_k, dtype=dtype), run_payload(x, weights, weights))
        decode(encode(Header(FrameKind.ROWS, rows=1, hidden=hidden, dtype=dtype), raw(x)), limits).rows()

    return median(both, _MEASURED)
