"""Plans the engines of a run, their order and their settings. Pure, except that it checks whether folders exist."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from vllm_spac.config.types import SlotCount
from vllm_spac.storage.checkpoint.headers import Checkpoint

FULL = "100%"
POINTERS = "+pointers"  # after a policy's name: decisions=device, which sums in another order than stock
OFFLOADS = ("uva", "prefetch")  # of stock vLLM, on a GPU
SPECULATIONS = ("none", "ngram", "eagle3", "draft")


T = TypeVar("T")


class PlanError(ValueError):
    """The run cannot be made as requested; the message names the option to change."""


@dataclass(frozen=True)
class Configuration:
    """One engine. ``policy`` is None for stock vLLM.

    ``offload`` is a backend of stock's own offloading, which keeps the share ``slots`` of the experts on the GPU.
    """

    slots: str | None
    policy: str | None
    speculation: str
    offload: str | None = None

    @property
    def is_stock(self) -> bool:
        return self.policy is None

    @property
    def name(self) -> str:
        if self.is_stock:
            return f"stock {self.offload} {self.slots}" if self.offload else "stock"
        policy = f" {self.policy}" if self.slots != FULL else ""
        return f"spac {self.slots}{policy}"

    @property
    def label(self) -> str:
        return self.name if self.speculation == "none" else f"{self.name}, {self.speculation}"

    @property
    def rounds(self) -> bool:
        """Whether its tokens equal stock's only up to rounding."""
        return self.policy is not None and self.policy.endswith(POINTERS)

    def knobs(self) -> dict:
        """Returns the plugin's knobs of this configuration."""
        assert self.policy is not None, "stock has no knobs"
        policy, decisions = self.policy.removesuffix(POINTERS), "device" if self.rounds else "host"
        return {"slots": self.slots, "policy": policy, "decisions": decisions}

    def stock_options(self, checkpoint: Checkpoint) -> dict:
        """Returns the engine arguments of stock's offloading: as many bytes of experts on the GPU as in slots.

        ``prefetch`` moves whole layers and keeps two buffers of one besides.
        """
        if self.offload is None:
            return {}
        share = SlotCount.parse(self.slots or "").share
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


@dataclass(frozen=True)
class Drafts:
    """The source of draft tokens for speculation."""

    tokens: int
    eagle3: Path
    draft: Path

    def settings(self, speculation: str) -> dict | None:
        """Returns vLLM's ``speculative_config``.

        Raises:
            PlanError: the draft's folder is missing.
        """
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


def split(text: str) -> list[str]:
    """``"10%, 25%"`` -> ``["10%", "25%"]``, each once."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def sizes(text: str, option: str = "--batch") -> tuple[int, ...]:
    """``"1,8"`` -> ``(1, 8)``.

    Raises:
        PlanError: one is no positive number, or there is none.
    """
    found = split(text)
    if not found or not all(part.isdigit() and int(part) > 0 for part in found):
        raise PlanError(f"{option} {text}: name one or more positive numbers, e.g. 1,8")
    return tuple(map(int, found))


def configurations(
    slots: list[str],
    policies: list[str],
    speculations: list[str],
    offloads: tuple[str, ...] = (),
) -> list[Configuration]:
    """Returns, for each speculation: stock, all experts resident, and each number of slots under each policy.

    Each size also for stock with each of ``offloads``.

    Raises:
        PlanError: a speculation is unknown, or a list is empty.
        ValueError: a number of slots is not understood.
    """
    for count in slots:
        SlotCount.parse(count)
    if unknown := set(speculations) - set(SPECULATIONS):
        raise PlanError(f"no speculation is called {', '.join(sorted(unknown))}; use {', '.join(SPECULATIONS)}")
    if odd := [name for name in policies if "+" in name.removesuffix(POINTERS)]:
        raise PlanError(f"--policy {odd[0]}: a policy's name can be followed by {POINTERS}")
    if not policies or not speculations:
        raise PlanError("--policy and --speculation must each name at least one")
    plan = []
    if unknown := set(offloads) - set(OFFLOADS):
        raise PlanError(f"stock offloads by {' or '.join(OFFLOADS)}, not by {', '.join(sorted(unknown))}")
    if odd := [size for size in slots if offloads and SlotCount.parse(size).share is None]:
        raise PlanError(f"--offload keeps a share of the experts: --slots {odd[0]} is none, use e.g. 25%")
    for speculation in speculations:
        plan += [Configuration(None, None, speculation), Configuration(FULL, policies[0], speculation)]
        plan += [Configuration(count, policy, speculation) for count in slots if count != FULL for policy in policies]
        plan += [
            Configuration(count, None, speculation, offload=offload)
            for count in slots
            if count != FULL
            for offload in offloads
        ]
    return plan


def rotated(plan: list[T], repeat: int, repeats: int) -> list[T]:
    """Returns the order of one repeat, rotated so that drift of the machine affects all alike."""
    start = repeat * len(plan) // max(1, repeats)
    return plan[start:] + plan[:start]
