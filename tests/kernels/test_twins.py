"""A twin has the same signature as its kernel."""

import importlib
import inspect

import pytest
import torch
from vllm_spac.kernels.reference import grouped_gemm as reference

pytest.importorskip("triton", reason="triton is not installed (there are no wheels for this platform)")
from vllm_spac.kernels import admit, combine, cover, fetch, grouped_gemm, mailbox, route, shortlist, tally  # noqa: E402

OPS = [
    *(grouped_gemm.grouped_gemm, route.align, admit.admit, fetch.read_early),
    *(shortlist.shortlist, cover.cover, tally.tally),
    *(mailbox.wait_for_answer, mailbox.wait_for_experts, combine.combine),
]


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_twin_has_the_signature_of_its_kernel(op):
    def shape(function):
        parameters = inspect.signature(function).parameters.values()
        return [(parameter.name, parameter.kind, parameter.default) for parameter in parameters]

    twins = importlib.import_module(op.__module__.replace(".kernels.", ".kernels.reference."))
    assert shape(getattr(twins, op.__name__)) == shape(op)


@pytest.mark.parametrize("rows", range(1, 65))
def test_decode_reads_every_expert_once(rows):
    """Even if all rows choose the same: one block holds them."""
    assert grouped_gemm.tile_for(rows).block_m >= rows


def test_twin_reads_the_addresses():
    """By hand: an expert [gate; up] = [[1], [2]], down [[3]], x = 1: 3 * silu(1) * 2, in an allocation of its own."""
    w13, w2 = (
        [torch.tensor([[9.0], [9.0]]), torch.tensor([[1.0], [2.0]])],
        [torch.tensor([[9.0]]), torch.tensor([[3.0]])],
    )
    tables = [torch.tensor([part.data_ptr() for part in parts]) for parts in (w13, w2)]
    x, weights, ids = torch.ones(1, 1), torch.tensor([[0.5, 0.25]]), torch.tensor([[1, -1]])
    out = reference.grouped_gemm(x, *tables, weights, ids, 1)
    torch.testing.assert_close(out, torch.sigmoid(torch.ones(1, 1)) * 3)
