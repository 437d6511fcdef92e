"""Properties that need a GPU: pinned memory, graphs, no waits for the host; for ``make test-gpu``."""

import importlib.util
from dataclasses import replace

import moe_layers
import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]


def kernel():
    from vllm_spac.kernels.grouped_gemm import grouped_gemm

    return grouped_gemm


def pinned(layer: moe_layers.Layer) -> moe_layers.Layer:
    """The same layer with all weights in pinned host memory."""
    names = ("w13", "w2", "b13", "b2")
    return replace(layer, **{name: [part.cpu().pin_memory() for part in getattr(layer, name)] for name in names})


def tables_on_device(layer: moe_layers.Layer) -> list[torch.Tensor]:
    return [layer.tables()[name].cuda() for name in ("w13", "w2", "b13", "b2")]


def call(layer, tables, **options):
    return kernel()(
        layer.x, *tables[:2], layer.weights, layer.ids, layer.intermediate, *tables[2:], layer.activation, **options
    )


@pytest.mark.parametrize("rows", [1, 16, 64, 300])
def test_pinned_and_mixed_experts_give_the_bits_of_hbm(rows):
    """2048 x 768: whole tiles, as in serving."""
    layer = moe_layers.make(rows, 2048, 768, experts=16, k=4, bias=True).to("cuda")
    host = pinned(layer)
    fast, slow = tables_on_device(layer), tables_on_device(host)
    whole = call(layer, fast)
    assert torch.isfinite(whole).all()
    assert torch.equal(call(layer, slow), whole)
    hits = torch.arange(16, device="cuda") % 4 == 0
    mixed = [torch.where(hits, left, right) for left, right in zip(fast, slow, strict=True)]
    assert torch.equal(call(layer, mixed), whole)


def test_a_graph_follows_the_table_the_routing_and_the_rows():
    """Captured once; then experts move, other rows come, and padding: the replay answers as an eager call does."""
    layer = moe_layers.make(8, 256, 128, experts=16, k=4, bias=True).to("cuda")
    host = pinned(layer)
    fast, slow = tables_on_device(layer), tables_on_device(host)
    tables = [table.clone() for table in fast]
    out = torch.empty_like(layer.x)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call(layer, tables, out=out)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(layer, tables, out=out)
    other = moe_layers.make(8, 256, 128, experts=16, k=4, bias=True, seed=7).to("cuda")
    for step in range(3):
        if step == 1:
            for table, moved in zip(tables, slow, strict=True):
                table.copy_(moved)
        if step == 2:
            layer.x.copy_(other.x)
            layer.ids.copy_(other.ids)
            layer.ids[5:] = -1
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, call(layer, fast)), step
    assert (out[5:] == 0).all()


def test_no_launch_waits_for_the_host():
    """Sync debug mode raises on every synchronising call of torch."""
    layer = moe_layers.make(8, 256, 128, experts=16, k=4, bias=True).to("cuda")
    tables = tables_on_device(layer)
    call(layer, tables)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(layer, tables)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("rows", [1, 32, 300])
def test_same_bits_every_time(rows):
    layer = moe_layers.make(rows, 2048, 768, experts=16, k=4, bias=True).to("cuda")
    tables = tables_on_device(layer)
    first = call(layer, tables)
    assert all(torch.equal(call(layer, tables), first) for _ in range(20))
