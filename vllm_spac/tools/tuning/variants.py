"""The ways to serve that ``vllm-spac tune`` measures: at most eight, each for what a page of our results says. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_spac.config.tuned_profile import DEFAULT, Knob, rounds
from vllm_spac.tools.planning.planned_memory import NGRAM


@dataclass(frozen=True)
class Variant:
    """One way to serve."""

    name: str
    knobs: Mapping[str, Knob] | None  # of the plugin; None: stock vLLM, for ``check --engines`` alone
    drafts: Mapping[str, Any] | None = None  # vLLM's ``speculative_config``; None: no drafts

    @property
    def rounds(self) -> bool:
        """Whether its tokens are vLLM's up to rounding only."""
        return rounds(self.knobs or {})


def variants(
    slots: str | None, drafts: Mapping[str, Any] | None, *, rounding: bool, gpu: bool, resident: bool
) -> list[Variant]:
    """Returns the default, and what may be faster, the likeliest first. Pages are those of ``benchmarks/results``.

    Args:
        slots: as ``--spac-slots``, for all; None: as many as fit. So no variant has more of them.
        drafts: a ``speculative_config`` of the user's.
        rounding: whether variants may be exact up to rounding.
        resident: whether the default has a slot for every expert: then drafts alone can be faster.
    """
    base: dict[str, Knob] = {} if slots is None else {"slots": slots}
    ways = [Variant(DEFAULT, base)]
    if rounding and not resident:
        # scaled.md: 2.17 times a cache alone with the proportions of an RTX 4090, and drafts beside it add nothing;
        # gpu.md: never on an H100. Named, since ``auto`` would compare by itself meanwhile.
        ways.append(Variant("CPU experts", base | {"store": "host", "cpu_experts": "waterfill"}))
    # speculation_real.md: an EAGLE-3 head 1.05 times no drafts, chosen in each step by the guard.
    if drafts is not None:
        name = f"drafts={drafts.get('method')} {drafts.get('num_speculative_tokens', '')}".strip()
        ways.append(Variant(name, base, drafts))
        # prefetch.md: 1.15 times the same drafts, where the draft model is a rounded copy of the model.
        if drafts.get("method") == "draft_model" and not resident:
            ways.append(Variant(f"{name}, prefetch=shadow", base | {"prefetch": "shadow", "guard": "off"}, drafts))
    if drafts is None or drafts.get("method") != "ngram":
        ways.append(Variant("drafts=ngram 4", base, NGRAM))
    if not gpu and not resident:  # the device decides on a GPU (gpu.md), with neither of these
        # scaled.md: ``reuse``, the default, took longer than it with half of the experts in slots.
        ways.append(Variant("policy=layer_lru", base | {"policy": "layer_lru"}))
        # tuned.md (its JSON): the one number of threads that was not slower than the default under either limit.
        ways.append(Variant("io_threads=8", base | {"io_threads": 8}))
    if not resident:
        # recall.md: the next layer's router, untrained, knows three of four experts. Last, since loads are longer than
        # layers (scaled.md: 0.98). Trained predictors, which need a file, do not pay (prefetch.md).
        ways.append(Variant("prefetch=gate", base | {"prefetch": "gate"}))
    return ways
