"""Locality of a routing trace: how much the experts of a token tell about those of the next ones.

All figures are of text in its order (see ``trace_text``), layer by layer. Beside them stand published figures of other
models that were measured in a comparable way, each with its source.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np

from vllm_spac.recording.trace_file import Trace
from vllm_spac.tools.traces.trace_statistics import overlap
from vllm_spac.tools.traces.trace_text import Text

SMALL_CACHE, LARGE_CACHE = 0.19, 0.38  # of a layer's experts
LONG_WINDOW, SHORT_WINDOW = 63, 9  # rows of EAGLE-3's tree, and of a verify step with 8 drafts
RARE = 0.002  # of the tokens
SETS_TOKENS = 1850  # of a stretch whose sets of experts are counted
UNION_ROWS = (2, 5, 8, 16)  # of steps: a draft, a chain of 4, a chain of 7 or 8 requests, a tree
_CHUNK = 1 << 12  # tokens


@dataclass(frozen=True, eq=False)
class Locality:
    """Figures of a text, float64 [layers] each; nan where the text is too short or the trace has no weights.

    Attributes:
        top_half_long: share of the routing weights of 63 consecutive tokens that the best half of the experts holds,
            mean over windows; see ``top_half``.
        sets_perplexity: of the sets of experts that tokens select (e to the entropy, in nats, of how often each
            occurs): 1 if all tokens select the same; at most ``SETS_TOKENS``.
    """

    overlap: np.ndarray  # share of a token's experts that the token before selected too; 0.5: half of its top-k
    lru_small: np.ndarray  # hit rate of an LRU cache of each layer that holds 19 % of its experts; see ``lru_hits``
    lru_large: np.ndarray  # the same with 38 %
    top_half_long: np.ndarray
    top_half_short: np.ndarray  # the same over 9 tokens
    distinct: np.ndarray  # experts that 9 consecutive tokens select, mean over windows
    least: np.ndarray  # share of the tokens that select the least used expert
    most: np.ndarray  # share of the tokens that select the most used expert
    rare: np.ndarray  # experts that less than 0.2 % of the tokens select
    sets_perplexity: np.ndarray
    gini: np.ndarray  # of the experts' use: 0 if all are used alike, near 1 if few are used
    heaviest: np.ndarray  # share of a token's routing weights that its heaviest expert has
    unions: dict[int, np.ndarray]  # ``distinct`` of each of ``UNION_ROWS`` consecutive tokens
    tokens: int
    rows: int

    @classmethod
    def of(cls, trace: Trace) -> Locality:
        """Measures a trace; a few seconds for 20 MB."""
        text = Text.of(trace)
        small, large = lru_hits(text, [slots_of(share, text) for share in (SMALL_CACHE, LARGE_CACHE)])
        shares = use(text)
        return cls(
            overlap=overlap(text),
            lru_small=small,
            lru_large=large,
            top_half_long=top_half(text, LONG_WINDOW),
            top_half_short=top_half(text, SHORT_WINDOW),
            distinct=distinct(text, SHORT_WINDOW),
            least=shares.min(axis=1),
            most=shares.max(axis=1),
            rare=np.where(np.isnan(shares[:, 0]), np.nan, (shares < RARE).sum(axis=1)),
            sets_perplexity=sets_perplexity(text),
            gini=gini(shares),
            heaviest=heaviest(text),
            unions={rows: distinct(text, rows) for rows in UNION_ROWS},
            tokens=len(text),
            rows=text.rows,
        )

    def layers(self) -> dict[str, np.ndarray]:
        """Returns the figures of each layer by name, float64 [layers]."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.type == "np.ndarray"}

    def means(self) -> dict[str, float]:
        """Returns the mean over layers of each figure; of ``rare`` the sum, of ``least`` and ``most`` the extreme."""
        found = {name: float(values.mean()) for name, values in self.layers().items()}
        return found | {
            "least": float(self.least.min()),
            "most": float(self.most.max()),
            "rare": float(self.rare.sum()),
        }


def slots_of(share: float, text: Text) -> int:
    """Returns the slots of a layer's cache: ``share`` of its experts, rounded, but at least one token's."""
    return max(text.top_k, round(share * text.experts))


def lru_hits(text: Text, slots: list[int]) -> list[np.ndarray]:
    """Returns the hit rate of one LRU cache per layer, for each number of slots: float64 [layers].

    The cache sees one token at a time, as decoding at batch size 1 does, and keeps its experts from one sequence to the
    next. Tokens before it is full are not counted. Of experts used by the same token, that with the lower id is
    evicted first. Exact for at least ``top_k`` slots.
    """
    layers, sizes = np.arange(text.layers)[:, None], np.array(slots)[:, None]
    last = np.full((text.layers, text.experts), -1, dtype=np.int64)  # when each expert was last used
    known = np.zeros(text.layers, dtype=np.int64)  # experts used so far
    hits, counted = np.zeros((2, len(slots), text.layers))
    order = np.arange(text.top_k)
    for clock, token in enumerate(np.sort(text.ids, axis=2)):
        seen = last[layers, token]
        newer = (last[:, None, :] > seen[:, :, None]).sum(axis=2)  # experts used since
        hits_now = ((newer < sizes[:, :, None]) & (seen >= 0)).sum(axis=2)
        full = known >= sizes
        hits += hits_now * full
        counted += full
        known += (seen < 0).sum(axis=1)
        last[layers, token] = clock * text.top_k + order
    with np.errstate(invalid="ignore"):
        return list(hits / (counted * text.top_k))


