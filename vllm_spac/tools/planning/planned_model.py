"""The sizes of a model that is to be served: from its headers, or from its ``config.json`` alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from vllm_spac.decisions.core_rates import PLAIN
from vllm_spac.errors import ConfigError, UnsupportedError
from vllm_spac.storage.checkpoint import quant_config, quantisation
from vllm_spac.storage.checkpoint.headers import LAYERS, Checkpoint, first_number
from vllm_spac.storage.checkpoint.published import NamedModel
from vllm_spac.storage.checkpoint.quantisation import (
    Capability,
    FormatKernels,
    activation_refusal,
    only_ours,
    only_ours_on_cpu,
    refusal,
    refusal_beside,
    refusal_without_amx,
)
from vllm_spac.tools.planning.architecture import Architecture

Execution = Literal["slots", "table", "pointers"]
Plane = Literal["auto", "slots", "table", "pointers"]


@dataclass(frozen=True)
class ServedModel:
    """A model as it is served: in 16 bits if its weights are in float32."""

    name: str  # what ``vllm serve`` is given
    checkpoint: Checkpoint  # sizes of its weights
    architecture: Architecture  # everything else
    source: Literal["headers", "config.json"]
    halved: bool = False  # the weights are in float32, and the sizes half of theirs
    execution: Execution = "slots"
    kernels: FormatKernels = FormatKernels.GPU  # of quantised experts, which decide how large one is
    remark: str = ""  # about sizes that are not from headers, a sentence
    revision: str | None = None  # of a name on the hub; None: the newest
    stock: bool = True  # vLLM has a kernel for its experts on this machine
    uncomputed: str = ""  # why the execution's kernel does not compute its experts, which all need GPU memory then

    @classmethod
    def of(
        cls,
        named: NamedModel,
        execution: Execution | None = None,
        *,
        on_cpu: bool = False,
        capability: Capability | None = None,
    ) -> ServedModel:
        """Returns the sizes of a model that was found.

        Args:
            execution: that serves it; None: the first of ``ways``.
            capability: of the GPU, which decides whether its slots can hold FP8; None: not known.

        Raises:
            UnsupportedError: it has no experts, or cannot be served.
        """
        if execution is None:
            return next(cls.ways(named, on_cpu=on_cpu, capability=capability))
        entry, ours = quant_config.of(named.config), execution != "slots"
        kernels = FormatKernels.OURS if ours else FormatKernels.CPU if on_cpu else FormatKernels.GPU
        if entry is not None and (reason := refusal(entry, kernels, capability)):
            raise UnsupportedError(f"{named.name} has {reason}")
        checkpoint = named.checkpoint(kernels)
        halved = checkpoint.dtypes == {"F32"}
        if halved:
            layers = {layer: count // 2 for layer, count in checkpoint.layer_bytes.items()}
            other, tables = checkpoint.other_bytes // 2, checkpoint.table_bytes // 2
            checkpoint = replace(checkpoint, layer_bytes=layers, other_bytes=other, table_bytes=tables)
        return cls(
            named.name,
            checkpoint,
            Architecture.of(named.config, named.folder / "config.json"),
            "headers" if named.origin == "folder" else "config.json",
            halved,
            execution,
            kernels,
            named.remark,
            named.revision,
            uncomputed=(activation_refusal(named.config) or "") if ours else "",
        )

    @classmethod
    def ways(
        cls,
        named: NamedModel,
        plane: Plane = "auto",
        *,
        on_cpu: bool,
        capability: Capability | None = None,
        amx: bool = True,
    ) -> Iterator[ServedModel]:
        """Yields the model as each execution serves it that an engine with this knob may choose.

        The first serves every checkpoint: slots, or where they cannot hold its quantised experts, pointers, and on a
        CPU the table.

        Args:
            amx: whether the CPU has AMX, without which vLLM has no kernel for quantised experts on it.

        Raises:
            ConfigError: the machine has no such plane.
            UnsupportedError: as ``of``, or the CPU has no kernel for the experts, or for layers beside them.
        """
        entry = quant_config.of(named.config)
        if on_cpu:
            layers = first_number(named.config, LAYERS)
            ours = only_ours_on_cpu(entry, layers, amx)
            unserved = not amx and (plane == "slots" or not ours)
            if entry is not None and unserved and not quant_config.spares_experts(entry, layers):
                raise UnsupportedError(f"{named.name} has {refusal_without_amx(entry)}")
        else:
            ours = only_ours(entry, capability)
        found = executions(plane, ours=ours, on_cpu=on_cpu)
        if not ours and plane == "auto" and activation_refusal(named.config) is not None:
            found = ("slots",)
        for execution in found:
            served = cls.of(named, execution, on_cpu=on_cpu, capability=capability)
            beside = served.checkpoint.fp8_beside
            if on_cpu and entry is not None and (reason := refusal_beside(entry, beside, amx)) is not None:
                raise UnsupportedError(f"{named.name} has {reason}")
            yield replace(served, stock=not (on_cpu and ours))

    @property
    def quantised(self) -> bool:
        """Whether the experts of some layer are quantised."""
        entry = self.checkpoint.quantisation
        return entry is not None and not quant_config.spares_experts(entry, 1 + max(self.checkpoint.layer_bytes))

    @property
    def kind(self) -> str:
        """What its experts are to CPU kernels, as ``core_rates.CORE_RATES`` names it."""
        entry = self.checkpoint.quantisation
        return quantisation.kind(entry) if entry is not None and self.quantised else PLAIN

    @property
    def layers(self) -> int:
        """Number of MoE layers."""
        return len(self.checkpoint.layer_bytes)

    @property
    def experts_bytes(self) -> int:
        """Bytes of all experts."""
        return sum(self.checkpoint.layer_bytes.values())

    @property
    def expert_bytes(self) -> int:
        """Bytes of an expert, the mean where layers differ."""
        return self.experts_bytes // self.checkpoint.total

    @property
    def read_bytes(self) -> int:
        """Bytes of the other weights that a step reads: all but an input embedding, of which it reads few rows."""
        shape = self.architecture
        return max(0, self.checkpoint.other_bytes - (0 if shape.tied else 2 * shape.vocabulary * shape.hidden))


def executions(plane: Plane, *, ours: bool, on_cpu: bool) -> tuple[Execution, ...]:
    """Returns the executions that an engine with this knob may choose.

    Args:
        ours: only our kernels read the experts.

    Raises:
        ConfigError: there is none.
    """
    if plane == "table" and on_cpu and not ours:
        raise ConfigError(
            "--plane table is planned for a GPU, and for experts without a kernel of vLLM's; leave --plane out, or "
            "name a machine with a GPU (on a CPU an engine serves with --spac-plane table, too)"
        )
    if plane != "auto":
        return (plane,)
    if on_cpu:
        return ("table",) if ours else ("slots",)
    return ("pointers", "table") if ours else ("slots", "pointers")
