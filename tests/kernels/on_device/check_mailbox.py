"""Checks the mailbox's launches against their twins, and that a wait ends in time whatever the thread writes."""

import threading
import time

import pytest
import torch
from vllm_spac.kernels.mailbox import POLL, add, post, wait_for_answer
from vllm_spac.kernels.reference import mailbox as reference
from vllm_spac.kernels.types import ADMITTED, COMPUTED, HIT, LATE, UNUSED, Division, Mail

LAYERS, D = 2, 48


def memory(device: str, rows: int, k: int, shares: list[int], dtype=torch.float32, d: int = D) -> tuple[Division, Mail]:
    def there(dtype, *size):
        return torch.zeros(size, dtype=dtype, device=device)

    def here(dtype, *size):
        return torch.zeros(size, dtype=dtype, pin_memory=device == "cuda")

    table = torch.tensor(shares, dtype=torch.int32, device=device)
    weights = (there(torch.float32, rows, k) for _ in range(3))
    division = Division(there(torch.int64, 1), there(torch.int32, 1), there(torch.int32, 2), table, *weights)
    numbers = here(torch.int64, 1), here(torch.int64, 1)
    pairs = here(torch.int32, 2), here(torch.int32, rows, k), here(torch.float32, rows, k)
    return division, Mail(*numbers, *pairs, here(dtype, rows, d), here(torch.float32, rows, d))


def said(division: Division, mail: Mail, *others: torch.Tensor) -> list:
    return [tensor.cpu().tolist() for tensor in (*division, *mail, *others)]


@pytest.mark.parametrize(
    ("n", "k", "rows"), [(1, 1, 1), (8, 2, 3), (7, 3, 5), (64, 8, 32), (128, 8, 4), (1000, 2, 2)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_divides_as_the_twin_does(device, n, k, rows, dtype):
    """Layer by layer, with the answers of a thread between them; every tensor is the same."""
    rng = torch.Generator().manual_seed(n)
    shares = [min(m, int(torch.randint(0, 5, (1,), generator=rng))) for m in range(n + 1)]
    sides = [(post, wait_for_answer, device), (reference.post, reference.wait_for_answer, "cpu")]
    states = [(*memory(where, rows, k, shares, dtype), *fresh(n, where)) for *_, where in sides]
    taken = 0
    for number in range(6):
        layer, padded = number % LAYERS, rows > 1 and number % 3 == 1
        ids = torch.randint(-1, n + 1, (rows, k), generator=rng, dtype=torch.int32)
        weights = torch.randint(0, 4, (rows, k), generator=rng) / 2
        x = torch.randn(rows, D, generator=rng).to(dtype)
        live = (rows - padded) * k
        found = torch.randint(HIT, ADMITTED + 1, (n,), generator=rng, dtype=torch.int32)
        used = torch.randint(0, 3, (LAYERS * n,), generator=rng).float()
        outcomes = []
        for (ask, wait, where), (division, mail, counts, sources) in zip(sides, states, strict=True):
            division.pairs.fill_(0 if number == 4 else live)
            here = slice(layer * n, layer * n + n)
            sources[here] = torch.where(uses(ids, weights, live, n) > 0, found, UNUSED).int().to(where)
            padding = torch.tensor([live], dtype=torch.int32, device=where)
            given = ids.to(where), weights.to(where), layer, x.to(where), used.to(where)
            ask(*given, counts, sources, division, mail, padding)
            if device == "cuda":
                torch.cuda.synchronize()
            asked, late = int(mail.asked), number % 2
            taken += int(division.state[0])
            mail.answered[0] = asked - late if asked else 0
            wait(given[0], layer, sources, division, mail, 20 * POLL)
            outcomes.append(said(division, mail, counts, sources))
        assert outcomes[0] == outcomes[1]
    assert taken > 1 or n == 1


def fresh(n: int, where: str) -> list[torch.Tensor]:
    return [torch.full((LAYERS * n,), UNUSED, dtype=torch.int32, device=where) for _ in range(2)]


def uses(ids, weights, live: int, n: int) -> torch.Tensor:
    pairs = [e for e, w in zip(ids.flatten().tolist()[:live], weights.flatten().tolist()[:live], strict=True) if w]
    return torch.bincount(torch.tensor([e for e in pairs if 0 <= e < n], dtype=torch.long), minlength=n)


def asking(device: str, number: int = 7) -> tuple[Division, Mail, torch.Tensor, torch.Tensor]:
    """A layer that has made request ``number``, for the second of its two experts."""
    division, mail = memory(device, 1, 2, [0, 1, 2])
    for tensor, value in ((division.state, [1, -1]), (division.number, [number]), (division.pairs, [2])):
        tensor.copy_(torch.tensor(value))
    division.left.copy_(torch.tensor([[0.0, 0.5]]))
    division.again.fill_(-1)
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
    assert division.again.tolist() == ([[0.0, 0.0]] if right else [[0.0, 0.5]])
    assert sources.tolist() == [HIT, COMPUTED if right else LATE, COMPUTED, COMPUTED], "of its own layer"
    assert division.pairs.item() == (2 if right else 0), "after a late answer nobody asks in this step"


def test_a_layer_that_asked_nothing_does_not_wait(device):
    division, mail, sources, ids = asking(device)
    division.state.zero_()
    division.left.zero_()
    wait_for_answer(ids, 0, sources, division, mail, 100 * POLL)
    assert division.state.tolist() == [0, 0] and not division.again.any()
    assert division.pairs.item() == 2, "a wait would have ended late, after which nobody asks"


def test_a_wait_of_nothing_looks_once(device):
    for answered in (7, 6):
        division, mail, sources, ids = asking(device)
        mail.answered[0] = answered
        wait_for_answer(ids, 0, sources, division, mail, 0)
        assert division.state.tolist() == [1, int(answered == 7)]


@pytest.mark.parametrize("d", [16, 1000, 2500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("arrived", [True, False])
def test_adds_results_or_what_took_their_place(device, d, dtype, arrived):
    """What does not count is NaN: rows without a pair of the CPU's, and the other side's numbers."""
    rng, rows = torch.Generator().manual_seed(0), 5
    out, late = (torch.randn(rows, d, generator=rng).to(dtype) for _ in range(2))
    results, left = torch.randn(8, d, generator=rng), torch.zeros(8, 3)
    for row in (0, 3):
        left[row, row % 3] = 0.5
    (late if arrived else results).fill_(float("nan"))
    results[[1, 2, 4]] = late[[1, 2, 4]] = float("nan")
    found = []
    for function, where in ((add, device), (reference.add, "cpu")):
        division, mail = memory(where, 8, 3, [0, 1], dtype, d)
        division.state.copy_(torch.tensor([1, int(arrived)]))
        division.left.copy_(left)
        mail.results.copy_(results)
        sum_ = out.clone().to(where)
        function(sum_, late.to(where), division, mail)
        found.append(sum_.cpu())
    assert torch.equal(*found) and not found[0].isnan().any()
    assert torch.equal(found[0][[1, 2, 4]], out[[1, 2, 4]])
    part = results[:rows] if arrived else late.float()
    assert torch.equal(found[0][[0, 3]], (out.float() + part)[[0, 3]].to(dtype))
