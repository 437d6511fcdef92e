"""Full CUDA graphs of vLLM's V2 runner, emulated on a CPU: ``install`` before an engine is made.

vLLM captures and replays them by its own code, of the target and of the drafter, after the warm-up of a GPU's worker. A
capture keeps each operation and each kernel launch with its memory, and a replay runs these on it, and no Python of the
model (``replay.Graph``). Attention is vLLM's TRITON_ATTN, with its two kernels in PyTorch, which read when they are
replayed. Triton's interpreter runs the others.

Nothing here is about time, streams or pinned memory.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

sys.path.insert(0, str(Path(__file__).parents[1] / "properties"))
import replay

MODE = "FULL_DECODE_ONLY"
SIZES = [1, 2, 4, 8, 20, 68]  # three requests with trees of 16 are padded to four


class CudaGraph(replay.Graph):
    """In place of ``torch.cuda.CUDAGraph``; Triton's launches and ``kernel`` s are kept as they are.

    Attributes:
        current: that is being captured.
        captures, replays: of all, since ``install``.
    """

    current: CudaGraph | None = None
    captures = replays = 0

    def replay(self) -> None:
        CudaGraph.replays += 1
        super().replay()

    def launch(self, run: Callable[[], Any]) -> Any:
        """Runs a launch as a whole, and keeps it; what it returns is written again in place."""
        with _disable_current_modes():
            result = run()
        made = replay._tensors(result)
        self._made += made

        def again() -> None:
            for old, new in zip(made, replay._tensors(run()), strict=True):
                if old is not new:
                    old.copy_(new)

        self._launches.append(again)
        return result


@contextlib.contextmanager
def captured(graph: CudaGraph, *args: Any, **kwargs: Any) -> Iterator[None]:
    """In place of ``torch.cuda.graph``."""
    assert CudaGraph.current is None
    CudaGraph.current = graph
    CudaGraph.captures += 1
    try:
        with graph:
            yield
    finally:
        CudaGraph.current = None


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` stands for one kernel: what it reads, it reads on the device."""

    @functools.wraps(function)
    def launched(*args: Any, **kwargs: Any) -> Any:
        graph = CudaGraph.current
        run = functools.partial(function, *args, **kwargs)
        return run() if graph is None else graph.launch(run)

    return launched


def install() -> None:
    """Has each engine of this process capture and replay full graphs of decode steps, where it asks for them."""
    _torch()
    _triton()
    _platform()
    _worker()
    _plugin()


def options(**more: Any) -> dict[str, Any]:
    """What an engine is made with that has full graphs."""
    graphs = {"cudagraph_mode": MODE, "cudagraph_capture_sizes": SIZES, "mode": 0}
    return {"enforce_eager": False, "compilation_config": graphs, "attention_backend": "TRITON_ATTN"} | more


def _torch() -> None:
    torch.cuda.CUDAGraph, torch.cuda.graph = CudaGraph, captured
    torch.cuda.is_current_stream_capturing = lambda: CudaGraph.current is not None


def _triton() -> None:
    from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

    InterpretedFunction.run = kernel(InterpretedFunction.run)
    store = InterpreterBuilder.create_masked_store

    def stored(self: Any, pointers: Any, value: Any, mask: Any, *options: Any) -> Any:
        mask.data = mask.data.astype(bool)  # as ``v2_on_cpu`` has it of loads
        return store(self, pointers, value, mask, *options)

    InterpreterBuilder.create_masked_store = stored


def _platform() -> None:
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    @classmethod
    def checked(cls: type, vllm_config: Any) -> None:
        compilation = vllm_config.compilation_config
        sizes = compilation.cudagraph_capture_sizes
        check(vllm_config)
        compilation.cudagraph_capture_sizes = sizes

    CpuPlatform.check_and_update_config = checked
    CpuPlatform.support_static_graph_mode = classmethod(lambda cls: True)
    CpuPlatform.get_attn_backend_cls = classmethod(
        lambda cls, *args, **kwargs: "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend"
    )
    CpuPlatform.opaque_attention_op = classmethod(lambda cls: False)  # its Python would run in replays
    CpuPlatform.graph_pool_handle = classmethod(lambda cls: (0, 1))


