"""An engine's side and real workers over loopback, see ``worker_threads``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import zmq
from looped_experts import Looped
from memory_store import MemoryStore
from msgspec.structs import replace
from torch import Tensor
from vllm_spac.kernels.formats import Format
from worker_threads import (
    ANOTHER,
    EXPERTS,
    FINGERPRINT,
    HIDDEN,
    LAYERS,
    SECRET,
    SHAPE,
    TOP_K,
    Threads,
    assert_right,
    connected,
    counts_of,
    expert,
    here,
    layer_input,
    row_by_row,
    stored,
    until,
)

from vllm_spac.core import MoEShape, TensorSpec
from vllm_spac.cpu_kernels._library import missing
from vllm_spac.errors import ConfigError, SpacError, StoreError
from vllm_spac.integration.layers import cpu_kernel
from vllm_spac.methods.od_moe.client import WorkerClient
from vllm_spac.methods.od_moe.division import ExpertDivider
from vllm_spac.methods.od_moe.inquiries import WorkerCounts
from vllm_spac.methods.od_moe.layer_call import Forward, LayerCall
from vllm_spac.methods.od_moe.pool import ExpertPool
from vllm_spac.methods.od_moe.roster import Roster
from vllm_spac.methods.od_moe.wire import (
    FrameError,
    FrameKind,
    Header,
    Limits,
    Service,
    Speed,
    decode,
    encode,
    hint_payload,
    raw,
    resident_payload,
    text_payload,
)
from vllm_spac.methods.od_moe.worker_link import Lost, WorkerLink, facts
from vllm_spac.methods.od_moe.workers_execution import WorkerStore

compiled = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.fixture(autouse=True)
def equal_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers in threads of a busy machine measure what they like, and the division follows from it."""
    measured = ExpertPool.speed

    def speed(self: ExpertPool, dtype: torch.dtype) -> Speed:
        found = measured(self, dtype)
        assert found.expert > 0 and found.row > 0 and found.load >= 0
        return Speed(expert=1e-4, row=1e-5, load=1e-3)

    monkeypatch.setattr(ExpertPool, "speed", speed)


@pytest.fixture
def client() -> Iterator[Callable[..., WorkerClient]]:
    made = []

    def get(places: Threads, **options) -> WorkerClient:
        made.append(connected(places, **options))
        return made[-1]

    yield get
    for each in made:
        each.close()


@pytest.mark.parametrize("slots", ["3", "50%", "100%"])
def test_rows_have_the_bits_of_the_local_kernel(client, slots: str) -> None:
    """From one row to a prompt in several parts, with slots for a part of the experts."""
    places = Threads(2)
    found = client(places, slots=slots)
    for step, rows in enumerate((1, 7, 300), 1):
        for layer in range(LAYERS):
            assert_right(found, layer, rows, seed=layer, step=step)
    for worker, service in enumerate(found.connections.services):
        held = [key for key in range(SHAPE.total) if places.stores[worker].holds(key)]
        assert held == service.keys, "a worker has its layers and no other"
    assert [share.rows for share in found.shares.workers] == [3 * 308, 2 * 308]
    assert (found.shares.elsewhere, found.shares.dropped) == (0, 0)
    counts = counts_of(found)
    for worker, share in enumerate(found.shares.workers):
        of_it = counts["expert_workers"][f"worker-{worker}"]
        assert (of_it["rows"], of_it["losses"], of_it["present"]) == (share.rows, 0, 1)
        assert of_it["sent_bytes"] > 4 * HIDDEN * share.rows and of_it["received_bytes"] > 4 * HIDDEN * share.rows
        assert of_it["round_trip_seconds"] > of_it["compute_seconds"] > 0
        assert of_it["memory_bytes"] > of_it["slot_bytes"] > 0 and of_it["resident"] <= of_it["slots"]
    for name in ("hits", "misses", "loads", "slots", "resident", "slot_bytes"):
        assert counts[name] == sum(each[name] for each in counts["expert_workers"].values()), name
    assert counts["hits"] + counts["misses"] > 0 and counts["slots"] == found.slots
    assert (counts["misses"] > 0) == (slots != "100%")


