"""Published figures of models' locality, each with its source."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """A figure of one model that its authors measured.

    Attributes:
        figure: the attribute of ``Locality`` that it compares with.
        conditions: what differs from how ``Locality`` measures.
    """

    model: str
    figure: str
    value: float
    conditions: str
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
