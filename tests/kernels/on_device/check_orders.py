"""Checks what a layer orders and what becomes of the addresses, beside the twin; and that a wait ends, if only so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from vllm_spac.kernels.mailbox import wait_for_experts
from vllm_spac.kernels.reference import mailbox as reference
from vllm_spac.kernels.types import ADMITTED, HIT, STREAMED, UNUSED, Experts, Orders, Reach

KEYS, N, NAMES, PLACES = 12, 6, 2, 8


def orders_of(device: str) -> Orders:
    def made(dtype: torch.dtype, size: int = 1) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, pin_memory=device == "cuda")

    counts = made(torch.int64), made(torch.int64), made(torch.int32), made(torch.int32)
    return Orders(*counts, made(torch.int32, N), made(torch.int32, N))


def state(device: str, seed: int) -> tuple[Experts, torch.Tensor, Reach]:
    """Drawn: who has a slot, what was admitted, and what can be addressed."""
    rng = torch.Generator().manual_seed(seed)
    slots = torch.where(torch.rand(KEYS, generator=rng) < 0.4, torch.arange(KEYS), -1).int()
    admitted = (slots >= 0) & (torch.rand(KEYS, generator=rng) < 0.5)
    sources = torch.where(slots < 0, STREAMED, torch.where(admitted, ADMITTED, HIT)).int()
    place_of = torch.where(torch.rand(KEYS, generator=rng) < 0.6, -1, 5).int()
    at = torch.arange(NAMES * PLACES).view(NAMES, PLACES) * 16 + 1600
    hosts, table = (torch.arange(NAMES * KEYS).view(NAMES, KEYS) * 16 + start for start in (16, 800))
    experts = Experts(slots, torch.zeros(KEYS, dtype=torch.int32), table, hosts, torch.zeros(NAMES, KEYS).long())
    number = torch.full((1,), 40 + seed)
    moved = Experts(*(tensor.to(device) for tensor in experts)), sources.to(device)
    return *moved, Reach(number.to(device), place_of.to(device), at.to(device))


@contextmanager
def answering(orders: Orders, answer: Callable[[int, list[int]], None]) -> Iterator[list[list[int]]]:
    """A thread that calls ``answer`` with each order; yields what was ordered."""
    seen: list[list[int]] = []
    over = threading.Event()

    def serve() -> None:
        last = 0
        while not over.is_set():
            if (order := int(orders.asked)) != last:
                last = order
                seen.append(orders.keys[: int(orders.ordered)].tolist())
                answer(order, seen[-1])
            time.sleep(1e-4)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield seen
    over.set()
    thread.join()


@pytest.mark.parametrize("rows", [1, 3, 80])
@pytest.mark.parametrize("seed", range(8))
def test_as_the_twin(device, seed: int, rows: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, N + 1, (rows, 2), generator=rng, dtype=torch.int32)
    weights = torch.rand(rows, 2, generator=rng) * (torch.rand(rows, 2, generator=rng) < 0.7)
    live = torch.tensor([2 * rows - (seed % 2)], dtype=torch.int32)
    found = []
    for run, where in ((wait_for_experts, device), (reference.wait_for_experts, "cpu")):
        orders, (experts, sources, reach) = orders_of(where), state(where, seed)

        def answer(order: int, keys: list[int], orders: Orders = orders) -> None:
            for turn, key in enumerate(keys):
                orders.places[turn] = turn if key % 2 else -1 - turn
            orders.answered[0] = order

        with answering(orders, answer) as seen:
            run(ids.to(where), weights.to(where), N, experts, sources, orders, reach, live.to(where))
            if where == "cuda":
                torch.cuda.synchronize()
        parts = experts.table, experts.hosts, experts.slot_of, sources, reach.place_of, reach.number
        found.append(([tensor.cpu() for tensor in parts], seen))
    (kernel, ordered), (twin, expected) = found
    assert ordered == expected
    for one, other in zip(kernel, twin, strict=True):
        assert torch.equal(one, other)


def test_nothing_is_ordered_twice_or_for_padding(device) -> None:
    experts, sources, reach = state(device, 0)
    experts.slot_of.fill_(-1)
    sources.fill_(UNUSED)
    reach.place_of.fill_(-1)
    orders = orders_of(device)
    ids = torch.tensor([[1, 3], [1, -1], [5, 0]], dtype=torch.int32, device=device)
    weights, live = torch.ones(3, 2, device=device), torch.tensor([4], dtype=torch.int32, device=device)

    def answer(order: int, keys: list[int]) -> None:
        for turn, key in enumerate(keys):
            orders.places[turn] = 3 if key == N + 1 else -5  # the first one stays
        orders.answered[0] = order

    with answering(orders, answer) as seen:
        for _ in range(2):
            wait_for_experts(ids, weights, N, experts, sources, orders, reach, live)
            if device == "cuda":
                torch.cuda.synchronize()
    assert seen == [[N + 1, N + 3], [N + 3]], "two rows want the first expert once"
    assert reach.place_of[[N + 1, N + 3]].tolist() == [3, -1] and int(reach.number) == 42


@pytest.mark.parametrize("before", [True, False])
def test_an_end_ends_a_wait_and_leaves_addresses_that_are_mapped(device, before: bool) -> None:
    experts, sources, reach = state(device, 1)
    experts.slot_of.fill_(-1)
    reach.place_of.fill_(-1)
    orders = orders_of(device)
    ids, weights = torch.tensor([[0, 2]], dtype=torch.int32, device=device), torch.ones(1, 2, device=device)
    if before:
        orders.ended[0] = 1
    threading.Timer(0.1, lambda: orders.ended.fill_(1)).start()
    wait_for_experts(ids, weights, 0, experts, sources, orders, reach)
    if device == "cuda":
        torch.cuda.synchronize()
    for tensor in (experts.hosts, experts.table):
        assert torch.equal(tensor[:, [0, 2]].cpu(), reach.at[:, [0, 0]].cpu())
    assert (reach.place_of == -1).all()


def test_wrong_memory_is_refused(device) -> None:
    experts, sources, reach = state(device, 1)
    ids, weights = torch.zeros(1, 2, dtype=torch.int32, device=device), torch.ones(1, 2, device=device)
    few = reach._replace(at=reach.at[:, : N - 1].contiguous())
    with pytest.raises(AssertionError, match="all of its experts"):
        wait_for_experts(ids, weights, 0, experts, sources, orders_of(device), few)
