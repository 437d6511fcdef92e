"""Counters of a worker, read by the statistics endpoints, tests and benchmarks, and how they are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from vllm_spac.system.host_memory import gib

_ORDER = (
    "mode",
    "execution",
    "store",
    "policy",
    "layers",
    "experts",
    "slots",
    "resident",
    "slot_bytes",
    "expert_bytes",
)


@dataclass
class Counters:
    """Counts since the start of the worker or the last ``reset``.

    Attributes:
        loads: experts moved into a slot on demand: misses whose load was not in flight, including reloads of experts
            evicted between two waves of the same forward. Reads that fill the slots at the start do not count.
        read_retries: reads of an expert that failed (or gave what was not packed) and were tried again, since the store
            was opened.
        bytes: bytes moved, by the store they came from. Prefetched bytes are counted under ``<store> ahead``, bytes
            that kernels read directly from the store's memory under ``<store> streamed``.
        waves: parts in which layers ran; one per layer and forward unless more experts are needed than there are slots.
        steps: forwards of the target model by kind: prefill, decode, verify, mixed.
        prefetches: experts moved into a slot ahead of need: predicted, because the CPU has just computed them, or
            because forwards with many rows use most experts of the next layer.
        prefetch_harmful: experts that had to be loaded, or computed on the CPU, because a prefetch, unused until then,
            had evicted them.
        cpu_experts: distinct experts per layer and forward that were computed on the CPU, from the store's memory.
        cpu_late: experts that the CPU was to compute while the device waited no longer: it computed them in place, and
            they count as misses.
    """

    hits: int = 0  # distinct experts per layer and forward that were in fast memory when they were needed
    misses: int = 0  # distinct experts per layer and forward that were needed and were not, or whose load was in flight
    loads: int = 0
    host_loads: int = 0  # loads that host memory beside the store served (``--spac-host-memory``)
    read_retries: int = 0
    bytes: dict[str, int] = field(default_factory=dict)
    stall_seconds: float = 0.0  # time that layers waited for experts, read on demand or prefetched
    waves: int = 0
    steps: dict[str, int] = field(default_factory=dict)
    prefetches: int = 0
    prefetch_hits: int = 0  # prefetches that were used before they were evicted
    prefetch_late: int = 0  # prefetch hits that a layer had to wait for; they count as misses
    prefetch_wasted: int = 0  # prefetches that were evicted unused
    prefetch_harmful: int = 0
    prefetch_failed: int = 0  # prefetch reads that failed; the expert is read again when it is needed
    cpu_experts: int = 0
    cpu_rows: int = 0  # (row, expert) pairs computed on the CPU
    cpu_late: int = 0
    cpu_stops: int = 0  # times that ``cpu_experts=auto`` stopped the CPU because steps with it were not shorter
    cpu_wait_seconds: float = 0.0  # time that layers waited for the CPU after their part in fast memory was done

    def count_bytes(self, path: str, count: int) -> None:
        """Adds ``count`` bytes read from ``path``."""
        self.bytes[path] = self.bytes.get(path, 0) + count

    def count_step(self, kind: str) -> None:
        """Counts a step of a ``kind``."""
        self.steps[kind] = self.steps.get(kind, 0) + 1

    def reset(self) -> None:
        """Sets all counters to zero, e.g. after warm-up."""
        vars(self).update(vars(type(self)()))

    def snapshot(self) -> dict:
        """A copy as plain data."""
        return asdict(self)


# Of several ranks: bytes add up; steps and seconds are those of all ranks at once; experts are the same ones if each
# rank holds a part of every expert, and different ones if each holds some of them. Over stages, layers add up.
_BYTES = {"bytes", "slot_bytes", "host_bytes"}
_AT_ONCE = {"layers", "waves", "steps", "stall_seconds", "cpu_wait_seconds", "cpu_stops"}
_OF_LAYERS = {"layers", "waves", "stall_seconds", "cpu_wait_seconds"}
_EXPERTS = {
    *("experts", "slots", "resident", "pinned", "host_experts", "hits", "misses", "loads", "host_loads"),
    "read_retries",
    *("prefetches", "prefetch_hits", "prefetch_late", "prefetch_wasted", "prefetch_harmful", "prefetch_failed"),
    *("cpu_experts", "cpu_rows", "cpu_late"),
}


def adds_up(name: str, divided: str) -> bool:
    """Whether the engine's ``name`` is the sum over its ranks; else they all count the same thing.

    Args:
        divided: what ranks divide, ``tensors``, ``experts`` or ``layers``, as their statistics say; or layers and then
            one of the others.
    """
    return all(_adds_up(name, each) for each in divided.split(" and "))


def _adds_up(name: str, divided: str) -> bool:
    if name == "expert_bytes":  # of a whole expert
        return divided == "tensors"
    of_some = name in _EXPERTS and divided != "tensors"
    return name in _BYTES or of_some or (name in _OF_LAYERS and divided == "layers")


POLL, _WAIT = 0.02, 1.0  # seconds between two looks, and for which expert workers may be behind


def settled(workers: Sequence[dict[str, Any]], seconds: float) -> bool:
    """Whether statistics are as new as they will be: who reads them asks again after ``POLL`` while they are not.

    An engine does not wait for what its expert workers count, since its requests would wait with it.

    Args:
        seconds: since they were asked for first; what is as new is not behind, and nor is anything after a second.
    """
    each = (of_it for worker in workers for of_it in worker.get("expert_workers", {}).values())
    return seconds > _WAIT or all(not of_it["present"] or of_it["counts_age_seconds"] <= seconds for of_it in each)


def total(workers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the statistics of an engine from those of its ranks; the same for an engine with one.

    What all ranks count is the greatest of their values: the slowest rank's seconds. Facts that are not numbers are
    those of the first rank.
    """
    if len(workers) < 2:
        return dict(*workers)
    divided, inner = workers[0].get("divided", "experts"), [worker for worker in workers if "stage" in worker]
    if " and " in divided:
        divided, each = divided.split(" and ")
        stages = dict.fromkeys(worker["stage"] for worker in inner)
        workers = [total([w | {"divided": each} for w in inner if w["stage"] == stage]) for stage in stages]
    names = [name for name in workers[0] if name not in ("rank", "stage", "divided")]
    return {name: _merged([worker[name] for worker in workers if name in worker], name, divided) for name in names}


