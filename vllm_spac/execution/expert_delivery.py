"""Experts that the GPU cannot address, read by threads of the host where a layer orders them.

``vllm_spac.kernels.mailbox`` has the device's end, and the protocol. The host's end polls the number of the last
order, has each expert of it read to a place in pinned memory, and answers with the number. There are places for all
experts of one layer, and all are free: an order is not made before the layers that read earlier ones have run.

The device waits for as long as a read takes. An order that cannot be answered ends all waits instead: ``failure`` has
the error from before that on, so whoever looks after a step has run learns that its results are worth nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from vllm_spac.errors import SpacError, StoreError
from vllm_spac.execution.address_table import address_of
from vllm_spac.kernels.types import Orders, Reach
from vllm_spac.storage.base import ExpertStore, Slots
from vllm_spac.system.machine import reset_affinity
from vllm_spac.system.threads import cancelled_load

_NAP, _DOZE = 50e-6, 20e-3  # seconds between two looks: while orders come, and else
_IDLE = 1.0  # seconds without an order from which on none is expected before ``check``

logger = logging.getLogger("vllm.spac")


class ExpertDelivery:
    """Answers the orders of one execution's layers, from when it is made until it is closed.

    Args:
        store: of all experts; some are not ``in_reach``.
        threads: that read.
        device: that orders.

    Attributes:
        mail: as the kernels have it.
        seconds: between orders and their answers, since the start.
    """

    def __init__(self, store: ExpertStore, threads: int, device: torch.device) -> None:
        shape, staging = store.shape, store.staging()

        def made(dtype: torch.dtype, size: int = 1) -> Tensor:
            return torch.zeros(size, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")

        counts = made(torch.int64), made(torch.int64), made(torch.int32), made(torch.int32)
        orders = Orders(*counts, made(torch.int32, shape.experts), made(torch.int32, shape.experts))
        away = np.array([not store.in_reach(key) for key in range(shape.total)])
        rows = range(shape.experts)
        at = torch.tensor([[address_of(staging[name][row], device) for row in rows] for name in shape.tensors])
        reach = Reach(
            torch.zeros(1, dtype=torch.int64, device=device),
            torch.from_numpy(-away.astype(np.int32)).to(device, copy=True),
            at.to(device, copy=True),
        )
        self.mail, self._place_of = (orders, reach), reach.place_of
        self.seconds = 0.0
        self._store, self._places = store, Slots(staging)
        self._asked, self._answered, self._ended = (each.numpy() for each in orders[:3])
        self._count, self._keys, self._given = (each.numpy() for each in orders[3:])
        self._failure: BaseException | None = None
        self._woken, self._stopped, self._fence = threading.Event(), False, threading.Lock()
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

    def close(self) -> None:
        """Ends all waits of the device, and the threads."""
        self._stopped = True
        self._end(cancelled_load())
        self._woken.set()
        self._thread.join()
        self._readers.shutdown(wait=True, cancel_futures=True)

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
        reads = [self._readers.submit(self._store.read, key, self._places[place]) for place, key in enumerate(keys)]
        for read in reads:
            read.result()
        self._given[: len(keys)] = -1 - np.arange(len(keys))
        self._order_stores()
        self._answered[0] = order
        self.seconds += time.monotonic() - begun

    def _order_stores(self) -> None:
        """Stores before it are visible before those behind it: a lock that is released and taken again."""
        with self._fence:
            pass
        with self._fence:
            pass

    def _end(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
        self._order_stores()
        self._ended[0] = 1