@pytest.mark.parametrize("slots", ["3", "50%", "100%"])
def test_experts_are_divided_among_the_workers_of_a_group(client, slots: str) -> None:
    """Two groups of two: each row's two experts may be at two workers, and each is loaded by one of them only."""
    places = Threads(4)
    found = client(places, size=2, slots=slots)
    for layer in range(LAYERS):
        assert_right(found, layer, rows=7, seed=layer)
    needed = sum(len(layer_input(7, layer)[2].unique()) for layer in range(LAYERS))
    counts = counts_of(found)
    assert counts["hits"] + counts["misses"] >= needed, "several waves, where there are too few slots"
    assert counts["hits"] + counts["misses"] == needed or slots == "3", "each expert was used by one worker"
    assert found.divides and "each layer's experts divided among 2; if one is lost: the others of its group" in (
        found.describe()
    )
    for step, rows in enumerate((1, 300), 2):
        for layer in range(LAYERS):
            assert_right(found, layer, rows, seed=layer, step=step)
    shares = found.shares
    assert (shares.elsewhere, shares.dropped) == (0, 0)
    for first, layers in ((0, 3), (2, 2)):  # layers 0, 2 and 4 belong to the first group
        rows = [shares.workers[worker].rows for worker in (first, first + 1)]
        assert layers * 308 <= sum(rows) < 2 * layers * 308 and min(rows) > 0
        assert [running.worker._session.hosted.service.own_layers for running in places.running[first : first + 2]] == (
            [tuple(range(first // 2, LAYERS, 2))] * 2
        )
    assert (counts_of(found)["misses"] > 0) == (slots != "100%")


def test_a_lost_worker_s_experts_go_to_the_others_of_its_group(client) -> None:
    """They compute whole rows then, with the bits of one process; later they divide again."""
    places = Threads(2)
    found = client(places, size=2, slots="100%")
    for seed in range(3):
        assert_right(found, 1, seed=seed)
    places.running[1].end()
    assert_right(found, 1, seed=5)
    given = layer_input(3, seed=6)
    assert torch.equal(found.compute(Forward(2), 1, *given), here(1, *given)), "whole rows at one worker"
    lost = found.shares.workers[1]
    until(lambda: assert_right(found, 1, seed=7) or lost.readmissions == 1)
    before = lost.rows
    assert_right(found, 1, rows=8, seed=8)
    assert lost.rows > before, "it is asked again"
    assert found.shares.elsewhere == 0


def test_a_group_is_told_what_to_load_each_its_part(client) -> None:
    """Right hints: no miss, and both load one of a row's two experts."""
    places = Threads(2)
    found = client(places, size=2, **CACHELESS)
    for step in range(1, 4):
        for layer in range(LAYERS):
            given = layer_input(1, seed=100 * step + layer)
            found.send_hint(step, layer, given[2][0].numpy())
            read(found, places)
            torch.testing.assert_close(found.compute(Forward(step), layer, *given), here(layer, *given))
    counts = counts_of(found)
    assert counts["misses"] == 0 and counts["hits"] == 3 * LAYERS * TOP_K
    assert all(each["prefetches"] > LAYERS for each in counts["expert_workers"].values())


def test_a_worker_that_does_not_say_how_fast_it_is(client, monkeypatch: pytest.MonkeyPatch) -> None:
    for speed, said in (
        (None, "worker-0 does not say how fast it is"),
        (Speed(expert=1.0, row=1.0, load="fast"), "a READY frame says something else: .*load"),  # type: ignore[arg-type]
        (Speed(expert=1.0, row=1.0, load=-1.0), "a READY frame says something else: .*load"),
    ):
        monkeypatch.setattr(ExpertPool, "speed", lambda self, dtype, speed=speed: speed)
        with pytest.raises(SpacError, match=said):
            client(Threads(2), size=2)


def test_a_worker_that_does_not_say_how_many_slots_it_has(client, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    """One that was lost and says so when it returns is tried again, and its rows are computed meanwhile."""
    real = WorkerLink.ask

    def without(self, kind, *given, **fields):
        frame = real(self, kind, *given, **fields)
        return replace(frame, payload=memoryview(b"{}")) if kind == FrameKind.FILL else frame

    places = Threads(2)
    found = client(places)
    with monkeypatch.context() as patch:
        patch.setattr(WorkerLink, "ask", without)
        with pytest.raises(SpacError, match="a READY frame says something else: .*slots"):
            client(Threads(2))
        places.running[0].end()
        until(lambda: assert_right(found, 0) or "worker-0 is not back yet: spac: a READY frame says" in caplog.text)
    until(lambda: assert_right(found, 0, seed=1) or found.shares.workers[0].readmissions == 1)


def test_a_worker_s_part_follows_from_its_own_speed(client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have all experts; one takes a second for an expert, and gets none of three."""
    places = Threads(2)

    def speed(self: ExpertPool, dtype: torch.dtype) -> Speed:
        first = places.running[0].worker._session.hosted.pool is self
        return Speed(expert=1e-4 if first else 1.0, row=0.0, load=0.0)

    monkeypatch.setattr(ExpertPool, "speed", speed)
    found = client(places, size=2, slots="100%")
    for seed in range(4):
        assert_right(found, 0, seed=seed)
    assert [share.rows for share in found.shares.workers] == [12, 0]


def test_results_of_a_row_are_added_in_float32() -> None:
    """In bfloat16 256 + 1 + 1 + 1 is 256, and from 259 only the last rounding follows."""
    roster, limits = Roster(4, bytes(16), size=4), Limits(served=4)
    divider = ExpertDivider(1, 4, [(0,)] * 4)
    for worker in range(4):
        roster.admit(worker, 1)
        divider.admit(worker, Speed(1.0, 1.0, 1.0))
    x = torch.ones(1, 2, dtype=torch.bfloat16)
    ids = torch.arange(4, dtype=torch.int32)[None]
    call = LayerCall(roster, Forward(1), 0, x, torch.ones(1, 4), ids, 128, divider)
    for worker, message in call.outgoing(0.0):
        header = replace(decode(message, limits).header, kind=FrameKind.ROWS, top_k=4)
        out = torch.full_like(x, 256.0 if worker == 0 else 1.0)
        answer = encode(header, raw(out) + resident_payload(np.ones(4, dtype=bool)))
        assert call.incoming(worker, decode(answer, limits), 0.0)
    assert call.done and torch.equal(call.out, torch.full_like(x, 260.0)), "the bfloat16 next to 259"


def test_rows_with_some_experts_are_refused_where_rows_are_whole(client) -> None:
    undivided, group = Threads(2), Threads(2)
    client(undivided), client(group, size=2)
    whole, divided = pools(undivided)[0], pools(group)[0]
    x, weights, ids = layer_input(2)
    some = ids.clone()
    some[0, 1] = -1
    for given in ((x, weights, some), (x, weights[:, :1], ids[:, :1])):
        with pytest.raises(SpacError, match="experts that layer 0 does not have"):
            whole.run(Forward(1), 0, *given)
        divided.run(Forward(1), 0, *given)
    some[1, 0] = EXPERTS
    with pytest.raises(SpacError, match="experts that layer 0 does not have"):
        divided.run(Forward(1), 0, x, weights, some)


def test_a_second_start_packs_nothing(client, monkeypatch: pytest.MonkeyPatch) -> None:
    places = Threads(2)
    first = connected(places)
    first.connections.places = Threads(0)  # whose end ends no worker
    first.close()
    monkeypatch.setattr(WorkerStore, "put", None)
    assert_right(client(places), 3)


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16])
def test_the_row_that_admits_workers_has_float32_weights_whatever_torch_s_default(client, default: torch.dtype) -> None:
    """vLLM sets the default to the model's dtype while it loads, which is when a start that packs nothing gets here;
    its kernel takes routing weights in float32 only."""
    places, seen = Threads(2), set()

    def kernel(x: Tensor, weights: Tensor, ids: Tensor, experts: Mapping[str, Tensor]) -> Tensor:
        seen.add((x.dtype, weights.dtype))
        return row_by_row(x, weights, ids, experts)

    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        client(places, kernel=kernel)
    finally:
        torch.set_default_dtype(before)
    assert seen == {(torch.float32, torch.float32)}


def test_an_expert_that_was_packed_wrongly_is_dropped_everywhere(client) -> None:
    places = Threads(2)
    found = stored(places, size=2)
    dropped = []
    for store in places.stores:
        store.drop = dropped.append  # type: ignore[method-assign]
    found.drop(7)
    assert dropped == [7, 7] and not found.holds(7)
    found.close()


def test_a_lost_worker_s_rows_are_computed_here_and_it_returns(client) -> None:
    places = Threads(3)
    found = client(places)
    assert_right(found, 1)
    places.running[1].end()
    assert_right(found, 1, seed=1)
    lost = found.shares.workers[1]
    assert lost.rows == 3 and found.shares.elsewhere == 3
    assert counts_of(found)["expert_workers"]["worker-1"]["memory_bytes"] == 0, "it is gone"
    until(lambda: assert_right(found, 1, seed=2) or lost.readmissions == 1)
    before = lost.rows
    assert_right(found, 1, seed=3)
    assert lost.rows > before, "it is asked again"
    assert counts_of(found)["expert_workers"]["worker-1"]["present"] == 1


@pytest.mark.parametrize("packed", [0, 7, SHAPE.total])
def test_this_process_has_all_experts_wherever_workers_pack(client, packed: int) -> None:
    """What its own disk lacks, since workers are on other machines, it asks them for before it serves."""
    places, copy, put = Threads(2), MemoryStore(SHAPE, FINGERPRINT), []
    for key in range(packed):
        copy.put(key, expert(key))
    own = copy.put
    copy.put = lambda key, tensors: (put.append(key), own(key, tensors))[1]  # type: ignore[method-assign]
    found = client(places, copy=copy)
    assert put == list(range(packed, SHAPE.total)), "and no other one again"
    places.may_return = False
    places.running[0].end()
    for layer in range(LAYERS):
        assert_right(found, layer, rows=5, seed=layer)
    assert found.shares.elsewhere == 3 * 5, "layers 0, 2 and 4"
    assert "this process, from its disk" in found.describe()


def test_a_copy_without_room_is_refused_before_anything_is_served(client) -> None:
    copy = MemoryStore(SHAPE, FINGERPRINT)

    def reserve(experts: int) -> None:
        raise StoreError(f"spac: {experts} experts do not fit")

    copy.reserve = reserve  # type: ignore[method-assign]
    with pytest.raises(StoreError, match=f"{SHAPE.total} experts do not fit"):
        client(Threads(1), copy=copy)


def test_a_worker_that_hangs_is_late(client) -> None:
    """Its sockets live, and it answers nothing: the deadline finds it, and its late answers are dropped."""
    places = Threads(2)
    held, go = threading.Event(), threading.Event()
    go.set()

    def hanging(*given):
        held.set()
        go.wait(600)
        return row_by_row(*given)

    places.kernel = hanging
    for number in range(2):  # with the kernel that hangs
        places.running[number].end()
        places.running[number] = places._start(number)
    found = client(places)
    places.may_return = False
    go.clear()
    assert_right(found, 0)
    assert (found.shares.workers[0].losses, found.shares.workers[0].rows_lost) == (1, 3)
    assert found.shares.elsewhere == 3
    go.set()
    until(lambda: assert_right(found, 0, seed=1) or found.shares.dropped > 0)


@pytest.mark.parametrize("size", [1, 2])
def test_a_damaged_expert_at_a_worker(client, size: int) -> None:
    """What it cannot read it does not compute: the rows go to the other one of its group, or to this process."""
    places = Threads(2)
    found = client(places, size=size, slots="2")
    broken = places.stores[0]

    def refuse(key: int, into: Mapping[str, Tensor]) -> int:
        raise StoreError(f"expert {key} is damaged")

    broken.read = refuse  # type: ignore[method-assign]
    for seed in range(4):
        assert_right(found, 0, rows=6, seed=seed)
    instead = found.shares.elsewhere if size == 1 else found.shares.workers[1].rows
    assert found.shares.workers[0].rows_lost > 0 and instead > 0


@pytest.mark.parametrize("given", ["rows", "weights", "nothing"])
@pytest.mark.parametrize("spoiled", ["all", "another row"])
def test_an_answer_that_is_no_number_counts_as_lost(client, given: str, spoiled: str) -> None:
    """Row by row: only one whose input is no number may have such a result in stock vLLM, too."""
    wrong: list[int] = []

    def spoiling(*arguments):
        out = row_by_row(*arguments)
        out[wrong] = torch.nan
        return out

    found = client(Threads(1, spoiling))
    x, weights, ids = layer_input(4)
    if given != "nothing":
        {"rows": x, "weights": weights}[given][1, 0] = torch.inf
    honest = here(0, x, weights, ids)
    assert bool(honest[1].isfinite().all()) == (given == "nothing")
    wrong[:] = range(4) if spoiled == "all" else [2]
    right = found.compute(Forward(1), 0, x, weights, ids)
    assert found.shares.workers[0].rows_lost == 4 and found.shares.elsewhere == 4
    torch.testing.assert_close(right, honest, rtol=0, atol=0, equal_nan=True)
    wrong[:] = [1]
    found.compute(Forward(2), 0, x, weights, ids)
    assert found.shares.workers[0].rows == (0 if given == "nothing" else 4)


def test_a_worker_with_another_kernel_is_not_admitted(client) -> None:
    """One unit in the last place of one element."""

    def nearly(*given):
        out = row_by_row(*given)
        out[0, 0] = torch.nextafter(out[0, 0], torch.tensor(torch.inf))
        return out

    with pytest.raises(ConfigError, match="worker-0 at .* computes other bits"):
        client(Threads(2, nearly))


@compiled
def test_where_an_engine_is_on_a_gpu_a_worker_may_round_otherwise_and_no_more(client) -> None:
    """The sum of a row's experts is rounded once, and not after each one. Two workers call the kernel at a time.

    Three slots: experts are replaced between layers, and while the rows of a prompt are computed.
    """
    simd_kernel = cpu_kernel.of_worker(cpu_kernel.SIMD, "silu", SHAPE)
    found = client(Threads(2, simd_kernel), exact=False, slots="3")
    for step, rows in enumerate((1, 7, 300, 2), 1):
        for layer in range(LAYERS):
            assert_right(found, layer, rows, seed=layer, step=step, exact=False)
    assert found.shares.elsewhere == 0 and counts_of(found)["misses"] > 4 * LAYERS

    def wrong(x: Tensor, weights: Tensor, ids: Tensor, experts: Mapping[str, Tensor]) -> Tensor:
        return 1.001 * simd_kernel(x, weights, ids, experts)

    with pytest.raises(ConfigError, match="worker-0 at .* compared with this process: results differ by"):
        client(Threads(2, wrong), exact=False)


def test_a_second_engine_is_refused_while_the_first_one_is_there(client) -> None:
    places = Threads(1)
    client(places)
    context = zmq.Context()
    link = WorkerLink(context, places.addresses()[0], SECRET, facts(), "another")
    with pytest.raises(Lost, match="serves another engine"):
        link.open(20)
    link.drop()
    context.destroy(linger=0)


def test_an_engine_that_was_killed_gives_way_to_the_next() -> None:
    """It leaves without a word, and its connections are closed by the system."""
    places = Threads(1)
    first = connected(places)
    for link in first.connections.links.values():
        link.drop()
    first.connections.links.clear()
    second = connected(places)
    assert_right(second, 2)
    first.connections.places = Threads(0)
    first.close()
    second.close()


@pytest.mark.parametrize(
    ("secret", "changed", "says"),
    [
        (ANOTHER, {}, "has another secret"),
        (SECRET, {"vllm": "0.1"}, r"could differ in bits: vllm .* here and '0\.1' there"),
    ],
    ids=["another cluster", "another version"],
)
def test_workers_that_are_not_ours_are_found_out(secret: bytes, changed: dict, says: str) -> None:
    places = Threads(1)
    context = zmq.Context()
    link = WorkerLink(context, places.addresses()[0], secret, facts() | changed, "engine")
    with pytest.raises(SpacError, match=says):
        link.open(20)
    link.drop()
    context.destroy(linger=0)
    places.close()


CACHELESS = {"policy": "drop", "slots": "2k", "hints": True}


def pools(places: Threads) -> list[ExpertPool]:
    hosted = [running.worker._session.hosted for running in places.running if running.worker._session is not None]
    return [each.pool for each in hosted if each is not None and each.pool is not None]


def read(found: WorkerClient, places: Threads) -> None:
    """Waits until the workers have taken every hint and read what it names."""
    counts_of(found)  # answered after the hints, which were sent before
    tickets = [pool._execution._transfers.ahead._tickets for pool in pools(places)]
    until(lambda: all(ticket.done.done() for each in tickets for ticket in list(each.values())))


def test_cacheless_workers_load_what_they_are_told(client) -> None:
    """Slots for two tokens' experts at each worker: with right hints there is no miss, with wrong ones no wrong bit."""
    places = Threads(2)
    found = client(places, **CACHELESS)
    assert found.slots == 2 * 2 * TOP_K
    for step in range(1, 4):
        for layer in range(LAYERS):
            given = layer_input(1, seed=100 * step + layer)
            right = given[2][0].numpy()
            found.send_hint(step, layer, right if step < 3 else (right + 1) % EXPERTS)
            read(found, places)
            assert torch.equal(found.compute(Forward(step), layer, *given), here(layer, *given))
        counts = counts_of(found)
        if step == 2:
            assert counts["misses"] == 0 and counts["prefetch_hits"] > 0 and counts["hits"] == 2 * LAYERS * TOP_K
    assert counts["misses"] > 0
    of_them = counts["expert_workers"].values()
    assert sum(each["hints"] for each in of_them) == 3 * LAYERS and all(each["prefetches"] > 0 for each in of_them)


def test_a_worker_with_one_layer_is_told_of_its_next_step(client) -> None:
    """Its layer has run and runs next: what is said in between is not about the past."""
    places = Threads(LAYERS)
    found = client(places, **CACHELESS)
    for step in range(1, 5):
        given = layer_input(1, seed=step)
        found.send_hint(step, 0, given[2][0].numpy())
        read(found, places)
        assert torch.equal(found.compute(Forward(step), 0, *given), here(0, *given))
    counts = counts_of(found)["expert_workers"]["worker-0"]
    assert (counts["hints"], counts["misses"]) == (4, 0) and counts["prefetch_hits"] > 0


def test_hints_that_cannot_be(client) -> None:
    """Late, repeated, out of order, of other experts or layers, damaged: dropped, and the next rows are right."""
    places = Threads(1)
    found = client(places, **CACHELESS)
    assert_right(found, 2, step=5)
    link, epoch = found.connections.links[0], found.roster.epoch(0)
    assert epoch is not None

    def sent(step: int, layer: int, sequence: int, experts: list[int], **changes) -> tuple[bytes, bytes]:
        fields = {"top_k": len(experts), "fingerprint": bytes.fromhex(FINGERPRINT)} | changes
        return encode(Header(FrameKind.HINT, epoch, step, sequence, layer, **fields), hint_payload(experts))

    newest = sent(5, 3, 1000, [4, 5])
    flipped = newest[0], bytes([newest[1][0] ^ 1]) + newest[1][1:]
    for message in (
        sent(5, 2, 900, [0, 1]),  # its layer has run
        sent(4, 4, 901, [0, 1]),
        newest,
        newest,
        sent(5, 3, 999, [0, 1]),  # overtaken
        sent(5, 3, 1001, [0, 6]),
        sent(5, 3, 1002, [-1, 0]),
        sent(5, 3, 1003, [2, 2]),
        sent(5, 9, 1004, [0, 1]),
        sent(5, 3, 1005, [0, 1], fingerprint=bytes(16)),
        sent(5, 3, 1006, [0, 1, 2], top_k=2),
        sent(5, 3, 1007, [0] * 7),
        flipped,
    ):
        link.send(message)
    read(found, places)
    [pool] = pools(places)
    assert counts_of(found)["expert_workers"]["worker-0"]["hints"] == 1
    first = pool._number[3] * EXPERTS
    assert list(pool._execution._loader.prefetcher.expected.ranked()) == [first + 4, first + 5]
    for layer in range(LAYERS):
        assert_right(found, layer, seed=layer, step=6)


def test_a_hint_to_a_lost_worker_is_dropped(client) -> None:
    places = Threads(1)
    found = client(places, **CACHELESS)
    places.may_return = False
    places.running[0].end()
    found.send_hint(1, 0, np.array([0, 1]))
    assert_right(found, 0)
    found.send_hint(1, 1, np.array([0, 1]))


def test_looking_at_counters_waits_for_nobody_and_loses_nobody(client) -> None:
    """A worker that answers nothing: rows of others go on, and what it said before is shown with its age."""
    places = Threads(2)
    found = client(places)
    assert_right(found, 0)
    assert_right(found, 1)
    before = counts_of(found)["expert_workers"]
    held, go = threading.Event(), threading.Event()
    worker = places.running[0].worker
    count = worker._count

    def hangs(session):
        held.set()
        go.wait(600)
        return count(session)

    worker._count = hangs
    try:
        until(lambda: found.counts() and held.is_set())  # an older question may have been out when it changed
        looks = [found.counts()["expert_workers"]]
        for seed in range(10):
            assert_right(found, 1, seed=seed, step=2)
            looks.append(found.counts()["expert_workers"])
        assert not go.is_set(), "none of these waited"
        asked = time.monotonic()
    finally:
        go.set()
    until(lambda: found.connections.links[0].socket.poll(0))
    looked = time.monotonic()
    late = found.counts()["expert_workers"]["worker-0"]["counts_age_seconds"]
    assert looked - late < asked, "of the question, since what is counted may be as old"
    until(lambda: found.counts()["expert_workers"]["worker-1"]["hits"] > before["worker-1"]["hits"])
    for look in looks:
        assert look["worker-0"]["present"] == 1 and look["worker-0"]["hits"] == before["worker-0"]["hits"]
    ages = [look["worker-0"]["counts_age_seconds"] for look in looks]
    assert ages == sorted(ages) and ages[-1] > ages[0]
    assert_right(found, 0, step=3)
    after = counts_of(found)["expert_workers"]["worker-0"]
    assert after["hits"] > before["worker-0"]["hits"] and after["losses"] == after["readmissions"] == 0
    assert found.shares.dropped == 0, "what workers count is no answer of a layer"


def test_counters_go_on_with_a_pool_and_start_again_without_one() -> None:
    """A worker that was only cut off goes on counting; one that was started again begins at zero."""
    counts = WorkerCounts()
    said = {"pool": "a", "hits": 3, "misses": 1, "bytes": {"disk": 5}, "memory_bytes": 70, "slots": 2, "steps": {}}
    counts.count(0, said, 0.0)
    counts.remove(0)
    assert (counts.of(0)["hits"], counts.of(0)["memory_bytes"], counts.total()["slots"]) == (3, 0, 0)
    counts.count(0, {**said, "hits": 4}, 0.0)
    assert (counts.of(0)["hits"], counts.of(0)["memory_bytes"]) == (4, 70)
    counts.remove(0)
    counts.count(0, {**said, "pool": "b", "hits": 10, "bytes": {"disk": 1, "host": 1}}, 0.0)
    counts.count(1, {**said, "hits": 100, "misses": "many", "bytes": 7, "unknown": 5}, 0.0)
    assert counts.of(0)["hits"] == 14 and counts.of(0)["loaded_bytes"] == 7
    total = counts.total()
    assert (total["hits"], total["misses"], total["bytes"], total["slots"]) == (114, 2, {"disk": 6, "host": 1}, 4)
    assert "memory_bytes" not in total and "unknown" not in total


def test_counts_are_taken_once_and_only_when_they_were_asked_for() -> None:
    counts, link = WorkerCounts(), SimpleNamespace(send=lambda message: True)

    def heard(epoch: int, sequence: int) -> bool:
        header = Header(FrameKind.COUNTS, epoch, sequence=sequence)
        try:
            counts.receive(0, decode(encode(header, text_payload({"pool": "a", "hits": 3})), Limits()))
        except FrameError:
            return False
        return True

    assert not heard(0, 0) and not heard(7, 1)
    counts.request(0, link, 7, 1)  # type: ignore[arg-type]
    assert not heard(7, 2) and not heard(8, 1) and counts.of(0)["hits"] == 0
    assert heard(7, 1) and not heard(7, 1) and counts.of(0)["hits"] == 3


@compiled
@pytest.mark.parametrize("kind", [Format("int4", 32), Format("e2m1", 32)], ids=["int4", "mxfp4"])
def test_a_worker_computes_experts_as_they_are_packed(kind: Format) -> None:
    """As the weights that they mean, whose rows a loop of torch operators computes."""
    hidden, intermediate = 64, 32
    sizes = {"w13": (2 * intermediate, hidden), "w2": (hidden, intermediate)}
    rng, experts = torch.Generator().manual_seed(3), {}
    for name, (rows, columns) in sizes.items():
        codes = torch.randint(0, 256, (SHAPE.total, *kind.code_shape(rows, columns)), generator=rng)
        word = 0x7A7A7A7A if kind.exponents else 0x3D003D00  # 2**-5 of four groups; 1/32 in bfloat16 of two
        experts[f"{name}_weight"] = codes.byte()
        experts[f"{name}_scale"] = torch.full((SHAPE.total, *kind.scale_shape(rows, columns)), word, dtype=torch.int32)
    specs = {name: TensorSpec(tuple(t.shape[1:]), t.dtype) for name, t in experts.items()}
    shape = MoEShape(SHAPE.layers, EXPERTS, TOP_K, specs, kind)
    store = MemoryStore(shape, FINGERPRINT)
    for key in range(shape.total):
        store.put(key, {name: tensor[key] for name, tensor in experts.items()})
    mine = (1, 4)
    sent = Service.of(
        shape, FINGERPRINT, mine, hidden=hidden, dtype=torch.bfloat16, slots="3", policy="lru", isa=cpu_kernel.SIMD
    )
    service = decode(encode(Header(FrameKind.SERVE), text_payload(sent)), Limits()).text(Service)
    assert service == sent and service.shape == shape
    pool = ExpertPool(service, store, cpu_kernel.of_worker(service.isa, "silu", service.shape), 1 << 20)
    loop = Looped(shape, 1, "silu")
    for step, layer in enumerate([*mine, *mine], 1):
        x, weights = torch.randn(9, hidden, generator=rng).bfloat16(), torch.rand(9, TOP_K, generator=rng)
        ids = torch.randint(0, EXPERTS, (9, TOP_K), generator=rng, dtype=torch.int32)
        found = pool.run(Forward(step), layer, x, weights, ids)
        own = {name: tensor[layer * EXPERTS : (layer + 1) * EXPERTS] for name, tensor in experts.items()}
        expected = loop.run(x, weights, ids, own)
        assert (found.float() - expected).abs().max() < expected.abs().max() / 64
    assert pool.counts()["misses"] > EXPERTS, "slots are used again, by experts of both layers"
    pool.close()
