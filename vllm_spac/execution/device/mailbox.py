"""The host's end of the mailbox through which layers hand experts to the CPU; ``vllm_spac.kernels.mailbox`` has the
device's end, and the protocol.

A thread polls the number of the last request, copies the request, computes it, and writes the results, then the
number. It writes nothing if the number has changed meanwhile: the device has not waited. It never waits for the device.
Compiled kernels bring a thread that does so without the interpreter. For others it is a loop here, which waits for the
interpreter's lock, and whose order of stores is that of an x86 processor, which other processors do not promise.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import platform
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future

import torch
from torch import Tensor

from vllm_spac.cpu_kernels._thread import ExecutorThread
from vllm_spac.cpu_kernels.base import CpuExperts, MailServer
from vllm_spac.errors import SpacError, UnsupportedError
from vllm_spac.execution.row_shares import Share
from vllm_spac.kernels.types import Mail

NAP, REST = 10e-6, 1e-3  # seconds between two looks at the number; where nothing has happened for a while
AWAKE = 0.5  # seconds: a while
TURN = 0.25  # seconds after which the thread may end
_TIMER_SLACK = 29  # PR_SET_TIMERSLACK: how much later than asked for this thread may be woken, in nanoseconds

logger = logging.getLogger("vllm.spac")


def check_processor(device: torch.device, executor: CpuExperts) -> None:
    """Raises ``UnsupportedError`` if the processor does not order stores as the protocol needs beside ``device``."""
    if device.type == "cuda" and not executor.answers and platform.machine() not in ("x86_64", "AMD64"):
        raise UnsupportedError(
            f"spac: cpu_experts (--spac-cpu-experts) with plane=pointers needs an x86 processor, and this is "
            f"{platform.machine()}; use --spac-cpu-kernel simd, or --spac-plane slots"
        )


class Mailbox:
    """Requests of layers in pinned memory, and the loop that answers them.

    Args:
        rows: the most rows of a request; ``top_k``, ``hidden``: sizes of one.
        dtype: of the rows.
        device: that writes requests.
        layer: returns the experts of a layer, as ``ExpertStore.layer``.

    Attributes:
        mail: the memory.
    """

    def __init__(
        self,
        rows: int,
        top_k: int,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
        layer: Callable[[int], Mapping[str, Tensor]],
    ) -> None:
        def made(dtype: torch.dtype, *size: int) -> Tensor:
            return torch.zeros(size, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")

        self.mail = Mail(
            asked=made(torch.int64, 1),
            answered=made(torch.int64, 1),
            head=made(torch.int32, 2),
            ids=made(torch.int32, rows, top_k),
            weights=made(torch.float32, rows, top_k),
            x=made(dtype, rows, hidden),
            results=made(torch.float32, rows, hidden),
        )
        self._layer = layer
        self._wake = threading.Event()
        self._closed = self._hasty = False
        self._asked, self._last, self._awake = self.mail.asked.numpy(), 0, 0.0
        self._server: MailServer | None = None
        self._serving: Future[None] | None = None

    def start(self, thread: ExecutorThread, layers: int) -> None:
        """Has requests answered from now on, of so many layers; ``thread`` computes nothing else meanwhile."""
        if thread.executor.answers:
            self._server = thread.executor.serve(self.mail, [self._layer(number) for number in range(layers)])
        else:
            self._serving = thread.serve(self.serve)

    def wake(self) -> None:
        """A step may make requests soon."""
        if self._server is not None:
            self._server.wake()
        self._wake.set()

    def ended(self) -> BaseException | None:
        """Returns why requests are not answered any more; None while they are."""
        if self._server is not None:
            return self._server.failure()
        if self._serving is None or not self._serving.done():
            return None
        return self._serving.exception() or SpacError("spac: the thread that computes CPU experts has ended")

    def close(self) -> None:
        """Ends after the request that is being computed."""
        if self._server is not None:
            self._server.close()
        self._closed = True
        self._wake.set()

    def serve(self, executor: CpuExperts) -> bool:
        """Answers requests for ``TURN`` seconds; returns whether to go on. Called in the executor's thread."""
        if not self._hasty:
            self._hasty = True
            with contextlib.suppress(OSError, AttributeError):  # Linux alone has it; without, naps are longer
                ctypes.CDLL(None).prctl(_TIMER_SLACK, 1)
        end = time.monotonic() + TURN
        while not self._closed and (now := time.monotonic()) < end:
            number = int(self._asked[0])
            if number != self._last or self._wake.is_set():
                self._wake.clear()
                self._awake = now + AWAKE
            if number != self._last:
                self._last = number
                self.answer(number, executor)
            elif now < self._awake:
                time.sleep(NAP)
            else:
                self._wake.wait(REST)
        return not self._closed

    @torch.inference_mode()  # as the forward in which the memory was made
    def answer(self, number: int, executor: CpuExperts) -> None:
        """Computes request ``number`` and writes the answer, unless there is a later one."""
        mail = self.mail
        layer, rows = mail.head.tolist()
        ids, weights, x = (tensor[:rows].clone() for tensor in (mail.ids, mail.weights, mail.x))
        if int(mail.asked) != number:
            return
        share = Share.of(ids, ids >= 0)
        out = executor.run(*share.pick(x, weights), share.ids, self._layer(layer))
        if int(mail.asked) != number:
            return
        mail.results[share.rows] = out.float()
        mail.answered[0] = number
