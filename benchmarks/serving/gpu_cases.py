"""The engines that ``on_gpu.py`` runs, by part: those whose tokens are compared, and those that are timed."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.serving.cases import STOCK, Case

DRAFTS = 4  # per step of a chain
_NONE: dict[str, str] = {}
_DEVICE, _HOST = {"plane": "pointers"}, {"plane": "slots"}
_AHEAD = {"prefetch": "gate"}
_UTILITY = {"policy": "utility", "prefetch": "utility"}
_CPU = {"cpu_experts": "auto"}
_B16 = {"budget": "16"}

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
}
