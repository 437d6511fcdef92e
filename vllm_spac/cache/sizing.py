"""Converts the knob ``slots`` into a number of slots, and says what vLLM needs at run time beside them. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from vllm_spac.errors import ConfigError
from vllm_spac.system.host_memory import gib

if TYPE_CHECKING:
    from vllm_spac.config.types import SlotCount
    from vllm_spac.core import MoEShape
    from vllm_spac.recording.trace_file import TraceFacts


def check_per_layer(slots: SlotCount, experts: int, top_k: int) -> None:
    """Refuses a number of slots per layer that this model cannot use; can run before anything is loaded.

    Args:
        slots: what the user requested; shares and ``auto`` always pass.

    Raises:
        ConfigError: fewer slots per layer than the experts that one token needs, or more than a layer has experts.
    """
    if slots.per_layer is None:
        return
    if slots.per_layer < top_k:
        raise ConfigError(
            f"spac: slots={slots.per_layer} (--spac-slots) keeps {slots.per_layer} experts per layer, but one token "
            f"of this model needs {top_k}; use --spac-slots {top_k} or more, or a percentage, whose slots all layers "
            "share"
        )
    if slots.per_layer > experts:
        raise ConfigError(
            f"spac: slots={slots.per_layer} (--spac-slots) is more than the {experts} experts of a layer; "
            f"use --spac-slots {experts} or --spac-slots 100%"
        )


def check_share(slots: SlotCount, total: int, top_k: int, fitting: int | None = None) -> None:
    """Refuses a share of all experts with which no token can run; can run before anything is loaded.

    Args:
        slots: what the user requested; numbers, multiples of top-k and ``auto`` always pass.
        total: experts of all layers that share their slots.
        fitting: slots that there is room for; None: unknown.

    Raises:
        ConfigError: fewer slots than the experts that one token needs.
    """
    if slots.share is None or (count := math.ceil(slots.share * total)) >= top_k:
        return
    least = 100 * (top_k - 1) // total + 1  # the smallest with more than top_k - 1 slots
    fits = fitting is None or math.ceil(Fraction(least, 100) * total) <= fitting
    instead = f"--spac-slots {least}% or more" if fits else "--spac-slots auto"
    raise ConfigError(
        f"spac: slots={100 * float(slots.share):g}% (--spac-slots) gives {count} of {total} experts, but one "
        f"token needs {top_k} of them at once; use {instead}"
    )


def asked(slots: SlotCount, layers: int, experts: int, top_k: int) -> int | None:
    """Returns the number of slots of so many ``layers`` together that the user requested; None: as many as fit."""
    if slots.per_layer is not None:
        return slots.per_layer * layers
    if slots.tokens is not None:
        return min(layers * experts, slots.tokens * top_k)
    return None if slots.share is None else math.ceil(slots.share * layers * experts)


def resolve(slots: SlotCount, shape: MoEShape, free_bytes: int) -> int:
    """Returns the number of slots for all layers of ``shape`` together.

    Args:
        free_bytes: fast memory that may be used; decides ``auto`` and bounds the other values.

    Raises:
        ConfigError: fewer slots than one token needs, or more than fit into ``free_bytes``.
    """
    check_per_layer(slots, shape.experts, shape.top_k)
    fitting = min(shape.total, max(0, free_bytes) // shape.expert_bytes)
    count = asked(slots, len(shape.layers), shape.experts, shape.top_k)
    count = fitting if count is None else count
    if fitting < shape.top_k:
        raise ConfigError(
            f"spac: one token needs {shape.top_k} experts at once ({gib(shape.top_k * shape.expert_bytes)}) whatever "
            f"slots (--spac-slots) are asked for, {gib(max(0, free_bytes))} of fast memory are left for experts: "
            "raise --gpu-memory-utilization or lower --max-model-len"
        )
    check_share(slots, shape.total, shape.top_k, fitting)
    if count > fitting:
        most = 100 * fitting // shape.total
        ok = math.ceil(Fraction(most, 100) * shape.total) >= shape.top_k
        remedies = [f"at most --spac-slots {most}%"] * ok
        if slots.share != 1 or not ok:  # auto may have been counted before, to be all of them
            remedies.append("--spac-slots auto")
        raise ConfigError(
            f"spac: {count} slots (--spac-slots) need {gib(count * shape.expert_bytes)} of fast memory, "
            f"{gib(max(0, free_bytes))} are left; use {', or '.join(remedies)}"
        )
    return count


def settling(total: int, nbytes: int, room: int, slots: int, experts: int) -> int:
    """Returns how many experts must settle, that is have slots for good, because host memory has no room for them.

    0 as well where they would leave fewer slots than a layer has experts: then host memory is too small.

    Args:
        total: experts of all layers, of ``nbytes`` each.
        room: bytes of host memory for experts.
        slots: of all layers together.
        experts: of a layer.
    """
    missing = max(0, total - max(0, room) // nbytes)
    return missing if missing <= slots - experts else 0


def parse_list(text: str) -> list[str]:
    """Splits ``text`` at commas outside of brackets."""
    found, depth = [""], 0
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return [item.strip() for item in found if item.strip()]


def slot_counts(text: str, facts: TraceFacts) -> list[int]:
    """Returns numbers of slots for a list of ``--spac-slots`` values.

    Raises:
        ConfigError: a value is malformed, or is ``auto``.
    """
    from vllm_spac.config.types import SlotCount

    found = []
    for item in parse_list(text):
        try:
            slots = SlotCount.parse(item)
        except ValueError as error:
            raise ConfigError(f"--slots: {error}") from error
        if (count := asked(slots, facts.layers, facts.experts, facts.top_k)) is None:
            raise ConfigError(
                "--slots: auto needs a machine; name percentages, numbers per layer or multiples of top-k (2k)"
            )
        found.append(count)
    return found


_SAMPLER_COPIES = 3  # float32 logits; the same after penalties and temperature; probabilities
_GRAPH = 8 << 20  # bytes per captured graph, in addition to the shared pool; assumed, not measured
_SLACK = 512 << 20  # bytes: workspaces of cuBLAS and attention, fragmentation of the allocator; assumed, not measured


@dataclass(frozen=True)
class MoEWidths:
    """Sizes that determine the activations of a MoE layer: experts per token, hidden size, width of an expert."""

    top_k: int
    hidden: int
    inner: int


@dataclass(frozen=True)
class Widths:
    """Sizes that determine the activations of a model.

    Attributes:
        heads, kv_heads, head: of attention, and the size of one.
    """

    hidden: int
    heads: int
    kv_heads: int
    head: int
    dense: int  # intermediate size of dense layers; 0: there are none
    moe: tuple[MoEWidths, ...]  # the distinct kinds of MoE layers
    itemsize: int  # bytes of a value

    @property
    def row(self) -> int:
        """Bytes of activations per row that a forward holds at a time, see ``Working``."""
        insides = [(3 * self.heads + 4 * self.kv_heads) * self.head]
        insides += [w.top_k * (max(w.inner, w.hidden) + max(2 * w.inner, w.hidden)) for w in self.moe]
        insides.append(3 * self.dense)
        return (3 * self.hidden + max(insides)) * self.itemsize

    @property
    def multiplied(self) -> int:
        """Weights that a row is multiplied with in a MoE layer and the attention before it."""
        return 2 * self.hidden * self.head * (self.heads + self.kv_heads) + max(
            3 * w.top_k * w.hidden * w.inner for w in self.moe
        )


@dataclass(frozen=True)
class Batch:
    """The largest forward of an engine.

    Attributes:
        captured: rows of the largest CUDA graph; 0: no graphs. ``graphs``: number of graphs.
    """

    rows: int
    sampled: int  # rows whose logits are needed, those of drafts included
    captured: int = 0
    graphs: int = 0


@dataclass(frozen=True)
class Working:
    """Bytes of fast memory that vLLM needs at run time, in addition to weights and KV cache.

    Attributes:
        activations: those of the largest forward that vLLM profiles. Per row: three vectors of the hidden size, and the
            largest of the layers' intermediate results. These are: the two buffers of vLLM's Triton MoE kernel, with
            max(inner, hidden) and max(2 inner, hidden) values per pair of row and expert; attention's projections,
            twice, and its output; gate, up and their product in a dense layer.
    """

    sampling: int  # logits of every request and of its drafts, in float32, ``_SAMPLER_COPIES`` times
    activations: int
    graphs: int  # the graph pool, as large as the activations of the largest captured forward, and ``_GRAPH`` per graph
    slack: int

    @classmethod
    def of(cls, widths: Widths, vocabulary: int, batch: Batch) -> Working:
        """Computes them; ``vocabulary``: number of logits of a row."""
        return cls(
            sampling=batch.sampled * vocabulary * 4 * _SAMPLER_COPIES,
            activations=batch.rows * widths.row,
            graphs=batch.captured * widths.row + batch.graphs * _GRAPH,
            slack=_SLACK,
        )

    @property
    def total(self) -> int:
        return self.sampling + self.activations + self.graphs + self.slack

    def describe(self) -> str:
        """A description for the log."""
        return (
            f"{gib(self.total)} for run-time buffers: logits and sampling {gib(self.sampling)}, activations "
            f"{gib(self.activations)}, CUDA graphs {gib(self.graphs)}, slack {gib(self.slack)}"
        )
