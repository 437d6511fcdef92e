"""Checks that a wait ends in time whatever the thread writes; of requests and sums see ``admit`` and ``combine``."""

import threading
import time

import pytest
import torch
from vllm_spac.kernels.mailbox import POLL, wait_for_answer
from vllm_spac.kernels.reference import mailbox as reference
from vllm_spac.kernels.types import COMPUTED, HIT, LATE, Division, Mail

D = 48


def memory(device: str, rows: int, k: int, shares: list[int], dtype=torch.float32, d: int = D) -> tuple[Division, Mail]:
    def there(dtype, *size):
        return torch.zeros(size, dtype=dtype, device=device)

    def here(dtype, *size):
        return torch.zeros(size, dtype=dtype, pin_memory=device == "cuda")

    table = torch.tensor(shares, dtype=torch.int32, device=device)
    weights = (there(torch.float32, rows, k) for _ in range(2))
    state = there(torch.int64, 1), there(torch.int32, 1), there(torch.int32, 2), table
    division = Division(*state, *weights, there(torch.int32, 1))
    numbers = here(torch.int64, 1), here(torch.int64, 1)
    pairs = here(torch.int32, 2), here(torch.int32, rows, k), here(torch.float32, rows, k)
    return division, Mail(*numbers, *pairs, here(dtype, rows, d), here(torch.float32, rows, d))


def asking(device: str, number: int = 7) -> tuple[Division, Mail, torch.Tensor, torch.Tensor]:
    """A layer that has made request ``number``, for the second of its two experts."""
    division, mail = memory(device, 1, 2, [0, 1, 2])
    for tensor, value in ((division.state, [1, -1]), (division.number, [number]), (division.pairs, [2])):
        tensor.copy_(torch.tensor(value))
    division.left.copy_(torch.tensor([[0.0, 0.5]]))
    division.late.fill_(-1)
    sources = torch.tensor([HIT, COMPUTED, COMPUTED, COMPUTED], dtype=torch.int32, device=device)
    return division, mail, sources, torch.tensor([[0, 1]], dtype=torch.int32, device=device)


# What a thread writes as the number of its answer, and after how many seconds.
WRITTEN = {
    "there before the wait": ([(0.0, 7)], True),
    "during the wait": ([(0.05, 7)], True),
    "old ones before it": ([(0.01, 5), (0.02, 6), (0.05, 7)], True),
    "wrong ones before it": ([(0.01, 8), (0.02, -7), (0.03, 1 << 40), (0.05, 7)], True),
    "never": ([], False),
    "an old one": ([(0.0, 6)], False),
    "the next one": ([(0.0, 8)], False),
    "one that is equal in 32 bits": ([(0.0, (1 << 32) + 7)], False),
    "garbage again and again": ([(0.001, number) for number in range(1000, 1020)], False),
}


@pytest.mark.parametrize("case", WRITTEN)
def test_a_wait_ends_with_the_number_or_with_its_patience(device, case):
    written, right = WRITTEN[case]
    division, mail, sources, ids = asking(device)
    begun = threading.Event()

    def thread() -> None:
        start = time.monotonic()
        for after, number in written:
            time.sleep(max(0.0, start + after - time.monotonic()))
            mail.answered[0] = number
            begun.set()
        begun.set()

    writer = threading.Thread(target=thread)
    writer.start()
    if written and written[0][0] == 0.0:
        begun.wait()
    # in the interpreter a poll takes a tenth of a millisecond and more: a right answer is there long before the end
    patience = (2_000_000_000 if right else 30_000_000) if device == "cuda" else (200_000 if right else 100) * POLL
    wait_for_answer(ids, 0, sources, division, mail, min(patience, 2**31 - 1))
    if device == "cuda":
        torch.cuda.synchronize()
    writer.join()
    assert division.state.tolist() == [1, int(right)]
    assert division.late.item() == (0 if right else 2)
    assert sources.tolist() == [HIT, COMPUTED if right else LATE, COMPUTED, COMPUTED], "of its own layer"
    assert division.pairs.item() == (2 if right else 0), "after a late answer nobody asks in this step"


def test_a_layer_that_asked_nothing_does_not_wait(device):
    division, mail, sources, ids = asking(device)
    division.state.zero_()
    division.left.zero_()
    wait_for_answer(ids, 0, sources, division, mail, 100 * POLL)
    assert division.state.tolist() == [0, 0] and division.late.item() == 0
    assert division.pairs.item() == 2, "a wait would have ended late, after which nobody asks"


def test_a_wait_of_nothing_looks_once(device):
    for answered in (7, 6):
        division, mail, sources, ids = asking(device)
        mail.answered[0] = answered
        wait_for_answer(ids, 0, sources, division, mail, 0)
        assert division.state.tolist() == [1, int(answered == 7)]


@pytest.mark.parametrize("asks", [0, 1])
@pytest.mark.parametrize("answered", [6, 7])
def test_waits_as_the_twin_does(device, asks, answered):
    found = []
    for wait, where in ((wait_for_answer, device), (reference.wait_for_answer, "cpu")):
        division, mail, sources, ids = asking(where)
        division.state[0], mail.answered[0] = asks, answered
        wait(ids, 1, sources, division, mail, 20 * POLL)
        found.append([tensor.tolist() for tensor in (*division, *mail, sources)])
    assert found[0] == found[1]
