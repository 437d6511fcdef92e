"""Recipes: the knobs that each ``preset`` stands for, wherever they are not given themselves."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vllm_spac.errors import Remedy, SpacError, drop, flag, printable

logger = logging.getLogger("vllm.spac")


@dataclass(frozen=True)
class Preset:
    """A recipe.

    Attributes:
        paper: its number in arXiv; empty: a recipe of ours, of several papers' parts.
        drafts: an example of the ``speculative_config`` that it needs, without which it is nothing; None: none.
    """

    paper: str
    knobs: Mapping[str, Any]
    drafts: Mapping[str, Any] | None = None

    @property
    def drafter(self) -> Remedy:
        """The remedy of adding the drafter that it needs."""
        assert self.drafts is not None
        text = json.dumps(self.drafts)
        return Remedy(f"add --speculative-config '{text}'", {"--speculative-config": self.drafts})


_COPY = {"method": "draft_model", "model": "COPY", "num_speculative_tokens": 4}
_HEAD = {"method": "eagle3", "model": "HEAD"}
_CHAIN = _HEAD | {"num_speculative_tokens": 4}
# Of the papers' parts what wins together, with drafts that the guard chooses: benchmarks/results/drafts_account.md
_COMPOSED = {"store": "host", "cpu_experts": "auto"}
PRESETS: dict[str, Preset] = {
    "moe-spac": Preset(
        "2603.09983",
        {
            "slots": "17%",
            "store": "host",
            "policy": "utility@recycle=True",
            "prefetch": "utility",
            "cpu_experts": "threshold",
            "guard": "off",
        },
        {"method": "draft_model", "model": "DRAFT", "num_speculative_tokens": 8},
    ),
    "moe-spec": Preset(
        "2602.16052", {"slots": "100%", "tree": "63", "budget": "32@ranking=router", "guard": "off"}, _HEAD
    ),
    "sp-moe": Preset("2510.10302", {"policy": "layer_lru", "prefetch": "draft_gate"}, _COPY | {"model": "PARENT"}),
    "speculating-experts": Preset(
        "2603.19289", {"slots": "2k", "policy": "drop", "prefetch": "quasi_hidden", "speculate": "predicted"}
    ),
    "od-moe": Preset(
        "2512.03927",
        {
            "executor": "processes@workers=8@per_layer=2",
            "slots": "2k",
            "policy": "drop",
            "prefetch": "shadow",
            "guard": "off",
        },
        _COPY,
    ),
    "composed": Preset("", _COMPOSED, _CHAIN),
    "composed-lossy": Preset("", _COMPOSED | {"budget": "16"}, _CHAIN),
}


def filled(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``raw`` knobs with those that its preset stands for; unchanged if it names none that there is."""
    preset = raw.get("preset")
    found = PRESETS.get(preset) if isinstance(preset, str) else None
    return {**({} if found is None else found.knobs), **raw}


def report(name: str, explicit: Mapping[str, Any], lossy: bool) -> None:
    """Logs the flags that a preset stands for beside the knobs that are ``explicit``; ``lossy``: all together are."""
    knobs = {knob: value for knob, value in PRESETS[name].knobs.items() if knob not in explicit}
    flags = " ".join(f"{flag(knob)} {shlex.quote(str(value))}" for knob, value in knobs.items())
    paper = f"arXiv {PRESETS[name].paper}" if PRESETS[name].paper else "of several papers' parts"
    says = printable(f"spac: preset={name} ({paper}{', LOSSY' if lossy else ''}) is {flags}")
    (logger.warning if lossy else logger.info)("%s", says)


@contextmanager
def or_without(config: Any) -> Iterator[None]:
    """In a refusal raised inside the block: to drop a knob that the preset of a ``SpacConfig`` set is to drop that."""
    try:
        yield
    except SpacError as error:
        knobs = {} if config.preset is None else PRESETS[config.preset].knobs
        ours = {name for name, value in knobs.items() if str(getattr(config, name)) == str(value)} - config.explicit
        left = [each for each in error.remedies if not ours & {name for name, to in each.changes.items() if to is None}]
        if len(left) == len(error.remedies):
            raise
        raise type(error).refused(error.problem, *left, drop("preset")) from None