def top_half(text: Text, rows: int) -> np.ndarray:
    """Returns float64 [layers], the share of the routing weights in a window that the best half of the experts holds.

    MoE-Spec (figure 2c) has it of the routers' scores of all experts, of which a trace has those of the selected ones.
    The share is therefore higher here. Windows of ``rows`` tokens do not overlap; the best experts are those with the
    greatest sums in the window; nan without weights.
    """
    if text.weights is None:
        return np.full(text.layers, np.nan)
    shares = []
    for mass in _sums(text, rows, text.weights):
        ordered = -np.sort(-mass, axis=1)
        shares.append(ordered[:, : text.experts // 2].sum(axis=1) / ordered.sum(axis=1))
    return np.mean(shares, axis=0) if shares else np.full(text.layers, np.nan)


def distinct(text: Text, rows: int) -> np.ndarray:
    """Returns float64 [layers], experts that a window of ``rows`` tokens selects; windows do not overlap."""
    counts = [(found > 0).sum(axis=1) for found in _sums(text, rows, None)]
    return np.mean(counts, axis=0) if counts else np.full(text.layers, np.nan)


def sets_perplexity(text: Text) -> np.ndarray:
    """Returns float64 [layers], the perplexity of the sets of experts that tokens select; nan without tokens.

    The mean over stretches of ``SETS_TOKENS``, since a longer text has more sets; of a shorter one, its own.
    """
    found, ends = np.full(text.layers, np.nan), range(SETS_TOKENS, len(text) + 1, SETS_TOKENS)
    stretches = [slice(end - SETS_TOKENS, end) for end in ends] or [slice(len(text))]
    for layer in range(text.layers if len(text) else 0):
        found[layer] = np.mean([_perplexity(text.ids[stretch, layer]) for stretch in stretches])
    return found


def _perplexity(ids: np.ndarray) -> float:
    """e to the entropy, in nats, of how often each set comes; ids [tokens, top_k]."""
    _, counts = np.unique(np.sort(ids, axis=1), axis=0, return_counts=True)
    shares = counts / len(ids)
    return float(np.exp(-(shares * np.log(shares)).sum()))


def gini(shares: np.ndarray) -> np.ndarray:
    """Returns the Gini coefficient of each row, float64 [layers]; ``shares`` as of ``use``."""
    ordered, count = np.sort(shares, axis=1), shares.shape[1]
    weights = 2 * np.arange(1, count + 1) - count - 1
    with np.errstate(invalid="ignore"):
        return (ordered * weights).sum(axis=1) / (count * ordered.sum(axis=1))


def heaviest(text: Text) -> np.ndarray:
    """Returns float64 [layers], the mean share of a token's routing weights that its heaviest expert has."""
    if text.weights is None or not len(text):
        return np.full(text.layers, np.nan)
    weights = text.weights.astype(np.float64)
    return (weights.max(axis=2) / weights.sum(axis=2)).mean(axis=0)


def use(text: Text) -> np.ndarray:
    """Returns float64 [layers, experts], the share of the tokens that select each expert; nan without tokens."""
    total = np.zeros((text.layers, text.experts))
    for first in range(0, len(text), _CHUNK):
        total += _by_expert(text, slice(first, first + _CHUNK), None)
    with np.errstate(invalid="ignore"):
        return total / len(text) if len(text) else np.full_like(total, np.nan)


def _sums(text: Text, rows: int, weights: np.ndarray | None) -> Iterator[np.ndarray]:
    """Yields float64 [layers, experts] of each window: the sums of ``weights``, or of ones."""
    for first in text.windows(rows).tolist():
        yield _by_expert(text, slice(first, first + rows), weights)


def _by_expert(text: Text, tokens: slice, weights: np.ndarray | None) -> np.ndarray:
    flat = text.ids[tokens] + np.arange(text.layers)[:, None] * text.experts
    given = None if weights is None else weights[tokens].astype(np.float64).ravel()
    size = text.layers * text.experts
    return np.bincount(flat.ravel(), given, minlength=size).reshape(text.layers, -1)


@dataclass(frozen=True)
class Published:
    """A figure of one model that its authors measured."""

    model: str
    figure: str  # the attribute of ``Locality`` that it compares with
    value: float
    conditions: str  # what differs from how ``Locality`` measures
    source: str


_CACHE = "hits from an empty cache, 256 tokens; slots are counted per matrix there, three to an expert"
PUBLISHED = (
    Published("Qwen3-30B-A3B", "overlap", 0.45, "decoded tokens, 3 prompts x 512", "github.com/kekzl/imp/pull/1359"),
    Published("Qwen3-30B-A3B", "lru_small", 0.741, _CACHE, "github.com/kekzl/imp/pull/1374"),
    Published("Qwen3-30B-A3B", "lru_large", 0.894, _CACHE, "github.com/kekzl/imp/pull/1374"),
    Published(
        "OLMoE-1B-7B",
        "top_half_long",
        0.93,
        "scores of all experts, rows of a draft tree",
        "MoE-Spec, arXiv:2602.16052, figure 2c",
    ),
)
