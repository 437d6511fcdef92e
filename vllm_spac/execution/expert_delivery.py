"""Experts that the GPU cannot address, read by threads of the host where a layer orders them.

``vllm_spac.kernels.mailbox`` has the device's end, and the protocol. The host's end polls the number of the last
order, has each expert of it read to a place in pinned memory, and answers with the number. There are places for all
experts of one layer, and all are free: an order is not made before the layers that read earlier ones have run.

**Rows of host memory** keep what was read, while there are free ones: their experts have addresses from then on, and
no layer orders them. Between steps some give up theirs (``host_tier.OrderedRows``). The stream that
runs the model takes their addresses away, after all launches that may read them, and an event says when: only then a
row is free. So a captured graph, or a step that still runs, finds an expert in its row or orders it.

The device waits for as long as a read takes. An order that cannot be answered ends all waits instead: ``failure`` has
the error from before that on, so whoever looks after a step has run learns that its results are worth nothing. Other
ranks learn it by a word of memory that all have. It is written before the waits end, and no rank ends a step before.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from vllm_spac.cache.host_tier import OrderedRows
from vllm_spac.cache.residency import NOWHERE
from vllm_spac.cache.transfers import HostRows
from vllm_spac.errors import SpacError, StoreError
from vllm_spac.execution.address_table import AddressTable, address_of
from vllm_spac.execution.exchange import Event, Stream
from vllm_spac.kernels.types import HIT, Orders, Reach
from vllm_spac.recording.metrics import Counters
from vllm_spac.storage.base import ExpertStore, Slot, Slots
from vllm_spac.system.machine import reset_affinity
from vllm_spac.system.threads import cancelled_load

_NAP, _DOZE = 50e-6, 20e-3  # seconds between two looks: while orders come, and else
_FENCE = threading.Lock()
_IDLE = 1.0  # seconds without an order from which on none is expected before ``check``

logger = logging.getLogger("vllm.spac")


class ExpertDelivery:
    """Answers the orders of one execution's layers, from when it is made until it is closed.

    Args:
        store: of all experts; some are not ``in_reach``.
        threads: that read.
        memory: the table of addresses; its device orders.
        compute: the stream that runs the model.
        rows: host memory that keeps experts, if any; owned.
        failed: int32 [1], 0 until reads of any rank of this machine have failed; None: there is one rank.

    Attributes:
        mail: as the kernels have it.
    """

    def __init__(
        self,
        store: ExpertStore,
        threads: int,
        memory: AddressTable,
        compute: Stream,
        rows: HostRows | None = None,
        failed: Tensor | None = None,
    ) -> None:
        shape, staging, device = store.shape, store.staging(), memory.device

        def made(dtype: torch.dtype, size: int = 1) -> Tensor:
            return torch.zeros(size, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")

        counts = made(torch.int64), made(torch.int64), made(torch.int32), made(torch.int32)
        orders = Orders(*counts, *(made(torch.int32, shape.experts) for _ in range(2)))
        away = np.array([not store.in_reach(key) for key in range(shape.total)])
        parts = [staging] if rows is None else [staging, rows.tensors]
        at = torch.stack([torch.cat([_addresses(part[name], device) for part in parts]) for name in shape.tensors])
        reach = Reach(
            torch.zeros(1, dtype=torch.int64, device=device),
            torch.from_numpy(-away.astype(np.int32)).to(device, copy=True),
            at.to(device, copy=True),
        )
        self.mail, self._place_of = (orders, reach), reach.place_of
        self._seconds, self._reads = 0.0, 0  # between orders and their answers; experts that were read
        self._store, self._memory, self._compute = store, memory, compute
        self._places, self._staged = [*map(Slots, parts)], shape.experts
        self._block = None if rows is None else rows.block
        self._rows = None if rows is None else OrderedRows(rows.tier)
        self._leaving: deque[tuple[Event, list[int]]] = deque()  # rows, and when nobody reads them any more
        self._copied: dict[int, torch.cuda.Event] = {}  # when places from one on may be written again
        self._asked, self._answered, self._ended = (each.numpy() for each in orders[:3])
        self._count, self._keys, self._given = (each.numpy() for each in orders[3:])
        self._failure: BaseException | None = None
        self._failed = None if failed is None else failed.numpy()
        self._woken, self._stopped = threading.Event(), False
        self._readers = ThreadPoolExecutor(threads, thread_name_prefix="spac-order", initializer=reset_affinity)
        self._thread = threading.Thread(target=self._serve, name="spac-orders", daemon=True)
        self._thread.start()

    def near(self, layer: int) -> Tensor:
        """Returns bool on the device: which experts from those of ``layer`` on may be read without an order."""
        return self._place_of[layer * self._store.shape.experts :] >= 0

    def check(self) -> None:
        """Called before and after a step; raises what ended the answers: layers had no experts, or will have none."""
        self._woken.set()
        if (why := self._failure) is not None:
            text = str(why) if isinstance(why, SpacError) else f"spac: experts cannot be read any more: {why!r}"
            raise StoreError(text) from why

    def describe(self) -> str:
        return f"layers wait for experts that are {'not pinned' if self._store.addressable else 'only on the disk'}"

    def count(self, counters: Counters) -> None:
        """Writes what orders took since the start, and what was read."""
        counters.stall_seconds = self._seconds
        if not self._store.addressable:
            counters.bytes["disk"] = self._reads * self._store.shape.expert_bytes

    # -- rows of host memory, between steps ----------------------------------------------------------------

    def begin(self, slot_of: np.ndarray) -> None:
        """A step begins, after all that the last one has launched; ``slot_of``: as of ``OrderedRows.begin_step``."""
        if self._rows is None or not (leaving := self._rows.begin_step(slot_of)):
            return
        self._compute.submit(self._place_of.index_fill_, 0, self._memory.sent(torch.tensor(list(leaving))), NOWHERE)
        self._leaving.append((self._compute.record(), list(leaving.values())))

    def observe(self, counts: np.ndarray, sources: np.ndarray) -> None:
        """What a step used: int [keys], rows that generate, and how each expert was read."""
        if self._rows is not None:
            self._rows.observe(counts, sources > HIT)

    def fill(self, keys: Iterable[int], slot_of: np.ndarray) -> Iterator[int]:
        """Reads ``keys`` that have no slot into rows, as these are free; yields 1 for each. Before any step.

        Raises:
            StoreError: one could not be read.
        """
        if self._rows is None:
            return
        wanted = self._rows.tier.first(keys, slot_of)
        places = [self._staged + self._rows.tier.admit(key) for key in wanted]
        for _ in self._readers.map(self._store.read, wanted, map(self._slot, places)):
            yield 1
        there, at = self._memory.sent(torch.tensor([wanted, places]).view(2, -1))
        self._place_of.index_copy_(0, there, at.int())
        self._memory.hosts.index_copy_(1, there, self.mail[1].at[:, at])
        self._memory.write_home(there)

    def read(self, keys: Sequence[int], slots: Iterable[Mapping[str, Tensor]]) -> None:
        """Reads ``keys`` from the store into ``slots``; before any step."""
        list(self._readers.map(self._store.read, keys, slots))

    def copy(self, keys: Sequence[int], slots: Sequence[Mapping[str, Tensor]]) -> None:
        """Copies experts to ``slots`` on the calling stream. It waits for what must be read, and for no copy.

        Called when all layers that order have run, and before another one does: their places pass on what is read.
        """
        half = max(1, self._staged // 2)
        try:
            for start in range(0, len(keys), half):
                part, first = keys[start : start + half], start % (2 * half) % self._staged
                if first in self._copied:
                    self._copied.pop(first).synchronize()
                rows = [NOWHERE if self._rows is None else int(self._rows.row_of[key]) for key in part]
                places = [first + turn if row == NOWHERE else self._staged + row for turn, row in enumerate(rows)]
                self._read([(key, place) for key, place in zip(part, places, strict=True) if place < self._staged])
                for place, slot in zip(places, slots[start:], strict=False):
                    for name, tensor in self._slot(place).items():
                        slot[name].copy_(tensor, non_blocking=True)
                if self._memory.device.type == "cuda":
                    self._copied[first] = copied = torch.cuda.Event()
                    copied.record()
        except BaseException as error:
            self._end(error)
            raise

    # -- orders --------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends all waits of the device, and the threads."""
        self._stopped, self._failed = True, None  # no failure to other ranks
        self._end(cancelled_load())
        self._woken.set()
        self._thread.join()
        self._readers.shutdown(wait=True, cancel_futures=True)
        if self._block is not None:
            if self._block.pinned:
                torch.cuda.synchronize()  # kernels may read it
            self._block.close()

    def _serve(self) -> None:
        """Body of the thread. Whatever ends it ends the waits, too."""
        try:
            last, since = 0, time.monotonic()
            while not self._stopped:
                if (order := int(self._asked[0])) != last:
                    self._answer(order)
                    last, since = order, time.monotonic()
                elif time.monotonic() - since < _IDLE:
                    time.sleep(_NAP)
                elif self._woken.wait(_DOZE):
                    self._woken.clear()
                    since = time.monotonic()
        except BaseException as error:
            logger.error("spac: layers wait for experts that cannot be read: %s", error)
            self._end(error)

    def _answer(self, order: int) -> None:
        begun, keys = time.monotonic(), self._keys[: int(self._count[0])].tolist()
        given = []
        self._release()
        for turn, key in enumerate(keys):
            row = None if self._rows is None else self._rows.place(key)
            given.append(-1 - turn if row is None else self._staged + row)
        self._read([(key, max(place, -1 - place)) for key, place in zip(keys, given, strict=True)])
        self._given[: len(keys)] = given
        _order_stores()
        self._answered[0] = order
        self._seconds += time.monotonic() - begun

    def _release(self) -> None:
        """Frees the rows that nobody reads any more."""
        while self._rows is not None and self._leaving and self._leaving[0][0].done():
            self._rows.release(self._leaving.popleft()[1])

    def _read(self, wanted: Sequence[tuple[int, int]]) -> None:
        """Reads each expert to its place, one per thread at once."""
        reads = [self._readers.submit(self._store.read, key, self._slot(place)) for key, place in wanted]
        for read in reads:
            read.result()
        self._reads += len(reads)

    def _slot(self, place: int) -> Slot:
        return self._places[0][place] if place < self._staged else self._places[1][place - self._staged]

    def _end(self, error: BaseException) -> None:
        self._failure = self._failure or error
        if self._failed is not None:
            self._failed[0] = 1
        _order_stores()
        self._ended[0] = 1


def _order_stores() -> None:
    """Stores before it are visible before those behind it: a lock that is released and taken again."""
    for _ in range(2):
        with _FENCE:
            pass


def _addresses(rows: Tensor, device: torch.device) -> Tensor:
    """Returns int64 [n], the addresses of rows [n, ...] of one block."""
    return address_of(rows, device) + rows.stride(0) * rows.element_size() * torch.arange(len(rows))