def _merged(values: Sequence[Any], name: str, divided: str) -> Any:
    add = adds_up(name, divided)
    if not add and name not in _AT_ONCE | _EXPERTS | {"expert_bytes"}:
        return values[0]
    if isinstance(values[0], dict):
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: (sum if add else max)(value.get(key, 0) for value in values) for key in keys}
    return sum(values) if add else max(values)


def described(worker: Mapping[str, Any]) -> dict[str, str]:
    """Returns name -> formatted value of a worker's statistics, in the order in which they are shown.

    Counters unknown to this version keep their names.

    Raises:
        TypeError, ValueError, KeyError, OverflowError: these are no statistics of a worker.
    """
    rest = {name: value for name, value in worker.items() if name not in _ORDER}
    shown = {name: _text(name, worker[name]) for name in _ORDER if name in worker}
    asked = worker.get("hits", 0) + worker.get("misses", 0)
    shown["hit rate"] = f"{100 * worker['hits'] / asked:.1f}%" if asked else "-"
    for name, value in rest.items():
        if name == "expert_workers":
            each = (
                (called, key, number) for called, found in dict(value).items() for key, number in dict(found).items()
            )
            shown |= {f"{called}: {key}": _text(key, number) for called, key, number in each}
        elif isinstance(value, dict):
            shown |= {f"{name}: {key}": _text(name, number) for key, number in sorted(value.items())}
        else:
            shown[name] = _text(name, value)
    return shown


def _text(name: str, value: Any) -> str:
    if name == "bytes" or name.endswith("_bytes"):
        return gib(value)
    if name.endswith("_seconds"):
        return f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


_PLACES = {"host": "host memory", "disk": "disk"}


def summary(worker: Mapping[str, Any], tokens: float | None = None, waited: float | None = None) -> dict[str, str]:
    """Returns what matters of a worker's statistics, in words, without what has not happened.

    Args:
        tokens: that the server has generated; None: not known.
        waited: share of the last seconds that layers waited for experts; None: not known.

    Raises:
        TypeError, ValueError, KeyError, OverflowError: these are no statistics of a worker.
    """
    described(worker)  # or it raises
    get, found = worker.get, dict[str, str]()
    asked, steps = get("hits", 0) + get("misses", 0), sum(get("steps", {}).values())
    if "mode" in worker:
        found["mode"] = str(worker["mode"])
    if get("slots"):
        of_all = f" of {worker['experts']:,}" if get("experts") else ""
        memory = f", {gib(worker['slot_bytes'])}" if get("slot_bytes") else ""
        found["experts in fast memory"] = f"{get('resident', worker['slots']):,}{of_all}{memory}"
    if get("store") in _PLACES:
        host = f", {worker['host_experts']:,} of them in host memory" if get("host_experts") else ""
        found["the others"] = f"{_PLACES[worker['store']]}{host}"
    if asked:
        found["hit rate"] = f"{100 * get('hits', 0) / asked:.1f}%"
    moved = sum(get("bytes", {}).values())
    if moved:
        found["experts loaded"] = f"{gib(moved / tokens)} per generated token" if tokens else gib(moved)
    if get("stall_seconds") and steps:
        share = "" if waited is None else f", now {waited:.0%} of the time"
        found["waiting for experts"] = f"{1000 * worker['stall_seconds'] / steps:,.1f} ms per step{share}"
    if get("cpu_experts"):
        found["computed on the CPU"] = f"{worker['cpu_experts'] / asked:.1%} of experts" if asked else "some experts"
    if get("prefetches"):
        used = get("prefetch_hits", 0) / worker["prefetches"]
        found["read ahead"] = f"{worker['prefetches']:,} experts, {used:.0%} used"
    if get("read_retries") or get("prefetch_failed"):
        found["reads that failed"] = f"{get('read_retries', 0) + get('prefetch_failed', 0):,}"
    if get("stopped"):
        found["recordings that stopped"] = ", ".join(worker["stopped"])
    return found
