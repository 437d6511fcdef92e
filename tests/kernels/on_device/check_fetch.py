"""Checks that ``fetch`` copies every byte of the admitted experts, and no other."""

import pytest
import torch
from vllm_spac.kernels.fetch import fetch
from vllm_spac.kernels.reference import fetch as reference
from vllm_spac.kernels.types import Experts

KEYS, SLOTS, N = 6, 4, 5


def made(device: str, sizes: list[int]) -> tuple[list, list, Experts]:
    """(host copies, slots, their addresses), a tensor of so many bytes for each name; slots hold 9."""
    rng = torch.Generator().manual_seed(0)
    hosts = [[torch.randint(0, 256, (size,), generator=rng, dtype=torch.uint8) for _ in range(KEYS)] for size in sizes]
    if device == "cuda":
        hosts = [[tensor.pin_memory() for tensor in tensors] for tensors in hosts]
    slots = [[torch.full((size,), 9, dtype=torch.uint8, device=device) for _ in range(SLOTS)] for size in sizes]
    nothing = torch.zeros(0, dtype=torch.int32, device=device)
    addresses = [
        torch.tensor([[tensor.data_ptr() for tensor in tensors] for tensors in kind], device=device)
        for kind in (hosts, slots)
    ]
    return hosts, slots, Experts(nothing, nothing, nothing, *addresses)


def asked(device: str, *pairs: tuple[int, int]) -> torch.Tensor:
    copies = torch.full((1 + 2 * N,), 1 << 30, dtype=torch.int32)  # what means nothing is no address
    copies[0] = len(pairs)
    for at, (key, slot) in enumerate(pairs):
        copies[1 + at], copies[1 + N + at] = key, slot
    return copies.to(device)


@pytest.mark.parametrize("function", [fetch, reference.fetch], ids=["kernel", "twin"])
@pytest.mark.parametrize("pairs", [[], [(5, 0)], [(0, 3), (4, 1), (5, 0)]], ids=["none", "one", "some"])
@pytest.mark.parametrize("sizes", [[16], [48, 16 * 1024], [8192, 8192 + 16, 3 * 8192]])
def test_copies_what_was_admitted(device, function, pairs, sizes):
    """Less than a chunk, whole chunks, a cut one, and more chunks than programs with small ones beside."""
    if function is reference.fetch and device == "cuda":
        pytest.skip("the twin follows addresses of the CPU only")
    hosts, slots, experts = made(device, sizes)
    words = torch.tensor([size // 8 for size in sizes], dtype=torch.int32, device=device)
    function(asked(device, *pairs), experts, words)
    owner = {slot: key for key, slot in pairs}
    for host, tensors in zip(hosts, slots, strict=True):
        for slot, tensor in enumerate(tensors):
            expected = host[owner[slot]] if slot in owner else torch.full_like(host[0], 9)
            assert torch.equal(tensor.cpu(), expected)


def test_more_chunks_than_programs(device):
    size = 8192 * 70 + 32
    hosts, slots, experts = made(device, [size])
    fetch(asked(device, (1, 2), (3, 0)), experts, torch.tensor([size // 8], dtype=torch.int32, device=device))
    assert torch.equal(slots[0][2].cpu(), hosts[0][1]) and torch.equal(slots[0][0].cpu(), hosts[0][3])
    assert bool((slots[0][1] == 9).all())