def _worker() -> None:
    from vllm.v1.attention.backends import triton_attn
    from vllm.v1.worker import cpu_worker, gpu_worker  # the first has torch.cuda answer on a CPU
    from vllm.v1.worker.gpu import cudagraph_utils, model_runner

    triton_attn.unified_attention = kernel(_attend)
    triton_attn.triton_reshape_and_cache_flash = kernel(_write)
    cudagraph_utils.graph_capture = lambda device: contextlib.nullcontext()
    cudagraph_utils.capture_pool = lambda pool, config: contextlib.nullcontext()
    cudagraph_utils.current_stream = lambda: None
    gpu_worker.kernel_warmup = lambda worker: None
    gpu_worker.freeze_gc_heap = model_runner.lock_workspace = lambda: None
    gpu_worker.Worker._maybe_activate_jit_monitor = lambda self: None
    if "compile_or_warm_up_model" in vars(cpu_worker.CPUWorker):  # a GPU's worker warms up, then captures
        del cpu_worker.CPUWorker.compile_or_warm_up_model


def _plugin() -> None:
    from vllm_spac import runtime
    from vllm_spac.execution import rerouting
    from vllm_spac.execution.device import cpu_share, pointers_execution
    from vllm_spac.execution.exchange import CallerStream
    from vllm_spac.methods.trees.growth import Growth

    Growth._least = property(lambda self: None)  # as on a GPU
    capturing = lambda tensor: CudaGraph.current is not None  # noqa: E731
    runtime.capturing = rerouting.capturing = pointers_execution.capturing = capturing
    kernels_for = pointers_execution.kernels_for

    def kernels(device: torch.device) -> Any:
        found = kernels_for(device)
        launches = "grouped_gemm", "admit", "wait_for_experts", "read_early"
        return found._replace(**{name: kernel(getattr(found, name)) for name in launches})

    pointers_execution.kernels_for = kernels
    mail_kernels_for = cpu_share.mail_kernels_for
    cpu_share.mail_kernels_for = lambda device: cpu_share.MailKernels(*map(kernel, mail_kernels_for(device)))
    pointers_execution.streams = lambda device: (CallerStream(), CallerStream())  # a capture sees its own thread


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    softmax_scale: float,
    block_table: torch.Tensor,
    **others: Any,
) -> None:
    """In place of vLLM's ``unified_attention``, of causal attention, in a window or with sinks."""
    starts, size, groups = cu_seqlens_q.tolist(), k.shape[1], q.shape[1] // k.shape[2]
    behind, sinks = others.get("window_size", (-1, -1))[0], others.get("sinks")
    for at, length in enumerate(seqused_k.tolist()):
        first, last = starts[at], starts[at + 1]
        if last == first:
            continue
        blocks = block_table[at, : -(-length // size)].long()
        keys, values = (part[blocks].flatten(0, 1)[:length].repeat_interleave(groups, 1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[first:last].float(), keys.float()) * softmax_scale
        ends, places = length - (last - first) + torch.arange(last - first)[:, None], torch.arange(length)
        hidden = places > ends if behind < 0 else (places > ends) | (places < ends - behind)
        scores.masked_fill_(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, last - first, 1)], 2)
        weights = scores.softmax(-1)[:, :, :length]
        out[first:last] = torch.einsum("hqk,khd->qhd", weights, values.float()).to(out.dtype)


def _write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *others: Any,
) -> None:
    """In place of vLLM's ``triton_reshape_and_cache_flash``; negative slots are not written."""
    rows, size = (slot_mapping >= 0).nonzero()[:, 0], key_cache.shape[1]
    slots = slot_mapping[rows]
    key_cache[slots // size, slots % size] = key[rows]
    value_cache[slots // size, slots % size] = value[rows]
