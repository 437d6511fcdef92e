"""Experts that move while kernels read them, on a GPU; for ``make test-gpu``."""

import importlib.util

import pytest
import torch

from vllm_spac import components
from vllm_spac.core import MoEShape, RequestRows, RowKind, Step, TensorSpec
from vllm_spac.execution.address_table import MANY_ROWS
from vllm_spac.execution.base import ExecutionContext
from vllm_spac.execution.device.borrowed_slots import LongPrompts
from vllm_spac.execution.device.pointers_execution import PointerExecution

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]
LAYERS, EXPERTS, TOP_K, D, FF, ROWS = 4, 16, 4, 1024, 512, 8
STEPS = [Step((RequestRows(0, rows, RowKind.DECODE),)) for rows in (ROWS, ROWS - 3, 1)]  # padded to ROWS
PROMPT = Step((RequestRows(0, MANY_ROWS * EXPERTS // TOP_K, RowKind.PREFILL),))


def pool(slots: int, **options) -> PointerExecution:
    dtype = torch.bfloat16
    specs = {"w13_weight": TensorSpec((2 * FF, D), dtype), "w2_weight": TensorSpec((D, FF), dtype)}
    shape = MoEShape(tuple(map(str, range(LAYERS))), EXPERTS, TOP_K, specs)
    store = components.build("stores", "host" if slots < shape.total else "resident", shape=shape, fingerprint="")
    if slots == shape.total:
        store = type(store)(shape, "", device="cuda")
    rng = torch.Generator().manual_seed(0)
    for key in range(shape.total):
        tensors = {name: torch.randn(spec.shape, generator=rng) / spec.shape[1] ** 0.5 for name, spec in specs.items()}
        store.put(key, {name: tensor.to(dtype) for name, tensor in tensors.items()})
    tensors = getattr(store, "tensors", None) or {
        name: torch.empty((slots, *spec.shape), dtype=dtype, device="cuda") for name, spec in specs.items()
    }
    options |= {"path": "host", "rows": PROMPT.rows}
    made = PointerExecution(
        ExecutionContext(shape, slots, components.build("policies", "lru"), store, tensors, **options)
    )
    for _ in made.fill():
        pass
    if made.prompts is not None:
        _poison(made.prompts)
    return made


def _poison(prompts: LongPrompts) -> None:
    """Borrowed slots are NaN before each copy."""
    moves = prompts._borrowed._moves
    fill = moves.fill

    def poisoned(keys, slots) -> None:
        for slot in slots.tolist():
            for tensor in moves._slots.values():
                tensor[slot].fill_(float("nan"))
        fill(keys, slots)

    moves.fill = poisoned


class Model:
    """Layers one behind the other, on buffers that stay where they are."""

    def __init__(self, pool: PointerExecution, rows: int = ROWS) -> None:
        self.pool, self.rows = pool, rows
        self.x = torch.zeros(rows, D, dtype=torch.bfloat16, device="cuda")
        self.ids = torch.zeros(LAYERS, rows, TOP_K, dtype=torch.int32, device="cuda")
        self.weights = torch.full((rows, TOP_K), 0.25, device="cuda")
        self.out = torch.zeros(LAYERS, rows, D, dtype=torch.bfloat16, device="cuda")

    def load(self, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.x.copy_(torch.randn(self.rows, D, generator=rng))
        few = torch.stack([torch.randperm(EXPERTS // 2, generator=rng)[:TOP_K] for _ in range(LAYERS * self.rows)])
        self.ids.copy_((few.view(LAYERS, self.rows, TOP_K) + seed // 5 * 4) % EXPERTS)

    def forward(self) -> None:
        for layer in range(LAYERS):
            self.pool.run(layer, self.x, self.weights, self.ids[layer], "silu", self.out[layer])


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_same_bits_as_in_hbm_while_experts_move(graph):
    """In a graph the launches are fixed; what changes is the table, and the padding."""
    whole, moving = Model(pool(LAYERS * EXPERTS)), Model(pool(LAYERS * EXPERTS // 3))
    for model in (whole, moving):
        model.forward()  # compiles
    torch.cuda.synchronize()
    run = moving.forward
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            moving.forward()
        run = captured.replay
    for step in range(40):
        for model in (whole, moving):
            model.load(step)
        whole.forward()
        torch.cuda.synchronize()
        padded = STEPS[step % len(STEPS)]
        moving.pool.begin_step(padded)
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        moving.pool.end_forward()
        if step % 4 == 0:  # it may wait for the device, and what follows would find it idle
            moving.pool.admission.check_integrity()
        assert torch.equal(moving.out[:, : padded.rows], whole.out[:, : padded.rows]), step
        assert not moving.out[:, padded.rows :].any(), step
    stats = moving.pool.snapshot()
    assert stats["prefetch_hits"] + stats["loads"] > 0 and stats["hits"] > 0 and stats["misses"] > 0
    for model in (whole, moving):
        model.pool.close()


def test_same_bits_as_in_hbm_while_prompts_borrow_slots():
    """Steps of few rows, which move experts, and of many take turns. Borrowed slots are NaN before each copy."""
    rows = PROMPT.rows
    moving = pool(LAYERS * EXPERTS // 3)
    whole = pool(LAYERS * EXPERTS)
    pairs = [(Model(moving, count), Model(whole, count)) for count in (ROWS, rows)]
    for pair in pairs:
        for model in pair:
            model.forward()  # compiles
    torch.cuda.synchronize()
    for step in range(20):
        ours, theirs = pairs[step % 2]
        for model in (ours, theirs):
            model.load(step)
        theirs.forward()
        torch.cuda.synchronize()
        moving.begin_step(STEPS[0] if ours.rows == ROWS else PROMPT)
        torch.cuda.set_sync_debug_mode("error")
        try:
            ours.forward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        moving.end_forward()
        assert torch.equal(ours.out, theirs.out), step
    stats = moving.snapshot()
    assert stats["bytes"]["host staged"] > 0 and stats["prefetches"] + stats["loads"] > 0
    for each in (moving, whole):
        each.close()
