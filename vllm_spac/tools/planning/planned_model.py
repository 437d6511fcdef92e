"""The sizes of a model that is to be served: from its headers, or from its ``config.json`` alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from vllm_spac.errors import UnsupportedError
from vllm_spac.storage.checkpoint import quant_config
from vllm_spac.storage.checkpoint.described import Architecture
from vllm_spac.storage.checkpoint.headers import Checkpoint
from vllm_spac.storage.checkpoint.published import find_model
from vllm_spac.storage.checkpoint.quantisation import Capability, FormatKernels, only_ours, refusal


@dataclass(frozen=True)
class ServedModel:
    """A model as it is served: in 16 bits if its weights are in float32.

    Attributes:
        name: what ``vllm serve`` is given.
        checkpoint: sizes of its weights; ``architecture``: everything else.
        kernels: of quantised experts, which decide how large one is.
        halved: the weights are in float32, and the sizes half of theirs.
        remark: about sizes that are not from headers, a sentence.
    """

    name: str
    checkpoint: Checkpoint
    architecture: Architecture
    source: Literal["headers", "config.json"]
    halved: bool = False
    execution: Literal["slots", "pointers"] = "slots"
    kernels: FormatKernels = FormatKernels.GPU
    remark: str = ""

    @classmethod
    def read(
        cls,
        model: str,
        execution: Literal["slots", "pointers"] | None = None,
        *,
        on_cpu: bool = False,
        capability: Capability | None = None,
    ) -> ServedModel:
        """Reads ``model``: a folder, a ``config.json``, or a name on the Hugging Face hub.

        Args:
            execution: as the knob; None: slots, or pointers where slots of a GPU cannot hold its quantised experts.
            capability: of the GPU, which decides whether its slots can hold FP8; None: not known.

        Raises:
            UnsupportedError: there is none, it has no experts, or it cannot be served.
        """
        named, path = find_model(model), Path(model)
        config, name = named.config, str(path.parent) if path.is_file() else model
        entry = quant_config.of(config)
        if execution is None:
            execution = "pointers" if entry is not None and not on_cpu and only_ours(entry, capability) else "slots"
        kernels = FormatKernels.OURS if execution == "pointers" else FormatKernels.CPU if on_cpu else FormatKernels.GPU
        checkpoint = named.checkpoint(kernels)
        if entry is not None and (reason := refusal(entry, kernels, capability)):
            raise UnsupportedError(f"{model} has {reason}")
        halved = checkpoint.dtypes == {"F32"}
        if halved:
            layers = {layer: count // 2 for layer, count in checkpoint.layer_bytes.items()}
            checkpoint = replace(checkpoint, layer_bytes=layers, other_bytes=checkpoint.other_bytes // 2)
        return cls(
            name,
            checkpoint,
            Architecture.of(config, named.folder / "config.json"),
            "headers" if named.origin == "folder" else "config.json",
            halved,
            execution,
            kernels,
            named.remark,
        )

    @classmethod
    def ways(cls, model: str, *, on_cpu: bool, capability: Capability | None = None) -> list[ServedModel]:
        """Reads ``model`` as each execution serves it that an engine may choose by itself; arguments as ``read``."""
        found = [cls.read(model, on_cpu=on_cpu, capability=capability)]
        if not on_cpu and found[0].execution == "slots":
            found.append(cls.read(model, "pointers", capability=capability))
        return found

    @property
    def quantised(self) -> bool:
        """Whether the experts of some layer are quantised."""
        entry = self.checkpoint.quantisation
        return entry is not None and not quant_config.spares_experts(entry, 1 + max(self.checkpoint.layer_bytes))

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
