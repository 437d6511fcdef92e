"""Several GPUs, each a pipeline stage: which layers it has, and how many slots its memory has room for. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from vllm_spac.errors import ConfigError
from vllm_spac.system.host_memory import gib


@dataclass(frozen=True)
class StagedModel:
    """What stages divide, in bytes."""

    layers: tuple[int, ...]  # bytes of the experts of each layer of the model, 0: it has none
    experts: int  # of a layer that has any
    each: int  # bytes of the weights of a layer that are no experts
    end: int  # bytes that the first stage has besides, and the last one: the input's embedding, and the output's


@dataclass(frozen=True)
class Stage:
    """One GPU with its layers. All but ``start`` and ``stop``, layers of the model, and the counts are bytes."""

    memory: int  # of the GPU
    start: int
    stop: int
    fast: int  # that vLLM may use
    weights: int  # everything but experts
    kv: int
    working: int
    experts: int  # number of experts
    experts_bytes: int

    @property
    def room(self) -> int:
        """Bytes for slots that are of use: no more than all of its experts; negative if the others do not fit."""
        return min(self.experts_bytes, self.fast - self.weights - self.kv - self.working)

    @property
    def share(self) -> float:
        """Part of its experts that has a slot; below 0 where nothing fits, or without a layer that has experts."""
        return self.room / self.experts_bytes if self.experts_bytes else -1.0

    @property
    def slots(self) -> int:
        return int(self.share * self.experts)


def even(layers: int, stages: int) -> tuple[int, ...]:
    """Returns the layers of each stage as vLLM divides them: the last stages but one have those that remain."""
    found, remaining = [layers // stages] * stages, layers % stages
    for number in range(2, remaining + 2):
        found[-number] += 1
    return tuple(found)


def stages(
    model: StagedModel, cards: Sequence[tuple[int, int]], kv: int, working: int, counts: Sequence[int] | None = None
) -> tuple[Stage, ...]:
    """Returns the stages of ``cards``, (bytes of memory, bytes that vLLM may use) of each, in this order.

    Args:
        kv: bytes of KV cache of all layers, of which each has as much.
        working: bytes of run-time buffers, which each stage has.
        counts: layers of each; None: those by which the least part of a stage's experts that has slots is greatest, or
            vLLM's own where that is within one percent of it.

    Raises:
        ConfigError: there are more stages than layers with experts.
    """
    total, last = len(model.layers), len(cards) - 1
    if sum(map(bool, model.layers)) <= last:
        raise ConfigError(
            f"--gpus has {len(cards)} GPUs, and {sum(map(bool, model.layers))} layers have experts; name fewer"
        )

    @cache
    def stage(number: int, start: int, stop: int) -> Stage:
        own, (memory, fast) = model.layers[start:stop], cards[number]
        weights = model.each * (stop - start) + model.end * ((number == 0) + (number == last))
        part = -(-kv * (stop - start) // total)
        count = model.experts * sum(map(bool, own))
        return Stage(memory, start, stop, fast, weights, part, working, count, sum(own))

    def of(counts: Sequence[int]) -> tuple[Stage, ...]:
        ends = [sum(counts[: number + 1]) for number in range(len(counts))]
        return tuple(stage(number, end - counts[number], end) for number, end in enumerate(ends))

    if counts is not None:
        return of(counts)
    usual, best = of(even(total, last + 1)), of(_divided(total, last + 1, lambda *at: stage(*at).share))
    return usual if _least(usual) >= _least(best) - 0.01 else best


def _least(stages: Sequence[Stage]) -> float:
    return min(stage.share for stage in stages)


def _divided(layers: int, stages: int, share: Callable[[int, int, int], float]) -> tuple[int, ...]:
    """Returns the layers of each stage with the greatest least ``share`` of (stage, first layer, end)."""
    best: dict[int, tuple[float, tuple[int, ...]]] = {}
    for stop in range(1, layers - stages + 2):
        best[stop] = share(0, 0, stop), (stop,)
    for number in range(1, stages):
        ends = range(number + 1, layers - stages + number + 2)
        best = {
            stop: max(
                (min(least, share(number, at, stop)), (*counts, stop - at))
                for at, (least, counts) in best.items()
                if at < stop
            )
            for stop in ends
        }
    return best[layers][1]


def describe(number: int, stage: Stage) -> tuple[str, str, str]:
    """Returns (what, how much of it, of which memory) of a stage's slots."""
    what = (
        f"stage {number}: slots of {stage.slots:,} of {stage.experts:,} experts, layers {stage.start}-{stage.stop - 1}"
    )
    return what, gib(stage.slots * stage.experts_bytes // stage.experts), f"of {gib(stage.memory)} of its GPU"
