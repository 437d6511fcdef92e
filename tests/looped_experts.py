"""CPU experts as a loop of torch operators, and a thread that answers a device: the double of compiled ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm_spac.kernels.reference.dequantise import dequantise
from vllm_spac.kernels.reference.grouped_gemm import activate, rounded_rows
from vllm_spac.kernels.types import Mail

from vllm_spac.cpu_kernels.base import CpuExperts


class Looped(CpuExperts):
    """Computes one expert after the other. Sums over experts are of float32; packed ones are dequantised."""

    reads_packed: ClassVar[bool] = True
    answers: ClassVar[bool] = True

    def run(self, x: Tensor, weights: Tensor, ids: Tensor, experts: Mapping[str, Tensor]) -> Tensor:
        total = torch.zeros(x.shape, dtype=torch.float32)
        counted = ids.masked_fill(weights == 0, -1)
        for expert in counted.unique().tolist():
            if expert < 0:
                continue
            rows, places = (counted == expert).nonzero(as_tuple=True)
            hidden = self._product(x[rows], experts, "w13", expert)
            acted = activate(hidden.float(), self.activation, x.dtype).to(x.dtype)
            out = self._product(acted, experts, "w2", expert)
            total.index_add_(0, rows, out.float() * weights[rows, places, None].float())
        return total

    def _product(self, x: Tensor, experts: Mapping[str, Tensor], name: str, expert: int) -> Tensor:
        weight, kind, bias = experts[f"{name}_weight"][expert], self.shape.packed, experts.get(f"{name}_bias")
        bias = None if bias is None else bias[expert]
        if kind is None:
            return F.linear(x, weight, bias)
        scales, (rows, columns), dtype = experts[f"{name}_scale"][expert], weight.shape, kind.weight_dtype(x.dtype)
        weight = dequantise(kind, weight, scales, rows, columns * kind.per_byte, dtype)
        return F.linear(rounded_rows(x, kind).to(dtype), weight, None if bias is None else bias.to(dtype)).to(x.dtype)

    def serve(self, mail: Mail, layers: Sequence[Mapping[str, Tensor]]) -> LoopedServer:
        return LoopedServer(self, mail, layers)

    def describe(self) -> str:
        return "looped"


class Silent(Looped):
    """Answers no device."""

    answers = False


class LoopedServer:
    """A ``MailServer`` in a thread of Python, which tests make fail."""

    def __init__(self, executor: CpuExperts, mail: Mail, layers: Sequence[Mapping[str, Tensor]]) -> None:
        self.executor, self.mail, self.layers = executor, mail, layers
        self.error: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @torch.inference_mode()  # as the forward in which the memory was made
    def answer(self, number: int) -> None:
        mail = self.mail
        layer, rows = mail.head.tolist()
        ids, weights, x = (tensor[:rows].clone() for tensor in (mail.ids, mail.weights, mail.x))
        if int(mail.asked) != number:
            return
        out = self.executor.run(x, weights.masked_fill(ids < 0, 0), ids.clamp(min=0), self.layers[layer])
        if int(mail.asked) == number:
            mail.results[:rows] = out.float()
            mail.answered[0] = number

    def _run(self) -> None:
        last = 0
        while not self._closed:
            if (number := int(self.mail.asked)) == last:
                time.sleep(1e-5)
                continue
            last = number
            try:
                self.answer(number)
            except Exception as error:
                self.error = error
                return

    def wake(self) -> None:
        """Does nothing: the thread does not sleep."""

    def failure(self) -> BaseException | None:
        return self.error

    def close(self) -> None:
        self._closed = True
        self._thread.join()
