"""Which worker serves which layer, and when a worker without a cache loads in time. Pure.

OD-MoE: On-Demand Expert Loading for Cacheless Edge-Distributed MoE Inference (Wang et al., 2025), section 3.

Workers form n groups of equal size, and layer l belongs to group l mod n. Each worker of a group has all experts of its
layers. A group of one worker computes whole rows, so that results keep the bits of vLLM's kernel; the workers of a
larger one divide the experts that a layer needs (``expert_divider``), so that each loads a part of them.
"""

from __future__ import annotations

from dataclasses import dataclass


def owners(layer: int, workers: int, replicas: int, size: int = 1) -> tuple[int, ...]:
    """Returns the workers that have ``layer``: its group, then the replicas that compute for those that are lost.

    Args:
        layer: number of the layer.
        workers: number of workers, a multiple of ``size``.
        replicas: further workers that have the layer, at most ``workers - size``.
        size: workers of a group.
    """
    assert size > 0 and workers % size == 0 and 0 <= replicas <= workers - size
    return tuple((size * layer + ahead) % workers for ahead in range(size + replicas))


def layers_of(worker: int, layers: int, workers: int, replicas: int, size: int = 1) -> tuple[int, ...]:
    """Returns the layers, of 0 to ``layers - 1``, that ``worker`` has: those of its group, and replicas."""
    return tuple(layer for layer in range(layers) if worker in owners(layer, workers, replicas, size))


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
