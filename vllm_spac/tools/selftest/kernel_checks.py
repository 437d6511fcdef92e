"""Compares the kernels of this machine with plain sums, and the rates at which they read host memory with a copy's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from vllm_spac import components
from vllm_spac.core import MoEShape, RequestRows, RowKind, Step, TensorSpec
from vllm_spac.decisions.costs import Costs
from vllm_spac.execution.address_table import kernels_for
from vllm_spac.execution.base import ExecutionContext
from vllm_spac.execution.device.pointers_execution import PointerExecution
from vllm_spac.tools.machine.checks import CheckOutcome, Finding
from vllm_spac.tools.selftest.random_experts import FORMATS, RandomExperts, RoutedRows

# As a share of the greatest element: kernels round bfloat16 values (2**-8) six times, in different order.
TOLERANCE = 2.0**-5
_ROWS = (1, 8, 64)  # one tile each
_EXPERTS, _TOP_K = 16, 4
_LINK_EXPERTS, _LINK_TOP_K = 48, 8
_REPEATS = 10
_LAYERS, _STEPS = 2, 24
_REMEDY = "serve with --spac-plane slots alone here; report it with the file of --output"


def formats(device: torch.device, hidden: int, intermediate: int) -> Iterator[CheckOutcome]:
    """Compares the grouped GEMM over bfloat16 and each quantised format with sums in float32 on the CPU."""
    kernel = kernels_for(device).grouped_gemm
    for name, kind in {"bf16": None, **FORMATS}.items():
        experts = RandomExperts.make(kind, hidden, intermediate, _EXPERTS, device)
        worst = 0.0
        for count in _ROWS:
            rows = RoutedRows.make(count, hidden, _EXPERTS, _TOP_K, device)
            worst = max(worst, difference(experts.call(kernel, rows)().cpu(), experts.expected(rows)))
        text = f"off by {worst:.1%} of the greatest element"
        if worst <= TOLERANCE:
            finding = Finding(f"kernel, {name}", "ok", text)
        else:
            finding = Finding(f"kernel, {name}", "problem", f"{text}; {TOLERANCE:.1%} is rounding", _REMEDY)
        yield CheckOutcome(finding, {"difference": worst})


def difference(ours: Tensor, expected: Tensor) -> float:
    """Returns the greatest difference as a share of the greatest element; infinity for what is not finite."""
    share = float((ours.float() - expected).abs().max() / expected.abs().max())
    return share if share == share else float("inf")


def moving_experts(device: torch.device, hidden: int, intermediate: int) -> Iterator[CheckOutcome]:
    """Compares layers whose experts move between steps with the same layers all in fast memory: the same bits."""
    total = _LAYERS * _EXPERTS
    whole, moving = (_Layers(device, slots, hidden, intermediate) for slots in (total, total // 3))
    ways: dict[str, Callable[[], object]] = {"eager": moving.forward}
    if device.type == "cuda":
        ways["CUDA graph"] = moving.captured()
    for name, run in ways.items():
        wrong = 0
        for number in range(_STEPS):
            whole.load(number)
            moving.load(number)
            whole.forward()
            moving.pool.begin_step(_STEP)
            run()
            moving.pool.end_forward()
            wrong += not torch.equal(moving.out, whole.out)
        moving.pool.admission.check_integrity()
        seen = moving.pool.snapshot()
        right = f"{_STEPS - wrong} of {_STEPS} steps with the bits of resident experts"
        check, text = f"moving, {name}", f"{right}, {seen['loads']} experts moved"
        numbers = {"wrong steps": float(wrong), "loads": float(seen["loads"])}
        if wrong == 0 and seen["loads"] > 0:
            yield CheckOutcome(Finding(check, "ok", text), numbers)
        else:
            yield CheckOutcome(Finding(check, "problem", text, _REMEDY), numbers)
    whole.pool.close()
    moving.pool.close()
    if device.type != "cuda":
        yield CheckOutcome(
            Finding("moving, CUDA graph", "note", "not checked: there is no GPU", "run it on the machine that serves")
        )


_STEP_ROWS = 8
_STEP = Step((RequestRows(0, _STEP_ROWS, RowKind.DECODE),))


class _Layers:
    """Layers of random experts over pointers, on buffers that stay where they are."""

    def __init__(self, device: torch.device, slots: int, hidden: int, intermediate: int) -> None:
        kinds = {"w13_weight": (2 * intermediate, hidden), "w2_weight": (hidden, intermediate)}
        specs = {name: TensorSpec(size, torch.bfloat16) for name, size in kinds.items()}
        shape = MoEShape(tuple(map(str, range(_LAYERS))), _EXPERTS, _TOP_K, specs)
        if slots < shape.total:
            store = components.build("stores", "host", shape=shape, fingerprint="")
            tensors = {
                name: torch.empty((slots, *size), dtype=torch.bfloat16, device=device) for name, size in kinds.items()
            }
        else:
            store = components.find("stores", "resident")(shape, "", device=str(device))
            tensors = store.tensors
        rng = torch.Generator().manual_seed(0)
        for key in range(shape.total):  # each another one, or a wrong one would go unseen
            values = {name: torch.randn(size, generator=rng) / size[1] ** 0.5 for name, size in kinds.items()}
            store.put(key, {name: value.bfloat16() for name, value in values.items()})
        policy = components.build("policies", "lru")
        self.pool = PointerExecution(
            ExecutionContext(shape, slots, policy, store, tensors, path="host", rows=_STEP_ROWS)
        )
        for _ in self.pool.fill():
            pass
        self.x = torch.zeros(_STEP_ROWS, hidden, dtype=torch.bfloat16, device=device)
        self.ids = torch.zeros(_LAYERS, _STEP_ROWS, _TOP_K, dtype=torch.int32, device=device)
        self.weights = torch.full((_STEP_ROWS, _TOP_K), 0.25, device=device)
        self.out = torch.zeros(_LAYERS, _STEP_ROWS, hidden, dtype=torch.bfloat16, device=device)

    def load(self, seed: int) -> None:
        """Gives rows that prefer a few experts, others every few steps."""
        rng = torch.Generator().manual_seed(seed)
        self.x.copy_(torch.randn(self.x.shape, generator=rng))
        few = [torch.randperm(_EXPERTS // 2, generator=rng)[:_TOP_K] for _ in range(_LAYERS * _STEP_ROWS)]
        self.ids.copy_((torch.stack(few).view_as(self.ids) + seed // 5 * 4) % _EXPERTS)

    def forward(self) -> None:
        for layer in range(_LAYERS):
            self.pool.run(layer, self.x, self.weights, self.ids[layer], "silu", self.out[layer])

    def captured(self) -> Callable[[], object]:
        """Returns a replay of ``forward``."""
        self.forward()  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.forward()
        return graph.replay


def link(device: torch.device, hidden: int, intermediate: int, profile: Costs | None) -> CheckOutcome:
    """Measures a copy from pinned memory and experts read in place, and compares them with a shipped profile.

    Args:
        profile: of such a GPU, from its data sheet; None: none is shipped.
    """
    experts = RandomExperts.make(None, hidden, intermediate, _LINK_EXPERTS, "cpu")
    rows = RoutedRows.make(_LINK_EXPERTS, hidden, _LINK_EXPERTS, _LINK_TOP_K, device)
    rows.ids.copy_(torch.arange(rows.ids.numel()).view_as(rows.ids) % _LINK_EXPERTS)  # each is read
    pinned = tuple(tensor.pin_memory() for tensor in experts.stored)
    target = [torch.empty_like(tensor, device=device) for tensor in pinned]

    def copy() -> None:
        for fast, slow in zip(target, pinned, strict=True):
            fast.copy_(slow, non_blocking=True)

    nbytes = sum(tensor.nbytes for tensor in pinned)
    copied = nbytes / _seconds(copy) / 1e9
    in_place = nbytes / _seconds(experts.call(kernels_for(device).grouped_gemm, rows, pinned)) / 1e9
    numbers = {"copy GB/s": copied, "in place GB/s": in_place}
    text = f"a copy takes {copied:.1f} GB/s, experts are read in place at {in_place:.1f}"
    if profile is None:
        return CheckOutcome(Finding("link", "ok", text), numbers)
    sheet = profile.load.bytes_per_second / 1e9
    text += f"; the data sheet of {profile.name} says {sheet:.0f}"
    if in_place >= _OF_SHEET * sheet:
        return CheckOutcome(Finding("link", "ok", text), numbers)
    remedy = "nvidia-smi -q shows the link's width and generation: a slot of 16 lanes; nothing else should use it"
    return CheckOutcome(Finding("link", "note", text, remedy), numbers)


_OF_SHEET = 0.6  # of PCIe's peak; an H100 attains 0.80 in place


def _seconds(work: Callable[[], object]) -> float:
    """Returns the fewest seconds of ``work`` on the GPU, after two runs: others may use the link meanwhile."""
    times = []
    for number in range(2 + _REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times += [start.elapsed_time(end) / 1e3] if number >= 2 else []
    return min(times)
