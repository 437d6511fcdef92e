"""What a worker is asked to serve, and what it and an engine must have in common; JSON in a frame, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_spac.core import MoEShape, TensorSpec
from vllm_spac.errors import ConfigError, brief
from vllm_spac.methods.od_moe.wire import MOST_BYTES, MOST_SERVED
from vllm_spac.system.host_memory import gib
from vllm_spac.system.machine import versions

_FINGERPRINT = r"^[0-9a-f]{32}$"
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
_Count = Annotated[int, Field(ge=1, le=1 << 20)]
_MOST_EXPERTS = 1 << 20  # at one worker
_SAME = ("vllm_spac", "vllm", "torch", "cpu")


class Tensors(BaseModel):
    """Shape and dtype of one tensor of an expert."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    shape: tuple[Annotated[int, Field(ge=0, le=1 << 24)], ...] = Field(max_length=8)
    dtype: str


class Service(BaseModel):
    """The layers that one worker serves, and how.

    Attributes:
        fingerprint: of the packed experts, 32 hexadecimal digits.
        layers: names of all layers of the shape.
        mine: numbers of those that this worker has, ascending.
        experts, top_k, tensors: as in ``MoEShape``.
        hidden: width of a row.
        slots, policy, io_threads: the knobs, of the experts of ``mine``.
        activation, isa: of the kernel.
        divides: the layers' experts are divided among several workers: rows come with some of theirs, and each answer
            says which experts have a slot.
        hints: the engine says which experts layers will probably need, and they are loaded ahead.
        pins, extra, depth, background: of these loads, as in ``PrefetchSettings``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    fingerprint: str = Field(pattern=_FINGERPRINT)
    layers: tuple[str, ...] = Field(min_length=1, max_length=4096)
    mine: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1, max_length=4096)
    experts: _Count
    top_k: _Count
    tensors: dict[str, Tensors] = Field(min_length=1, max_length=16)
    hidden: _Count
    slots: str
    policy: str
    io_threads: Annotated[int, Field(ge=1, le=64)] = 4
    activation: str = "silu"
    isa: str = ""
    divides: bool = False
    hints: bool = False
    pins: bool = True
    extra: Annotated[float, Field(ge=0, le=1)] | None = None
    depth: _Count = 16
    background: Annotated[int, Field(ge=1, le=64)] | None = None

    @classmethod
    def parse(cls, raw: Any) -> Service:
        """Validates what arrived; ``ConfigError`` if it is no service."""
        try:
            service = cls.model_validate(raw)
        except ValidationError as error:
            raise ConfigError(f"spac: this is no service of an expert worker: {brief(str(error))}") from None
        if service.mine[-1] >= len(service.layers) or list(service.mine) != sorted(set(service.mine)):
            raise ConfigError(f"spac: a service of the layers {brief(service.mine)} of {len(service.layers)}")
        if unknown := [spec.dtype for spec in service.tensors.values() if spec.dtype not in _DTYPES]:
            raise ConfigError(f"spac: expert workers compute {', '.join(_DTYPES)}, not {brief(unknown[0])}")
        served, most = len(service.mine) * service.experts, MOST_SERVED if service.divides else _MOST_EXPERTS
        if served > most:
            divides = ", and one whose group divides experts serves" if service.divides else ", which serves"
            raise ConfigError(f"spac: {served} experts at a worker{divides} at most {most}; use more workers")
        if (nbytes := service.shape.expert_bytes) > MOST_BYTES:
            raise ConfigError(
                f"spac: experts of {gib(nbytes)} do not fit a frame of expert workers ({gib(MOST_BYTES)})"
            )
        return service

    @classmethod
    def of(cls, shape: MoEShape, fingerprint: str, mine: tuple[int, ...], **others: Any) -> Service:
        """Returns the service of the layers ``mine`` of ``shape``."""
        tensors = {
            name: Tensors(shape=spec.shape, dtype=str(spec.dtype).removeprefix("torch."))
            for name, spec in shape.tensors.items()
        }
        given = {"layers": shape.layers, "experts": shape.experts, "top_k": shape.top_k, "tensors": tensors}
        return cls.parse({"fingerprint": fingerprint, "mine": mine, **given, **others})

    @property
    def shape(self) -> MoEShape:
        """The shape of all layers."""
        specs = {name: TensorSpec(spec.shape, _DTYPES[spec.dtype]) for name, spec in self.tensors.items()}
        return MoEShape(self.layers, self.experts, self.top_k, specs)

    @property
    def keys(self) -> list[int]:
        """The experts of ``mine``, as keys of ``shape``."""
        return [layer * self.experts + expert for layer in self.mine for expert in range(self.experts)]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of an expert's tensors, and of rows."""
        return next(iter(self.shape.tensors.values())).dtype

    @property
    def digest(self) -> bytes:
        """The fingerprint as the 16 bytes of a frame."""
        return bytes.fromhex(self.fingerprint)


def facts() -> dict[str, str]:
    """Returns what both sides must have in common for equal bits: versions, and what the processor can do."""
    found = versions()
    tiles = "+AMX" if torch.cpu._is_amx_tile_supported() else ""
    found["cpu"] = f"{torch.backends.cpu.get_cpu_capability()}{tiles}"
    return {name: str(found.get(name)) for name in _SAME}


def difference(ours: Mapping[str, str], theirs: Any) -> str | None:
    """Returns in what two sides differ, or None."""
    if not isinstance(theirs, dict):
        return "its facts are missing"
    parts = [f"{name} {value} here and {brief(theirs.get(name))} there" for name, value in ours.items()]
    return "; ".join(text for text, name in zip(parts, ours, strict=True) if ours[name] != theirs.get(name)) or None
