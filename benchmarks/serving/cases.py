"""Engines as data: a case has a name, the plugin's knobs and its drafts; what all cases of a run share is apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Self

import typer

from benchmarks.common import ROOT, PlanError
from vllm_spac.config.config import SpacConfig
from vllm_spac.config.types import SlotCount
from vllm_spac.storage.checkpoint.headers import Checkpoint, read_checkpoint

FULL = "100%"
STOCK = "stock"
SPECULATIONS = ("none", "ngram", "eagle3", "draft")
PACKED = ROOT / ".cache" / "serving"
PackedFolder = Annotated[Path, typer.Option(help="Folder of the packed experts.", show_default=".cache/serving")]


@dataclass(frozen=True)
class Drafts:
    """The source of draft tokens for speculation."""

    tokens: int
    eagle3: Path
    draft: Path

    def settings(self, speculation: str) -> dict | None:
        """Returns vLLM's ``speculative_config``; ``PlanError``: the draft's folder is missing."""
        if speculation == "none":
            return None
        if speculation == "ngram":
            lookup = {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
            return {"method": "ngram", "num_speculative_tokens": self.tokens, **lookup}
        folder = {"eagle3": self.eagle3, "draft": self.draft}[speculation]
        if not (folder / "config.json").is_file():
            raise PlanError(f"speculation {speculation} needs a model in {folder}; name another with --{speculation}")
        method = {"eagle3": "eagle3", "draft": "draft_model"}[speculation]
        return {"method": method, "model": str(folder), "num_speculative_tokens": self.tokens}


@dataclass(frozen=True)
class Settings:
    """What all engines of a run share."""

    model: Path
    drafts: Drafts
    prompt_tokens: int
    output_tokens: int
    batches: tuple[int, ...] = (1,)
    seed: int = 0
    eager: bool = True
    dtype: str = "auto"
    disk_dir: Path = PACKED  # of packed experts, for engines that have some on disk
    timeout: float = 1800.0  # seconds that a start or a turn may take
    environment: Mapping[str, str] = field(default_factory=dict)  # of their processes, in addition to this one's
    counters: str = ""  # function of further counters, see ``engine.counters``; none if empty
    checkpoint: Checkpoint | None = None  # of the model; None: its files say it


@dataclass(frozen=True)
class Case:
    """One engine.

    Attributes:
        offload: stock's own offloading, ``uva`` or ``prefetch``, which keeps ``share`` of the experts on the GPU.
        each_share: whether it is run for each share of experts in fast memory that is asked for, not for the first.
    """

    name: str
    knobs: Mapping[str, str] | None  # of the plugin; None: stock vLLM
    speculation: str = "none"
    draft_tokens: int | None = None  # None: as many as the settings say
    offload: str | None = None
    share: str | None = None
    exact: bool = True  # whether its tokens must be stock's, apart from rounding
    each_share: bool = False

    @classmethod
    def parse(cls, text: str, slots: str) -> Self:
        """Parses ``spac policy=lru speculation=ngram``; ``slots`` is the default for that knob.

        Raises:
            PlanError: it is not understood.
            ConfigError: a knob or its value is not the plugin's.
        """
        kind, *words = text.split()
        if kind not in (STOCK, "spac") or not all("=" in word for word in words):
            raise PlanError(f"{text!r}: use stock or spac, then knob=value, e.g. spac policy=lru")
        given = dict(word.split("=", 1) for word in words)
        speculation = given.pop("speculation", "none")
        known_speculations([speculation])
        length = given.pop("draft_tokens", None)
        if length is not None and (speculation == "none" or not length.isdigit() or not int(length)):
            raise PlanError(f"{text!r}: draft_tokens={length} is a positive number, of a side with speculation=…")
        drafted = None if length is None else int(length)
        if kind == STOCK:
            if given:
                raise PlanError(f"{text!r}: stock vLLM has no knob {next(iter(given))}")
            return cls(text, None, speculation, drafted)
        knobs = {"slots": slots} | given
        config = SpacConfig.parse(knobs)
        tree = config.tree_nodes
        if tree and drafted not in (None, tree):
            raise PlanError(f"{text!r}: tree={tree} and draft_tokens={drafted} are two draft lengths; drop one")
        return cls(text, knobs, speculation, tree or drafted, exact=not config.lossy)

    @property
    def is_stock(self) -> bool:
        return self.knobs is None

    @property
    def has_share(self) -> bool:
        """Whether a share of the experts that is asked for is in fast memory."""
        return self.offload is not None or (self.knobs is not None and "slots" not in self.knobs)

    def at(self, share: str) -> Case:
        """Returns the case with ``share`` of the experts in fast memory, unless its knobs say how many."""
        knobs = None if self.knobs is None else {"slots": share, **self.knobs}
        return replace(self, name=f"{self.name} {share}" if self.each_share else self.name, knobs=knobs, share=share)

    def stock_options(self, checkpoint: Checkpoint) -> dict:
        """Returns the engine arguments of stock's offloading: as many bytes of experts on the GPU as in slots.

        ``prefetch`` moves whole layers and keeps two buffers of one besides.
        """
        share = SlotCount.parse(self.share or "").share
        assert share is not None, "offloading is asked for with a percentage"
        outside, layers = 1 - share, len(checkpoint.layer_bytes)
        if self.offload == "uva":
            moved = float(outside * sum(checkpoint.layer_bytes.values())) / 2**30
            return {"offload_backend": "uva", "cpu_offload_gb": moved, "cpu_offload_params": ["experts"]}
        group = outside.limit_denominator(layers)
        return {
            "offload_backend": "prefetch",
            "offload_group_size": group.denominator,
            "offload_num_in_group": group.numerator,
            "offload_params": ["experts"],
        }

    def job(self, settings: Settings, ids: Sequence[list[int]] = ()) -> dict:
        """Returns the job for ``engine.py``; ``ids``: prompts of an engine that runs and ends.

        Raises:
            PlanError: its drafts come from a model that is not there.
        """
        drafts = settings.drafts
        if self.draft_tokens is not None:
            drafts = replace(drafts, tokens=self.draft_tokens)
        options: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "enforce_eager": settings.eager,
            "max_model_len": settings.prompt_tokens + settings.output_tokens + 8,
            "max_num_seqs": max(settings.batches),
            "enable_prefix_caching": False,  # else the second batch size finds the first one's prompts
            "disable_log_stats": False,
            "seed": settings.seed,
            "dtype": settings.dtype,
        }
        if self.offload:
            options |= self.stock_options(settings.checkpoint or read_checkpoint(settings.model))
        spac = None
        if self.knobs is not None:
            on_disk = self.knobs.get("store", "disk") == "disk" or "executor" in self.knobs  # workers have disks
            spac = {**({"disk_dir": str(settings.disk_dir)} if on_disk else {}), **self.knobs}
        return {
            "model": str(settings.model),
            "spac": spac,
            "speculative": drafts.settings(self.speculation),
            "prompts": list(ids),
            "batches": list(settings.batches),
            "output_tokens": settings.output_tokens,
            "seed": settings.seed,
            "options": options,
            "environment": dict(settings.environment),
            "counters": settings.counters,
        }


def split(text: str) -> list[str]:
    """``"10%, 25%"`` -> ``["10%", "25%"]``, each once."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def slot_counts(text: str) -> list[str]:
    """``"10%, 8"`` -> ``["10%", "8"]``; ``PlanError``: one is no number of slots, or there is none."""
    found = split(text)
    try:
        for count in found:
            SlotCount.parse(count)
    except ValueError as error:
        raise PlanError(f"--slots {text}: {error}") from error
    if not found:
        raise PlanError("--slots: name at least one share, e.g. 25%")
    return found


