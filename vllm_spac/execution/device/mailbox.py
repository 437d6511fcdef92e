"""The memory of the mailbox through which layers hand experts to the CPU.

``vllm_spac.kernels.mailbox`` has the device's end, and the protocol. The host's end is a thread of the executor
(``CpuExperts.serve``). It polls the number of the last request, copies the request, computes it, and writes the
results, then the number. It writes nothing if the number has changed meanwhile: the device has not waited. It never
waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vllm_spac.cpu_kernels.base import CpuExperts, MailServer
from vllm_spac.kernels.types import Mail


class Mailbox:
    """Requests of layers in pinned memory, which an executor answers.

    Args:
        rows: the most rows of a request; ``top_k``, ``hidden``: sizes of one.
        dtype: of the rows.
        device: that writes requests.

    Attributes:
        mail: the memory.
    """

    def __init__(self, rows: int, top_k: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
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
        self._server: MailServer | None = None

    def start(self, executor: CpuExperts, layers: Sequence[Mapping[str, Tensor]]) -> None:
        """Has requests answered from now on; ``executor`` computes nothing else meanwhile."""
        self._server = executor.serve(self.mail, layers)

    def wake(self) -> None:
        """A step may make requests soon."""
        if self._server is not None:
            self._server.wake()

    def ended(self) -> BaseException | None:
        """Returns why requests are not answered any more; None while they are."""
        return None if self._server is None else self._server.failure()

    def close(self) -> None:
        """Ends after the request that is being computed."""
        if self._server is not None:
            self._server.close()
