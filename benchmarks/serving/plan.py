"""Plans the engines of a run, their order and their settings. Pure, except that it checks whether folders exist."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from vllm_spac.config.types import SlotCount
from vllm_spac.storage.checkpoint.headers import Checkpoint

FULL = "100%"
# Suffixes of a policy's name, and the knobs that they set. MoE-SpAc is utility+prefetch+cpu+threshold.
EXTRAS = {
    "prefetch": {"prefetch": "utility"},
    "cpu": {"cpu_experts": "waterfill"},  # named, thus in every step
    "threshold": {"cpu_experts": "threshold"},
    "pointers": {"decisions": "device"},
}
OFFLOADS = ("uva", "prefetch")  # of stock vLLM, on a GPU
ROUNDING = {"cpu", "pointers"}  # these sum in another order than stock
SPECULATIONS = ("none", "ngram", "eagle3", "draft")


T = TypeVar("T")


class PlanError(ValueError):
    """The run cannot be made as requested; the message names the option to change."""


@dataclass(frozen=True)
class Configuration:
    """One engine. ``policy`` is None for stock vLLM; a ``budget`` makes it lossy.

    ``offload`` is a backend of stock's own offloading, which keeps the share ``slots`` of the experts on the GPU.
    """

    slots: str | None
    policy: str | None
    speculation: str
    budget: int | None = None
    offload: str | None = None

    @property
    def is_stock(self) -> bool:
        return self.policy is None

    @property
    def name(self) -> str:
        if self.is_stock:
            return f"stock {self.offload} {self.slots}" if self.offload else "stock"
        policy = f" {self.policy}" if self.slots != FULL else ""
        return f"spac {self.slots}{policy}" + (f" budget {self.budget}" if self.budget else "")

    @property
    def label(self) -> str:
        return self.name if self.speculation == "none" else f"{self.name}, {self.speculation}"

    @property
    def extras(self) -> list[str]:
        return [] if self.policy is None else self.policy.split("+")[1:]

    @property
    def rounds(self) -> bool:
        """Whether its tokens equal stock's only up to rounding."""
        return not ROUNDING.isdisjoint(self.extras)

    def knobs(self) -> dict:
        """Returns the plugin's knobs of this configuration."""
        assert self.policy is not None, "stock has no knobs"
        found: dict[str, Any] = {"slots": self.slots, "policy": self.policy.split("+")[0], "decisions": "host"}
        for name in EXTRAS:
            if name in self.extras:
                found |= EXTRAS[name]
        return found | ({"budget": self.budget} if self.budget else {})

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

    def series(self) -> tuple[str | None, str]:
        """Returns the key that configurations share which differ in their slots alone."""
        return f"{self.policy} budget {self.budget}" if self.budget else self.policy, self.speculation


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
    budgets: tuple[int, ...] = (),
    offloads: tuple[str, ...] = (),
) -> list[Configuration]:
    """Returns, for each speculation: stock, all experts resident, and each number of slots under each policy.

    Where there are drafts, each of these also under each budget. Each size also for stock with each of ``offloads``.

    Raises:
        PlanError: a speculation is unknown, or a list is empty.
        ValueError: a number of slots is not understood.
    """
    for count in slots:
        SlotCount.parse(count)
    if unknown := set(speculations) - set(SPECULATIONS):
        raise PlanError(f"no speculation is called {', '.join(sorted(unknown))}; use {', '.join(SPECULATIONS)}")
    if budgets and set(speculations) == {"none"}:
        raise PlanError("--budget bounds verify steps: add --speculation, e.g. eagle3")
    if odd := [name for name in policies if not set(name.split("+")[1:]) <= set(EXTRAS)]:
        raise PlanError(f"--policy {odd[0]}: a policy's name can be followed by +{', +'.join(EXTRAS)}")
    if odd := [name for name in policies if "threshold" in name.split("+") and "cpu" not in name.split("+")]:
        raise PlanError(f"--policy {odd[0]}: a threshold divides missing experts between loads and the CPU; add +cpu")
    if not policies or not speculations:
        raise PlanError("--policy and --speculation must each name at least one")
    plan = []
    if unknown := set(offloads) - set(OFFLOADS):
        raise PlanError(f"stock offloads by {' or '.join(OFFLOADS)}, not by {', '.join(sorted(unknown))}")
    if odd := [size for size in slots if offloads and SlotCount.parse(size).share is None]:
        raise PlanError(f"--offload keeps a share of the experts: --slots {odd[0]} is none, use e.g. 25%")
    for speculation in speculations:
        plan += [Configuration(None, None, speculation), Configuration(FULL, policies[0], speculation)]
        bounds = (None, *budgets) if speculation != "none" else (None,)
        plan += [
            Configuration(count, policy, speculation, budget)
            for count in slots
            if count != FULL
            for policy in policies
            for budget in bounds
        ]
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
