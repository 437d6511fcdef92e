"""Every combination of platform, knobs, drafts and ranks, and whether an engine accepts it.

``COMPATIBILITY.md`` and ``vllm-spac compatibility`` are made of it. What decides is ``SpacConfig`` and
``integration.compatibility``, as when an engine starts; models and vLLM's other options are not among the combinations.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
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
    "host": {"decisions": "host"},
    "device": {"decisions": "device"},
    "workers": {"executor": "processes", "workers": 2},
}
_METHODS: dict[Speculation, str] = {"chain": "eagle3", "tree": "eagle3", "copy": "draft_model"}
_TREE = {"tree": 16}
_BUDGET = {"budget": 16}
_SPECULATE = {"speculate": "predicted"}


@dataclass(frozen=True)
class RankCount:
    """How many processes hold the model, and whether they divide its experts."""

    count: int = 1
    divide_experts: bool = False

    def __str__(self) -> str:
        if self.count == 1:
            return "one rank"
        return f"{self.count} ranks" + (", divided experts" if self.divide_experts else "")


_ALONE, _DIVIDED = RankCount(), RankCount(2, divide_experts=True)
_RANKS = (_ALONE, RankCount(2), _DIVIDED)


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
            found |= _TREE
        if _needs_file(given.get("prefetch", "off")):
            found["predictor_file"] = FILE
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

    def as_json(self) -> dict[str, Any]:
        return {
            "platform": self.platform,
            "knobs": self.knobs,
            "speculation": self.speculation,
            "ranks": self.ranks.count,
            "expert_parallel": self.ranks.divide_experts,
            "exact": self.exact,
            "accepted": self.refusal is None,
            "reason": self.reason,
        }


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


def _problem(cell: Cell) -> str:
    """Why it is refused, for whichever predictor, and without what helps."""
    text = "" if cell.refusal is None else cell.refusal.problem.removeprefix("spac: ")
    return re.sub(r"^prefetch=[a-z_]+ ", "prefetch ", text)


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
            tensor_parallel_size=ranks.count,
            enable_expert_parallel=ranks.divide_experts,
            distributed_executor_backend="mp" if ranks.count > 1 or not gpu else "uni",
        ),
        scheduler_config=SimpleNamespace(async_scheduling=gpu),
        speculative_config=None if method is None else speculation,
        use_v2_model_runner=gpu,
    )


def prefetches() -> list[str]:
    """Values of ``prefetch``: each predictor that can serve."""
    return components.serving("predictors")


def cells() -> Iterator[Cell]:
    """All combinations: 624 for each kind of drafts."""
    ahead = [(), *((("prefetch", name),) for name in prefetches())]
    for speculation, platform, plane in itertools.product(_SPECULATIONS, _PLATFORMS, _PLANES):
        for budget, prefetch, cpu, ranks in itertools.product(
            ((), tuple(_BUDGET.items())), ahead, ((), (("cpu_experts", AUTO),)), _RANKS
        ):
            yield Cell(platform, plane, budget + prefetch + cpu, speculation, ranks)
        for prefetch in ahead:
            yield Cell(platform, plane, prefetch + tuple(_SPECULATE.items()), speculation, _ALONE)


@dataclass(frozen=True)
class Pairs:
    """One place to serve, and every setting there beside every other.

    Attributes:
        rows: name of a setting -> for each column the reason of a refusal, empty if accepted.
    """

    title: str
    columns: tuple[str, ...]
    rows: Mapping[str, tuple[str, ...]]


def pairs() -> Iterator[Pairs]:
    """Yields each platform and plane. What is accepted in pairs is accepted together: a test tries all cells."""
    single: dict[str, tuple[tuple[str, Any], ...]] = {
        **{f"prefetch={name}": (("prefetch", name),) for name in prefetches()},
        "cpu_experts=auto": (("cpu_experts", AUTO),),
        "budget=16": tuple(_BUDGET.items()),
        "speculate=predicted": (("prefetch", "gate"), *_SPECULATE.items()),
    }
    beside = {name: single[name] for name in ("cpu_experts=auto", "budget=16")}
    for platform, plane in itertools.product(_PLATFORMS, _PLANES):
        rows = {"nothing else": _row(platform, plane, (), beside)}
        rows |= {name: _row(platform, plane, settings, beside) for name, settings in single.items()}
        columns = (*_SPECULATIONS, *beside, *map(str, _RANKS[1:]))
        where = ", ".join(f"{knob}={value}" for knob, value in _PLANES[plane].items())
        yield Pairs(f"{platform.upper()}, {where}", columns, rows)


def _row(
    platform: Platform, plane: Plane, settings: tuple[tuple[str, Any], ...], beside: Mapping[str, Any]
) -> tuple[str, ...]:
    found = [_problem(Cell(platform, plane, settings, speculation, _ALONE)) for speculation in _SPECULATIONS]
    for other in beside.values():
        both = settings if set(other) <= set(settings) else other + settings
        found.append(_best(Cell(platform, plane, both, speculation, _ALONE) for speculation in _SPECULATIONS))
    for ranks in _RANKS[1:]:
        found.append(_best(Cell(platform, plane, settings, speculation, ranks) for speculation in _SPECULATIONS))
    return tuple(found)


def _best(found: Iterable[Cell]) -> str:
    """The reason of a combination that goes with some drafts, or none: of the first, if of all."""
    reasons = [_problem(cell) for cell in found]
    return "" if "" in reasons else reasons[0]


HEAD = """# What goes with what

Written by `vllm-spac compatibility --markdown`; a test keeps it true. Each table is a platform and who decides there.
A number is the reason of a refusal, below. The first columns are drafts: none, chains of an EAGLE-3 head, its trees, a
copy of the model. The others are what goes with a row under some kind of drafts. All that goes in pairs goes together.
`kernel` is left to choose: both kernels go with all that the host decides.
Refusals that depend on the model or on other options of vLLM's are not here; an engine names them when it starts.
"""


def page() -> str:
    """The text of ``COMPATIBILITY.md``."""
    reasons: dict[str, int] = {}
    parts = [HEAD, f"{counts()}\n"]
    for table in pairs():
        lines = [f"## {table.title}\n", f"| | {' | '.join(table.columns)} |", "|---" * (len(table.columns) + 1) + "|"]
        for name, row in table.rows.items():
            marks = [str(reasons.setdefault(reason, len(reasons) + 1)) if reason else "yes" for reason in row]
            lines.append(f"| `{name}` | {' | '.join(marks)} |" if "=" in name else f"| {name} | {' | '.join(marks)} |")
        parts.append("\n".join(lines) + "\n")
    parts.append("## Reasons\n\n" + "\n".join(f"{number}. {reason}." for reason, number in reasons.items()) + "\n")
    return "\n".join(parts)


def counts() -> str:
    """How many combinations are accepted, in a sentence."""
    found = list(cells())
    accepted = [cell for cell in found if cell.refusal is None]
    without = [cell for cell in found if cell.speculation != "copy"]
    of_gpu = sum(cell.platform == "gpu" for cell in accepted)
    ours = sum(cell.refusal is None for cell in without)
    return (
        f"{len(accepted):,} of {len(found):,} combinations are accepted, {of_gpu:,} of them on a GPU; "
        f"{ours:,} of {len(without):,} without copies as drafters."
    )
