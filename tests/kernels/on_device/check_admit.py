"""Checks ``admit`` against its twin and plain loops: all state equal after each layer."""

import pytest
import torch
from vllm_spac.kernels.admit import admit
from vllm_spac.kernels.reference import admit as reference
from vllm_spac.kernels.types import (
    ADMITTED,
    COMPUTED,
    HIT,
    STREAMED,
    UNUSED,
    Division,
    Experts,
    Kept,
    Mail,
    Offers,
    Request,
    lanes,
)

NAMES = 2
D = 48


class State:
    """Slots of ``layers`` layers of ``n`` experts, some of them filled, with made-up addresses."""

    def __init__(self, layers: int, n: int, slots: int, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.n, keys = n, layers * n
        owner = torch.randperm(keys, generator=rng)[:slots].int()
        slot_of = torch.full((keys,), -1, dtype=torch.int32)
        slot_of[owner.long()] = torch.arange(slots, dtype=torch.int32)
        hosts = 1000 + torch.arange(NAMES * keys).view(NAMES, keys)
        places = 10**6 + torch.arange(NAMES * slots).view(NAMES, slots)
        table = torch.where(slot_of >= 0, places[:, slot_of.long()], hosts)
        self.experts = Experts(slot_of, owner, table, hosts, places)
        self.offers = Offers(*(torch.zeros(0) for _ in Offers._fields))
        self.counts, self.sources = (torch.full((keys,), -7, dtype=torch.int32) for _ in range(2))
        self.copies = torch.full((1 + 2 * n,), -7, dtype=torch.int32)
        self.all_counts = torch.full((keys,), -7, dtype=torch.int32)
        self.request: Request | None = None  # if the CPU computes some

    def offer(self, rng: torch.Generator, few: bool) -> None:
        """A part of the slots in some order, in some of them an owner of long ago; and what each expert would pay."""
        slots, keys = len(self.experts.owner), len(self.experts.slot_of)
        count = int(torch.randint(0, min(4 if few else slots, slots) + 1, (1,), generator=rng))
        order = torch.randperm(slots, generator=rng)[:count].int()
        owners = self.experts.owner[order.long()].clone()
        stale = torch.rand(count, generator=rng) < 0.2
        owners[stale] = torch.randint(0, keys, (int(stale.sum()),), generator=rng, dtype=torch.int32)
        kept = torch.randint(0, 6, (slots,), generator=rng).float().sort().values
        used = torch.randint(0, 6, (keys,), generator=rng).float()
        padded = torch.zeros(2, slots, dtype=torch.int32)
        padded[0, :count], padded[1, :count] = order, owners
        self.offers = Offers(torch.tensor([0, count], dtype=torch.int32), padded[0], padded[1], kept, used)

    def divide(self, rng: torch.Generator, rows: int, k: int) -> None:
        """The CPU computes some of what a layer misses, or takes no part, or there is none."""
        shares = torch.cat((torch.zeros(1), torch.rand(self.n, generator=rng) * torch.arange(1, self.n + 1) + 0.5))
        takes = int(torch.randint(-1, 3, (1,), generator=rng))
        x, live = torch.randn(rows, D, generator=rng), rows * k
        self.ask(shares.int(), min(takes, 1) * live, x, k, live)
        if takes < 0:
            self.request = None
        elif torch.rand(1, generator=rng) < 0.5:  # of a disk, with host memory for some of the experts
            keys = len(self.experts.slot_of)
            rows = self.n + torch.randperm(keys, generator=rng).int()
            away = torch.rand(keys, generator=rng) < 0.4
            beside = torch.randint(0, self.n + 1, shares.shape, generator=rng, dtype=torch.int32)
            self.request = self.request._replace(kept=Kept(rows.masked_fill(away, -1), beside))

    def ask(self, shares: torch.Tensor, pairs: int, x: torch.Tensor, k: int, live: int) -> None:
        """A mailbox of one row more than are asked, and a number that others have left."""
        rows, integers = len(x) + 1, {"dtype": torch.int32}
        number, state = torch.tensor([6]), torch.tensor([-7, -7], **integers)
        weights = [torch.full((rows, k), -7.0) for _ in range(3)]
        division = Division(
            number, torch.tensor([pairs], **integers), state, shares, *weights[:2], torch.tensor([-7], **integers)
        )
        ids = torch.full((rows, k), -7, **integers)
        answers = torch.tensor([6]), torch.tensor([5]), torch.tensor([-7, -7], **integers)
        mail = Mail(*answers, ids, weights[2], torch.full((rows, D), -7.0), torch.full((rows, D), -7.0))
        self.request = Request(x, torch.tensor([live], **integers), self.all_counts, division, mail)

    def to(self, device: str) -> "State":
        copy = object.__new__(State)
        copy.n = self.n
        copy.experts = Experts(*(tensor.to(device, copy=True) for tensor in self.experts))
        for name in ("counts", "sources", "copies", "all_counts"):
            setattr(copy, name, getattr(self, name).to(device, copy=True))
        copy.receive(self)
        return copy

    def receive(self, other: "State") -> None:
        """Takes over the offers and the request of another state, as they are before a step."""
        device = self.copies.device
        self.offers = Offers(*(tensor.to(device, copy=True) for tensor in other.offers))
        self.request = None
        if other.request is not None:
            x, live, _, division, mail, kept = other.request
            pinned = device.type == "cuda"
            there = [tensor.to(device, copy=True) for tensor in (x, live, *division)]
            here = [tensor.clone().pin_memory() if pinned else tensor.clone() for tensor in mail]
            has = None if kept is None else Kept(*(tensor.to(device, copy=True) for tensor in kept))
            self.request = Request(*there[:2], self.all_counts, Division(*there[2:]), Mail(*here), has)

    def run(self, function, layer: int, ids, weights) -> None:
        first = layer * self.n
        device = self.copies.device
        function(
            ids.to(device), weights.to(device), first, self.experts, self.offers, self.counts, self.sources,
            self.copies, None, self.request,
        )  # fmt: skip

    def said(self) -> list:
        """All that was decided; of ``copies`` what means something."""
        copies, total = self.copies.tolist(), int(self.copies[0])
        kept = [total, copies[1 : 1 + total], copies[1 + self.n : 1 + self.n + total]]
        tensors = (*self.experts, *self.offers, self.counts, self.sources, self.all_counts)
        asked = () if self.request is None else (*self.request.division, *self.request.mail)
        return [tensor.tolist() for tensor in (*tensors, *asked)] + kept


def naive(ids, weights, first, experts, offers, counts, sources, copies, live=None, request=None) -> None:
    """One expert, one offer at a time, as one would say it."""
    n = len(copies) // 2
    pairs, shares = (None, None) if request is None else request.division[1:4:2]
    counts[first : first + n] = 0
    for expert, weight in zip(ids.flatten().tolist(), weights.flatten().tolist(), strict=True):
        if 0 <= expert < n and weight != 0:
            counts[first + expert] += 1
    begin, end = offers.state.tolist()
    seen = range(begin, min(end, begin + lanes(n)))
    opened = []
    missing = any(counts[key] > 0 and experts.slot_of[key] < 0 for key in range(first, first + n))
    for number in seen if missing else ():
        slot, old = int(offers.slots[number]), int(offers.owners[number])
        over = old < first + n  # of this layer or one before it
        if experts.owner[slot] == old and not (over and counts[old] > 0):
            opened.append(number)
    wants, admitted = [], []
    for key in range(first, first + n):
        used, there = counts[key] > 0, experts.slot_of[key] >= 0
        sources[key] = (HIT if there else STREAMED) if used else UNUSED
        if used and not there and opened and offers.used[key] >= offers.kept[opened[0]]:
            wants.append(key)
    missed = [key for key in range(first, first + n) if int(sources[key]) == STREAMED]
    theirs, near, kept = [], list(missed), None if request is None else request.kept
    if kept is not None:
        near = [key for key in missed if int(kept.place_of[key]) >= 0]
        shares = shares if len(near) == len(missed) else kept.shares
    for _ in range(min(len(near), int(shares[len(missed)])) if pairs is not None and pairs > 0 else 0):
        theirs.append(min(near, key=lambda key: (int(counts[key]), float(offers.used[key]), key)))
        near.remove(theirs[-1])
        missed.remove(theirs[-1])
        sources[theirs[-1]] = COMPUTED
    if request is not None:
        divided(ids, weights, first, [key - first for key in theirs], n, request)
    wants = [key for key in wants if key in missed]
    for key, number in zip(wants, opened, strict=False):
        if offers.used[key] >= offers.kept[number]:
            admitted.append((key, int(offers.slots[number]), int(offers.owners[number])))
    if missing and (len(wants) > len(opened) or not opened):
        offers.state[0] = seen.stop
    elif wants:
        offers.state[0] = opened[len(wants) - 1] + 1
    copies[0] = len(admitted)
    for at, (key, slot, old) in enumerate(admitted):
        copies[1 + at], copies[1 + n + at], sources[key] = key, slot, ADMITTED
        experts.slot_of[old], experts.slot_of[key], experts.owner[slot] = -1, slot, key
        experts.table[:, old], experts.table[:, key] = experts.hosts[:, old], experts.places[:, slot]


def divided(ids, weights, first, theirs: list[int], n: int, request: Request) -> None:
    """One pair at a time."""
    x, live, counts, division, mail, kept = request
    counts[first : first + n] = 0
    division.state[0] = bool(theirs)
    for at, (expert, weight) in enumerate(zip(ids.flatten().tolist(), weights.flatten().tolist(), strict=True)):
        row, slot = divmod(at, ids.shape[1])
        if at < live and 0 <= expert < n and weight != 0:
            counts[first + expert] += 1
        cpu = at < division.pairs and weight != 0 and expert in theirs
        division.kept[row, slot], division.left[row, slot] = (0.0, weight) if cpu else (weight, 0.0)
        if theirs:
            number = expert if kept is None or not cpu else int(kept.place_of[first + expert]) - n
            mail.ids[row, slot], mail.weights[row, slot] = number if cpu else -1, weight if cpu else 0.0
    if theirs:
        rows = int(division.pairs) // ids.shape[1]
        mail.x[:rows], mail.head[0], mail.head[1] = x[:rows], 0 if kept else first // n, rows
        division.number.add_(1)
        mail.asked[0], mail.answered[0] = division.number[0], 0


def steps(
    layers: int, n: int, slots: int, k: int, rows: int, count: int, seed: int, functions: list
) -> tuple[State, int]:
    """Random steps through every function, each with a state of its own; after each layer all have said the same.

    Returns the first one's state and how many experts were admitted.
    """
    rng = torch.Generator().manual_seed(seed)
    states = [State(layers, n, slots, seed).to(device) for _, device in functions]
    admitted = 0
    for step in range(count):
        states[-1].offer(rng, few=step % 3 == 0)  # the last is on the CPU
        states[-1].divide(rng, rows, k)
        for state in states[:-1]:
            state.receive(states[-1])
        for layer in range(layers):
            ids = torch.randint(-1, n + 1, (rows, k), generator=rng, dtype=torch.int32)
            weights = (torch.rand(rows, k, generator=rng) > 0.1).float()
            for state, (function, _) in zip(states, functions, strict=True):
                state.run(function, layer, ids, weights)
            said = [state.said() for state in states]
            assert all(one == said[0] for one in said[1:]), (step, layer)
            admitted += int(states[0].copies[0])
    return states[0], admitted


@pytest.mark.parametrize(
    ("layers", "n", "slots", "k", "rows"),
    [(3, 8, 10, 2, 1), (2, 40, 33, 4, 3), (2, 31, 50, 2, 9), (1, 128, 20, 8, 2), (4, 3, 7, 1, 40)],
)
def test_follows_the_twin(device, layers, n, slots, k, rows):
    """31 and 40 experts: as many lanes as experts and one, and a third more; 40 rows: more pairs than a chunk."""
    state, admitted = steps(layers, n, slots, k, rows, 12, n, [(admit, device), (reference.admit, "cpu")])
    assert admitted > 0
    owned = state.experts.owner.long().cpu()
    assert len(owned.unique()) == slots, "a slot has two owners, or none"
    assert (state.experts.slot_of.cpu()[owned] == torch.arange(slots)).all()


def test_twin_follows_plain_loops():
    admitted = 0
    for seed in range(30):
        n = 1 + seed
        slots = 1 + 5 * seed % (2 * n)
        both = [(reference.admit, "cpu"), (naive, "cpu")]
        admitted += steps(2, n, slots, 1 + seed % 3, 1 + seed % 5, 10, seed, both)[1]
    assert admitted > 300


def one_layer(device, offers: Offers, ids: list[int]) -> State:
    """Six experts, of which 0 and 1 have slots 0 and 1, and the last step used nothing."""
    state = State(1, 6, 2, 0)
    state.experts.owner.copy_(torch.tensor([0, 1]))
    state.experts.slot_of.copy_(torch.tensor([0, 1, -1, -1, -1, -1]))
    state.experts.table.copy_(state.experts.hosts)
    state.experts.table[:, :2] = state.experts.places
    state.offers = offers
    state = state.to(device)
    state.run(admit, 0, torch.tensor([ids]), torch.ones(1, len(ids)))
    return state


def offers(slots, owners, kept, used) -> Offers:
    integers = (torch.tensor(values, dtype=torch.int32) for values in ([0, len(slots)], slots, owners))
    return Offers(*integers, torch.tensor(kept), torch.tensor(used))


def test_by_hand(device):
    """2 and 4 are missed and slot 0 is offered: 2 takes it, 4 finds none."""
    state = one_layer(device, offers([0], [0], [0.5], [1.0] * 6), [2, 4])
    assert state.sources.tolist() == [UNUSED, UNUSED, ADMITTED, UNUSED, STREAMED, UNUSED]
    assert state.experts.owner.tolist() == [2, 1] and state.experts.slot_of.tolist() == [-1, 1, 0, -1, -1, -1]
    assert state.copies[[0, 1, 7]].tolist() == [1, 2, 0] and state.offers.state.tolist() == [1, 1]
    experts = state.experts
    assert torch.equal(experts.table[:, 2], experts.places[:, 0])
    assert torch.equal(experts.table[:, 0], experts.hosts[:, 0])


@pytest.mark.parametrize(
    ("pairs", "shares", "takers"),
    [(0, 3, [2, 3]), (1, 0, [2, 3]), (1, 1, [3, 4]), (1, 2, [4]), (1, 3, [])],
    ids=["the CPU takes no part", "none of three", "one of three", "two of three", "all"],
)
def test_what_the_cpu_computes_gets_no_slot(device, pairs, shares, takers):
    """2, 3 and 4 are missed and both slots are offered. 2 is worth the least; 4 is worth as much as 3."""
    state = State(1, 6, 2, 0)
    state.experts.owner.copy_(torch.tensor([0, 1]))
    state.experts.slot_of.copy_(torch.tensor([0, 1, -1, -1, -1, -1]))
    state.offers = offers([0, 1], [0, 1], [0.5, 0.5], [1.0, 1.0, 1.0, 2.0, 2.0, 1.0])
    state.ask(torch.tensor([0, 0, 0, shares, 0, 0, 0], dtype=torch.int32), 3 * pairs, torch.ones(1, D), 3, 3)
    state = state.to(device)
    state.run(admit, 0, torch.tensor([[2, 3, 4]]), torch.ones(1, 3))
    assert [expert for expert in (2, 3, 4) if state.sources[expert] == ADMITTED] == takers
    theirs = [2, 3, 4][: shares * pairs]
    assert [expert for expert in (2, 3, 4) if state.sources[expert] == COMPUTED] == theirs
    assert state.request is not None and state.request.division.state[0] == bool(theirs)
    assert state.request.mail.asked.item() == (7 if theirs else 6)


@pytest.mark.parametrize(("n", "k", "rows"), [(1, 1, 1), (8, 2, 3), (7, 3, 5), (64, 8, 32), (1000, 2, 2)], ids=str)
def test_a_request_has_the_rows_and_pairs_of_the_cpu(device, n, k, rows):
    """The last row is padding in half of the layers; every tensor is the twin's."""
    rng = torch.Generator().manual_seed(n)
    state, asked = State(2, n, max(1, n // 4), n), 0
    state.offer(rng, few=False)
    for number in range(4):
        live = (rows - (rows > 1 and number % 2)) * k
        shares = [min(m, int(torch.randint(0, 5, (1,), generator=rng))) for m in range(n + 1)]
        state.ask(torch.tensor(shares, dtype=torch.int32), live, torch.randn(rows, D, generator=rng), k, live)
        ids = torch.randint(-1, n + 1, (rows, k), generator=rng, dtype=torch.int32)
        weights = torch.randint(0, 4, (rows, k), generator=rng) / 2
        there = state.to(device)
        for function, each in ((admit, there), (reference.admit, state)):
            where, bound = each.copies.device, each.request.live
            given = ids.to(where), weights.to(where), number % 2 * n, each.experts, each.offers, each.counts
            function(*given, each.sources, each.copies, bound, each.request)
        assert there.said() == state.said()
        asked += int(state.request.division.state[0])
    assert asked > 0 or n == 1


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        (offers([0], [0], [2.0], [1.0] * 6), [2]),
        (offers([0], [0], [0.0], [1.0] * 6), [2, 0]),
        (offers([0], [5], [0.0], [1.0] * 6), [2]),
        (offers([], [], [], [1.0] * 6), [2]),
    ],
    ids=["worth more to its owner", "its owner is used", "somebody else's by now", "nothing is offered"],
)
def test_what_is_not_taken(device, given, ids):
    before = given.state.clone()
    state = one_layer(device, given, ids)
    assert int(state.copies[0]) == 0 and state.experts.owner.tolist() == [0, 1]
    assert state.sources[2] == STREAMED
    assert before.tolist()[1] == int(state.offers.state[1])


def test_void_offers_do_not_stop_the_next_layers(device):
    """All that a layer sees is void: the next one looks behind it."""
    state = State(2, 2, 1, 0)
    state.experts.owner[0], state.experts.slot_of[:] = 3, torch.tensor([-1, -1, -1, 0])
    many = lanes(2)
    state.offers = offers([0] * (many + 1), [2] * many + [3], [0.0] * (many + 1), [1.0] * 4)
    state = state.to(device)
    for layer, taken in ((0, 0), (1, 1)):
        state.run(admit, layer, torch.tensor([[0]]), torch.ones(1, 1))
        assert int(state.copies[0]) == taken
    assert state.experts.owner.tolist() == [2]


@pytest.mark.parametrize("ids", [[0, 1], [-1, 7], [2, 3]], ids=["hits", "padding", "behind the live pairs"])
def test_a_layer_that_misses_nothing_leaves_the_offers(device, ids):
    """Also those that would be void for all layers behind it."""
    state = State(1, 6, 2, 0)
    state.experts.owner.copy_(torch.tensor([0, 1]))
    state.experts.slot_of.copy_(torch.tensor([0, 1, -1, -1, -1, -1]))
    state.offers = offers([0, 1], [5, 5], [0.0, 0.0], [1.0] * 6)
    state = state.to(device)
    before = [tensor.clone() for tensor in (*state.experts, *state.offers)]
    live = torch.zeros(1, dtype=torch.int32, device=device) if ids == [2, 3] else None
    given = torch.tensor([ids], device=device), torch.ones(1, 2, device=device)
    admit(*given, 0, state.experts, state.offers, state.counts, state.sources, state.copies, live)
    assert int(state.copies[0]) == 0
    assert all(map(torch.equal, (*state.experts, *state.offers), before))
    used = [1, 1] if ids == [0, 1] else [0, 0]
    assert state.counts.tolist() == [*used, 0, 0, 0, 0]
    assert state.sources.tolist() == [HIT if count else UNUSED for count in state.counts]


@pytest.mark.parametrize("live", [0, 3, 8, 100])
def test_pairs_behind_the_live_ones_are_padding(device, live):
    """As if their ids were none of the layer's; the rest is decided as ever."""
    rng = torch.Generator().manual_seed(live)
    ids = torch.randint(0, 8, (4, 2), generator=rng, dtype=torch.int32)
    marked = torch.where(torch.arange(8).view(4, 2) < live, ids, -1)
    state = State(1, 8, 3, 0)
    state.offer(rng, few=False)
    marks, limit = state.to(device), state.to(device)
    marks.run(admit, 0, marked, torch.ones(4, 2))
    bound = torch.tensor([live], dtype=torch.int32, device=device)
    admit(
        ids.to(device), torch.ones(4, 2, device=device), 0, limit.experts, limit.offers, limit.counts, limit.sources,
        limit.copies, bound,
    )  # fmt: skip
    assert marks.said() == limit.said()


def test_what_does_not_fit_is_refused(device):
    state = State(2, 4, 3, 0)
    state.offer(torch.Generator().manual_seed(0), few=False)
    state = state.to(device)
    ids, weights = torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, 2)
    with pytest.raises(AssertionError, match="a layer of 4 from 5 on, of 8"):
        admit(ids, weights, 5, state.experts, state.offers, state.counts, state.sources, state.copies)
    for name in ("counts", "sources", "copies"):
        tensors = {key: getattr(state, key) for key in ("counts", "sources", "copies")}
        tensors[name] = tensors[name].long()
        with pytest.raises(AssertionError):
            admit(ids, weights, 0, state.experts, state.offers, *tensors.values())
