"""Expert workers in threads, with a kernel in torch whose rows are independent, and an engine's side of them."""

from __future__ import annotations

import resource
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import zmq
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a program, too
from memory_store import MemoryStore

from vllm_spac.core import MoEShape, TensorSpec
from vllm_spac.errors import SpacError
from vllm_spac.methods.od_moe import division
from vllm_spac.methods.od_moe.client import Connections, OwnCopy, WorkerClient
from vllm_spac.methods.od_moe.layer_call import Forward
from vllm_spac.methods.od_moe.places import Places
from vllm_spac.methods.od_moe.roster import Patience, Roster
from vllm_spac.methods.od_moe.wire import Service
from vllm_spac.methods.od_moe.worker import Worker
from vllm_spac.methods.od_moe.worker_link import Busy, WorkerLink, facts
from vllm_spac.methods.od_moe.workers_execution import WorkerStore

LAYERS, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 5, 6, 2, 8, 4
SPECS = {
    "w13_weight": TensorSpec((2 * INTERMEDIATE, HIDDEN), torch.float32),
    "w2_weight": TensorSpec((HIDDEN, INTERMEDIATE), torch.float32),
}
SHAPE = MoEShape(tuple(f"layers.{i}" for i in range(LAYERS)), EXPERTS, TOP_K, SPECS)
FINGERPRINT = "5a" * 16
SECRET, ANOTHER = b"the secret of these workers ....", bytes(32)


def row_by_row(x: Tensor, weights: Tensor, ids: Tensor, experts: Mapping[str, Tensor]) -> Tensor:
    """A kernel whose result for a row does not depend on the other rows, like vLLM's."""
    out = torch.zeros_like(x)
    for row, chosen in enumerate(ids.tolist()):
        for place, expert in enumerate(chosen):
            gate, up = (experts["w13_weight"][expert] @ x[row]).chunk(2)
            acted = torch.nn.functional.silu(gate) * up
            out[row] += weights[row, place] * (experts["w2_weight"][expert] @ acted)
    return out


def expert(key: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(key)
    return {name: torch.randn(spec.shape, generator=rng, dtype=spec.dtype) for name, spec in SPECS.items()}


def layer_input(rows: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(EXPERTS, generator=rng)[:TOP_K] for _ in range(rows)]).int()
    return torch.randn(rows, HIDDEN, generator=rng), torch.rand(rows, TOP_K, generator=rng), ids


def here(layer: int, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """The layer's output with all of its experts in this thread."""
    all_of_it = [expert(layer * EXPERTS + number) for number in range(EXPERTS)]
    return row_by_row(x, weights, ids, {name: torch.stack([each[name] for each in all_of_it]) for name in SPECS})


@dataclass
class Running:
    """A worker in a thread."""

    worker: Worker
    stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self.worker.serve(self.stop.is_set)
        self.worker.close()

    def end(self) -> None:
        """Ends it as a killed process ends: connections close, without a word."""
        self.stop.set()
        self.thread.join(30)


class Threads(Places):
    """Workers in threads of this process, each with its own store, which outlives it like a disk."""

    def __init__(self, count: int, kernel: Callable = row_by_row) -> None:
        self.secret, self.kernel = SECRET, kernel
        self.stores = [MemoryStore(SHAPE, FINGERPRINT) for _ in range(count)]
        self.running = [self._start(number) for number in range(count)]
        self.may_return = True

    def _start(self, number: int) -> Running:
        return Running(Worker(self.secret, lambda service: self.kernel, lambda *_: self.stores[number], 1 << 20))

    def addresses(self) -> list[str]:
        return [f"tcp://127.0.0.1:{running.worker.port}" for running in self.running]

    def again(self, worker: int) -> str:
        if not self.may_return:
            raise SpacError("spac: it stays away")
        if self.running[worker].stop.is_set():
            self.running[worker] = self._start(worker)
        return self.addresses()[worker]

    def describe(self) -> str:
        return f"{len(self.running)} threads"

    def close(self) -> None:
        for running in self.running:
            running.end()


def services(count: int, size: int = 1, **knobs) -> list[Service]:
    layers = [division.layers_of(worker, LAYERS, count, size) for worker in range(count)]
    knobs["divides"] = size > 1
    knobs = {"slots": "50%", "policy": "lru", "hidden": HIDDEN} | knobs
    return [Service.of(SHAPE, FINGERPRINT, mine, **knobs) for mine in layers]


def stored(
    places: Threads,
    copy: MemoryStore | None = None,
    kernel: Callable = row_by_row,
    size: int = 1,
    exact: bool = True,
    **knobs,
) -> WorkerStore:
    """The store of an engine whose experts are packed and whose workers are admitted.

    Args:
        copy: what this process has packed of the experts; None: nothing, as where workers are on other machines.
    """
    given, copy = services(len(places.running), size, **knobs), copy or MemoryStore(SHAPE, FINGERPRINT)
    connections = Connections(places, given, kernel, torch.float32, exact)
    client = WorkerClient(connections, OwnCopy(lambda: copy, given[0], kernel), size)
    client.roster = Roster(len(given), given[0].digest, lambda: Patience(0.5, 2.0), size)
    try:
        store = WorkerStore(SHAPE, FINGERPRINT, client)
        for key in range(SHAPE.total):
            if not store.holds(key):
                store.put(key, expert(key))
        store.fill()
    except BaseException:
        client.close()
        raise
    return store


def connected(places: Threads, **options) -> WorkerClient:
    """The engine's side of workers, as ``stored``."""
    return stored(places, **options).client


def assert_right(
    found: WorkerClient, layer: int, rows: int = 3, seed: int = 0, step: int = 1, exact: bool = True
) -> None:
    """The bits of one process; where experts are divided, a row's two results are added in another order."""
    given = layer_input(rows, seed)
    computed, right = found.compute(Forward(step), layer, *given), here(layer, *given)
    if found.divides or not exact:
        torch.testing.assert_close(computed, right, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(computed, right)


def counts_of(found: WorkerClient) -> dict[str, Any]:
    """What workers count now: the client itself returns what they said last."""
    began, said = time.monotonic(), found.counts()

    def settled() -> bool:
        nonlocal said
        said = found.counts()
        each = said["expert_workers"].values()
        return all(not one["present"] or one["counts_age_seconds"] <= time.monotonic() - began for one in each)

    until(settled)
    return said


def answers(address: str, seconds: float = 20.0) -> bool:
    """Whether a worker lets an engine in, or says that it has one."""
    context = zmq.Context()
    link = WorkerLink(context, address, SECRET, facts(), "another engine")
    try:
        link.open(seconds)
    except Busy:
        return True
    except SpacError:
        return False
    finally:
        link.close()
        context.destroy(linger=200)
    return True


def until(done: Callable[[], object]) -> None:
    """Waits for what another thread does."""
    end = time.monotonic() + 120
    while not done():
        assert time.monotonic() < end, "it never happens"
        time.sleep(0.01)


def main() -> None:
    """A worker as a process, with as many files as its argument says; it ends when its input is closed."""
    for limit in map(int, sys.argv[1:]):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    ended = threading.Event()
    worker = Worker(SECRET, lambda service: row_by_row, lambda *_: MemoryStore(SHAPE, FINGERPRINT), 1 << 20)
    print(worker.port, flush=True)
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    worker.serve(ended.is_set)
    worker.close()


if __name__ == "__main__":
    main()
