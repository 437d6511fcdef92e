"""CPU experts by compiled kernels, which read weights as they lie in host memory, at the rate of that memory."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from vllm_spac.core import MoEShape
from vllm_spac.cpu_kernels._library import ACTIVATIONS, Layer, Pool, Server, Spec, isas, spec_of
from vllm_spac.cpu_kernels.base import CpuExperts, Kernel
from vllm_spac.errors import ConfigError
from vllm_spac.kernels.types import Mail
from vllm_spac.system.processors import described, nodes_of, places, processors


class Simd(CpuExperts):
    """Plain and packed experts; ``source/`` has the kernels, one for each format and instruction set.

    Rounds to the dtype of x what vLLM's kernels round before an expert's second product; results are summed in float32
    in the order of experts, and so do not depend on the number of threads. Rows of FP8 experts are rounded as on a GPU.
    Several threads may call ``run``.

    Args:
        isa: of ``isas()``; None: the fastest.
        cpus: as of ``Pool``; None: as ``processors.places`` has it, beside other threads.
    """

    reads_packed: ClassVar[bool] = True
    answers: ClassVar[bool] = True

    def __init__(
        self,
        shape: MoEShape,
        threads: int,
        activation: str,
        kernel: Kernel | None = None,
        isa: str | None = None,
        cpus: Sequence[int] | None = None,
    ) -> None:
        super().__init__(shape, threads, activation, kernel)
        if activation not in ACTIVATIONS:
            raise ConfigError(
                f"spac: CPU experts have no activation {activation!r}, only {', '.join(ACTIVATIONS)}; "
                "use --spac-cpu-experts off"
            )
        self.isa = isa or isas()[-1]
        self._facts, self._placing = processors(), threading.Lock()
        self.pool = None if cpus is None else Pool(cpus, self.isa)
        if self.pool is None:
            places(self._facts, threads, beside=True)  # raises

    def prepare(self, experts: Mapping[str, Tensor]) -> None:
        self._placed(experts)

    def _placed(self, experts: Mapping[str, Tensor]) -> Pool:
        """Returns the threads, on the nodes of the memory of the first layer's experts first."""
        with self._placing:
            if self.pool is None:
                on = places(self._facts, self.threads, beside=True, memory=nodes_of(experts.values()))
                self.pool = Pool(on, self.isa)
            return self.pool

    def spec(self, experts: Mapping[str, Tensor], dtype: torch.dtype) -> Spec:
        """Describes the experts of a layer, whose rows are of ``dtype``, to the library."""
        w2, kind = experts["w2_weight"], self.shape.packed
        columns = w2.shape[2] * (1 if kind is None else kind.per_byte)
        return spec_of(dtype, self.activation, w2.shape[1], columns, len(w2), kind)

    def run(self, x: Tensor, weights: Tensor, ids: Tensor, experts: Mapping[str, Tensor]) -> Tensor:
        spec = self.spec(experts, x.dtype)
        pool, layer = self._placed(experts), Layer(experts)  # kept until it is computed
        return pool.run(spec, layer.structure, x.contiguous(), weights.contiguous(), ids.int().contiguous())

    def serve(self, mail: Mail, layers: Sequence[Mapping[str, Tensor]]) -> Server:
        spec, pool = self.spec(layers[0], mail.x.dtype), self._placed(layers[0])
        return Server(pool, mail, spec, [Layer(experts) for experts in layers])

    def describe(self) -> str:
        on = "" if self.pool is None else f", {described(self._facts, self.pool.cpus)}"
        return f"simd ({self.isa}{on})"

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()
