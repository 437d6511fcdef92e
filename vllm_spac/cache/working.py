"""Fast memory that vLLM needs at run time beside weights and KV cache, from the sizes of model and batch. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_spac.system.host_memory import gib

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
        hidden: size of a row.
        heads, kv_heads, head: of attention, and the size of one.
        dense: intermediate size of dense layers; 0: there are none.
        moe: the distinct kinds of MoE layers.
        itemsize: bytes of a value.
    """

    hidden: int
    heads: int
    kv_heads: int
    head: int
    dense: int
    moe: tuple[MoEWidths, ...]
    itemsize: int

    @property
    def row(self) -> int:
        """Bytes of activations per row that a forward holds at a time, see ``Working``."""
        insides = [(3 * self.heads + 4 * self.kv_heads) * self.head]
        insides += [w.top_k * (max(w.inner, w.hidden) + max(2 * w.inner, w.hidden)) for w in self.moe]
        insides.append(3 * self.dense)
        return (3 * self.hidden + max(insides)) * self.itemsize


@dataclass(frozen=True)
class Batch:
    """The largest forward of an engine.

    Attributes:
        rows: of a forward.
        sampled: rows whose logits are needed, those of drafts included.
        captured: rows of the largest CUDA graph; 0: no graphs. ``graphs``: number of graphs.
    """

    rows: int
    sampled: int
    captured: int = 0
    graphs: int = 0


@dataclass(frozen=True)
class Working:
    """Bytes of fast memory that vLLM needs at run time, in addition to weights and KV cache.

    Attributes:
        sampling: logits of every request and of its drafts, in float32, ``_SAMPLER_COPIES`` times.
        activations: those of the largest forward that vLLM profiles. Per row: three vectors of the hidden size, and the
            largest of the layers' intermediate results. These are: the two buffers of vLLM's Triton MoE kernel, with
            max(inner, hidden) and max(2 inner, hidden) values per pair of row and expert; attention's projections,
            twice, and its output; gate, up and their product in a dense layer.
        graphs: the graph pool, as large as the activations of the largest captured forward, and ``_GRAPH`` per graph.
        slack: ``_SLACK``.
    """

    sampling: int
    activations: int
    graphs: int
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
