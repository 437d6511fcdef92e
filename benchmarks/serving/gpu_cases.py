"""The engines that ``on_gpu.py`` runs, as data: a name, the plugin's knobs, its drafts, and what its tokens must be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Part = Literal["tokens", "serving"]
DRAFTS = 4  # per step of a chain


@dataclass(frozen=True)
class Case:
    """One engine.

    Attributes:
        knobs: of the plugin; None: stock vLLM. Those without ``slots`` get the share that is asked for.
        offload: a backend of stock's own offloading, see ``plan.OFFLOADS``.
        exact: whether its tokens must be stock's, apart from rounding.
        each_share: whether it is run for each share of experts in slots, not for the first alone.
    """

    part: Part
    name: str
    knobs: Mapping[str, str] | None
    speculation: str = "none"
    offload: str | None = None
    exact: bool = True
    each_share: bool = False

    @property
    def drafts(self) -> int:
        """Draft tokens per step: those of a tree, or of a chain."""
        return int((self.knobs or {}).get("tree", DRAFTS)) if self.speculation != "none" else 0

    @property
    def has_share(self) -> bool:
        """Whether a share of the experts is in fast memory."""
        return self.offload is not None or (self.knobs is not None and "slots" not in self.knobs)


STOCK = "stock"
_NONE: dict[str, str] = {}
_DEVICE, _HOST = {"decisions": "device"}, {"decisions": "host"}
_AHEAD = {"prefetch": "gate"}
_UTILITY = {"policy": "utility", "prefetch": "utility"}
_CPU = {"cpu_experts": "auto"}
_B16 = {"budget": "16"}

CASES: tuple[Case, ...] = (
    Case("tokens", STOCK, None),
    Case("tokens", "default", _NONE),
    Case("tokens", "host", _HOST),
    Case("tokens", "table", _HOST | {"kernel": "table"}),
    Case("tokens", "device, nothing staged", {"decisions": "device@staging=off"}),
    Case("tokens", "device cpu", _DEVICE | _CPU),
    Case("tokens", "device ahead", _DEVICE | _AHEAD),
    Case("tokens", "default, ngram", _NONE, "ngram"),
    Case("tokens", "default, eagle3", _NONE, "eagle3"),
    Case("tokens", "default, eagle3, no guard", {"guard": "off"}, "eagle3"),
    Case("tokens", "device tree of 16", _DEVICE | {"tree": "16", "guard": "off"}, "eagle3"),
    Case("tokens", "device B=16", _DEVICE | {"budget": "16@when=decode"}, exact=False),
    Case("tokens", "device B=16, eagle3", _DEVICE | _B16 | {"guard": "off"}, "eagle3", exact=False),
    Case("tokens", "host utility", _HOST | _UTILITY),
    Case("tokens", "host cpu", _HOST | _CPU),
    Case("tokens", "host ahead", _HOST | _AHEAD),
    Case("tokens", "disk", _HOST | {"store": "disk", "host_memory": "1GiB"}),
    Case("tokens", "two workers", {"executor": "processes@workers=2"}),
    Case("serving", STOCK, None),
    Case("serving", "stock uva", None, offload="uva", each_share=True),
    Case("serving", "ptr", _NONE, each_share=True),
    Case("serving", "stock prefetch", None, offload="prefetch", each_share=True),
    Case("serving", "slots", _HOST | {"kernel": "vllm"}),
    Case("serving", "ptr cpu", _DEVICE | _CPU),
    Case("serving", "ptr, eagle3", _NONE, "eagle3"),
    Case("serving", "ptr no guard, eagle3", {"guard": "off"}, "eagle3"),
    Case("serving", "ptr, ngram", _NONE, "ngram"),
    Case("serving", "ptr resident", _DEVICE | {"slots": "100%"}),
    Case("serving", "table", _HOST | {"kernel": "table"}),
)
