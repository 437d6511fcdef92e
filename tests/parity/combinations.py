"""Every combination of platform, knobs, drafts and ranks, and whether an engine accepts it.

What decides is ``SpacConfig`` and ``integration.compatibility``, as when an engine starts. Models and other options of
vLLM's are not among the combinations.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, Literal, get_args

from vllm_spac import components
from vllm_spac.config.config import SpacConfig
from vllm_spac.config.types import AUTO
from vllm_spac.errors import SpacError
from vllm_spac.integration import compatibility

Platform = Literal["cpu", "gpu"]
Speculation = Literal["none", "chain", "tree", "copy"]
Plane = Literal["host", "device", "workers"]
FILE = "FILE"  # stands for a file of the user's

_PLATFORMS: tuple[Platform, ...] = get_args(Platform)
_SPECULATIONS: tuple[Speculation, ...] = get_args(Speculation)
_PLANES: dict[Plane, dict[str, Any]] = {
    "host": {"plane": "slots"},
    "device": {"plane": "pointers"},
    "workers": {"executor": "processes@workers=2"},
}
_METHODS: dict[Speculation, str] = {"chain": "eagle3", "tree": "eagle3", "copy": "draft_model"}
_KNOBS = ("budget", "prefetch", "cpu_experts", "speculate")


@dataclass(frozen=True)
class RankCount:
    """How many processes hold the model, and whether they divide its experts."""

    count: int = 1
    divide_experts: bool = False


_RANKS = (RankCount(), RankCount(2), RankCount(2, divide_experts=True))


@dataclass(frozen=True)
class Cell:
    """One combination.

    Attributes:
        settings: knobs beside the slots and those of the plane, as pairs.
        speculation: drafts of an EAGLE-3 head in chains, in a tree, or of a copy of the model (``copy``).
        refusal: None if it is accepted.
        reason: the text of the refusal; empty if it is accepted.
    """

    platform: Platform
    plane: Plane
    settings: tuple[tuple[str, Any], ...]
    speculation: Speculation
    ranks: RankCount

    @property
    def knobs(self) -> dict[str, Any]:
        """The value of ``additional_config["spac"]``."""
        given = dict(self.settings)
        found: dict[str, Any] = {"slots": "25%", **_PLANES[self.plane], **given}
        if self.speculation == "tree":
            found["tree"] = 16
        if _needs_file(given.get("prefetch", "off")):
            found["prefetch"] += f"@file={FILE}"
        if given.get("cpu_experts", "off") != "off" and self.plane != "workers":
            found["store"] = "host"
        return found

    @property
    def exact(self) -> bool:
        """Whether tokens are stock's: nothing lossy is on."""
        return not dict(self.settings).keys() & {"budget", "speculate"}

    @property
    def refusal(self) -> SpacError | None:
        return _refusal(self)

    @property
    def reason(self) -> str:
        return str(self.refusal or "").removeprefix("spac: ")


def _needs_file(prefetch: str) -> bool:
    return prefetch != "off" and components.find("predictors", prefetch).needs_file


@cache
def _refusal(cell: Cell) -> SpacError | None:
    try:
        config = SpacConfig.parse(cell.knobs)
        compatibility.check(config, _engine(cell), gpu=cell.platform == "gpu")
    except SpacError as error:
        return error
    return None


def _engine(cell: Cell) -> Any:
    """What ``compatibility`` reads of vLLM's configuration, as vLLM makes it of such options."""
    gpu, ranks = cell.platform == "gpu", cell.ranks
    one = ("get_total_num_hidden_layers", "get_num_experts", "get_num_experts_per_tok", "get_hidden_size")
    sizes = dict.fromkeys(one, lambda: 1)
    model, draft = (SimpleNamespace(model=name, revision=None, **sizes) for name in ("MODEL", "COPY"))
    method = _METHODS.get(cell.speculation)
    speculation = SimpleNamespace(
        method=method,
        parallel_drafting=False,
        use_local_argmax_reduction=False,
        use_heterogeneous_vocab=False,
        draft_model_config=draft,
    )
    return SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1,
            tensor_parallel_size=ranks.count,
            enable_expert_parallel=ranks.divide_experts,
            distributed_executor_backend="mp" if ranks.count > 1 or not gpu else "uni",
        ),
        scheduler_config=SimpleNamespace(async_scheduling=gpu),
        speculative_config=None if method is None else speculation,
        use_v2_model_runner=gpu,
    )


def cells() -> Iterator[Cell]:
    """All combinations: 1,152 for each kind of drafts."""
    predictors = (None, *components.serving("predictors"))
    for speculation, platform, plane, ranks in itertools.product(_SPECULATIONS, _PLATFORMS, _PLANES, _RANKS):
        for given in itertools.product((None, 16), predictors, (None, AUTO), (None, "predicted")):
            named = zip(_KNOBS, given, strict=True)
            settings = tuple((knob, value) for knob, value in named if value is not None)
            yield Cell(platform, plane, settings, speculation, ranks)