def sizes(text: str, option: str = "--batch") -> tuple[int, ...]:
    """``"1,8"`` -> ``(1, 8)``; ``PlanError``: one is no positive number, or there is none."""
    found = split(text)
    if not found or not all(part.isdigit() and int(part) > 0 for part in found):
        raise PlanError(f"{option} {text}: name one or more positive numbers, e.g. 1,8")
    return tuple(map(int, found))


def known_speculations(names: Sequence[str]) -> None:
    """Raises PlanError if one of ``names`` is no speculation."""
    if unknown := set(names) - set(SPECULATIONS):
        raise PlanError(f"no speculation is called {', '.join(sorted(unknown))}; use {', '.join(SPECULATIONS)}")


# The engines of ``on_gpu.py``, by part: those whose tokens are compared, that are timed, and that serve agents.
DRAFTS = 4  # per step of a chain
_NONE: dict[str, str] = {}
_DEVICE, _HOST = {"plane": "pointers"}, {"plane": "slots"}
_AHEAD = {"prefetch": "gate"}
_UTILITY = {"policy": "utility", "prefetch": "utility"}
_CPU = {"cpu_experts": "auto"}
_B16 = {"budget": "16"}

OF_SHAPES = ("stock uva", "ptr", "ptr cpu", "ptr resident")  # if none are asked for, after stock itself

CASES: Mapping[str, tuple[Case, ...]] = {
    "tokens": (
        Case(STOCK, None),
        Case("default", _NONE),
        Case("host", _HOST),
        Case("table", {"plane": "table"}),
        Case("device", _DEVICE),
        Case("device cpu", _DEVICE | _CPU),
        Case("device ahead", _DEVICE | _AHEAD),
        Case("default, ngram", _NONE, "ngram"),
        Case("default, eagle3", _NONE, "eagle3"),
        Case("default, eagle3, no guard", {"guard": "off"}, "eagle3"),
        Case("device tree of 16", _DEVICE | {"tree": "16", "guard": "off"}, "eagle3", draft_tokens=16),
        Case("device B=16", _DEVICE | {"budget": "16@when=decode"}, exact=False),
        Case("device B=16, eagle3", _DEVICE | _B16 | {"guard": "off"}, "eagle3", exact=False),
        Case("host utility", _HOST | _UTILITY),
        Case("host cpu", _HOST | _CPU),
        Case("host ahead", _HOST | _AHEAD),
        Case("disk", _HOST | {"store": "disk", "host_memory": "1GiB"}),
        Case("two workers", {"executor": "processes@workers=2"}),
    ),
    "serving": (
        Case(STOCK, None),
        Case("stock uva", None, offload="uva", each_share=True),
        Case("ptr", _NONE, each_share=True),
        Case("stock prefetch", None, offload="prefetch", each_share=True),
        Case("slots", _HOST),
        Case("ptr cpu", _DEVICE | _CPU),
        Case("ptr, eagle3", _NONE, "eagle3"),
        Case("ptr no guard, eagle3", {"guard": "off"}, "eagle3"),
        Case("ptr, ngram", _NONE, "ngram"),
        Case("ptr resident", _DEVICE | {"slots": "100%"}),
        Case("table", {"plane": "table"}),
    ),
    "agents": (
        Case(STOCK, None),
        Case("stock uva", None, offload="uva", each_share=True),
        Case("ptr", _NONE, each_share=True),
        Case("ptr cpu", _DEVICE | _CPU),
    ),
}
