"""Which worker serves which layer, and when a worker without a cache loads in time. Pure.

OD-MoE: On-Demand Expert Loading for Cacheless Edge-Distributed MoE Inference (Wang et al., 2025), section 3.

Workers form groups, and layer l belongs to group l mod n. Here a group is one worker: it has all experts of its layers
and computes whole rows, so that results keep the bits of vLLM's kernel.
"""

from __future__ import annotations

from dataclasses import dataclass


def owners(layer: int, workers: int, replicas: int) -> tuple[int, ...]:
    """Returns the workers that serve ``layer``, the first of them by default, the next ones if it is lost.

    Args:
        layer: number of the layer.
        workers: number of workers, n: one per group.
        replicas: further workers that have the layer, at most ``workers - 1``.
    """
    assert 0 <= replicas < workers
    return tuple((layer + ahead) % workers for ahead in range(1 + replicas))


def layers_of(worker: int, layers: int, workers: int, replicas: int) -> tuple[int, ...]:
    """Returns the layers, of 0 to ``layers - 1``, that ``worker`` has: those it serves first, and replicas."""
    return tuple(layer for layer in range(layers) if worker in owners(layer, workers, replicas))


@dataclass(frozen=True, slots=True)
class Cycle:
    """Times of one layer at a group of workers, in seconds.

    Attributes:
        main: the main process's part of a layer (t_M).
        worker: from sending the rows to having the answer (t_W).
        load: loading the experts of a layer (t_load).
    """

    main: float
    worker: float
    load: float

    def slack(self, groups: int) -> float:
        """Time between a group's answer and its next layer, n t_M + (n - 1) t_W: a load in it stalls nobody.

        OD-MoE's condition, with n the number of groups.
        """
        return groups * self.main + (groups - 1) * self.worker

    def stall(self, groups: int) -> float:
        """Time by which a load exceeds ``slack``; 0 if ``load <= slack``."""
        return max(0.0, self.load - self.slack(groups))

    def layer(self, groups: int) -> float:
        """Time per layer in the steady state: a group is busy for ``load + worker`` once in ``groups`` layers."""
        return max(self.main + self.worker, (self.load + self.worker) / groups)
