"""Records the routing of a model, and evaluates afterwards what budgets would have done with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vllm_spac.methods.moe_spec.calibration import Calibration
from vllm_spac.methods.moe_spec.control import BudgetControl, BudgetedLayer
from vllm_spac.methods.moe_spec.settings import BudgetSettings
from vllm_spac.tools.evaluation.collection import run_layer
from vllm_spac.tools.evaluation.reconstruction import Reconstruction, combined, recent, whole_step

if TYPE_CHECKING:
    from vllm_spac.integration.loading.model_experts import ModelExperts


@dataclass(frozen=True, eq=False)
class StudiedText:
    """Routing of one text in one layer.

    Attributes:
        logits: [rows, N].
        weights, ids: [rows, k].
        hidden: first row of a window -> its hidden states [M, d].
    """

    logits: Tensor
    weights: Tensor
    ids: Tensor
    hidden: dict[int, Tensor]


class Study:
    """A ``runtime.Listener`` for texts that are each processed in one forward.

    Args:
        every: hidden states are kept for every ``every``-th window.
    """

    def __init__(
        self, experts: ModelExperts, modules: Sequence[Any], calibration: Calibration | None, window: int, every: int
    ) -> None:
        assert experts.serving is not None, "the model is loaded"
        self._control, self._modules = experts.serving.budget, modules
        self._vllm_config = experts.vllm_config
        self._window, self._every = window, every
        self._texts: list[list[StudiedText]] = [[] for _ in modules]
        self._seen = 0  # windows of earlier texts
        self._reconstruction = Reconstruction(self._control.layers, calibration)

    def route(self, layer: int, hidden: Tensor, logits: Tensor, weights: Tensor, ids: Tensor) -> None:
        whole = len(hidden) // self._window
        starts = [w * self._window for w in range(whole) if (self._seen + w) % self._every == 0]
        kept = {start: hidden[start : start + self._window].clone() for start in starts}
        self._texts[layer].append(StudiedText(logits.clone(), weights.clone(), ids.clone(), kept))

    def end_text(self) -> None:
        """Ends a text."""
        self._seen += len(self._texts[0][-1].logits) // self._window

    def routing(self, sizes: list[int], budgets: list[int], coverage: str) -> list[dict]:
        """Distinct experts per layer, and the mass of the best experts, for steps of each size.

        Args:
            budgets: for ``distinct``, under the default ranking.

        Returns:
            For each size up to the length of the longest text: ``size``; ``natural``, distinct experts without a
            budget; ``distinct``, those under each budget; ``curve``, share of the router mass in the best B = 1 .. N
            experts. Means over windows and layers.
        """
        found = []
        for size in sizes:
            if not any(len(text.logits) >= size for text in self._texts[0]):
                continue
            natural = self._distinct(size, max(layer.experts for layer in self._control.layers), "truncation")
            cut = [self._distinct(size, budget, coverage) for budget in budgets]
            found.append({"size": size, "natural": natural, "distinct": cut, "curve": self._curve(size)})
        return found

    @torch.inference_mode()
    def reconstruction(self, layer: int, budgets: list[int], rankings: list[str], coverages: list[str]) -> dict:
        """Relative errors of a layer's output under budgets.

        Returns:
            ``points``: (ranking, coverage, budget) of each column of ``errors`` [windows][points]. ``gap``: the largest
            relative difference between the kernel's output and the sum of its experts' outputs; only rounding, if all
            is well.
        """
        known = self._control.layers[layer]
        points = [(r, c, b) for r in rankings for c in coverages for b in budgets if fits(known, c, b)]
        errors, gap = [], 0.0
        for text in self._texts[layer]:
            for start, hidden in text.hidden.items():
                rows = slice(start, start + self._window)
                outputs = self._outputs(layer, hidden, known.experts)
                routed = text.logits[rows], text.weights[rows], text.ids[rows]
                resident = recent(text.ids[:start], known.experts // 2, known.experts).to(hidden.device)
                errors.append(self._reconstruction.errors(layer, points, outputs, *routed, resident))
                gap = max(gap, self._gap(layer, hidden, outputs, *routed[1:]))
        return {"points": points, "errors": errors, "gap": gap}

    def _outputs(self, layer: int, hidden: Tensor, experts: int) -> Tensor:
        """[rows, N, d]: output of every expert for every row, by the layer's own kernel."""
        rows, width = hidden.shape
        ids = torch.arange(experts, device=hidden.device).repeat(rows)[:, None]
        dtype, ones = self._texts[layer][0].ids.dtype, torch.ones(len(ids), 1, device=hidden.device)
        given = self._run(layer, hidden.repeat_interleave(experts, 0), ones, ids.to(dtype))
        return given.view(rows, experts, width)

    def _gap(self, layer: int, hidden: Tensor, outputs: Tensor, weights: Tensor, ids: Tensor) -> float:
        """Relative difference of the kernel's output and the combined ``outputs``; neither includes shared experts."""
        kernel, ours = self._run(layer, hidden, weights, ids).double(), combined(outputs, weights, ids)
        return float((kernel - ours).norm() / kernel.norm().clamp_min(1e-30))

    def _run(self, layer: int, hidden: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return run_layer(self._vllm_config, self._modules[layer], hidden, weights, ids)

    def _distinct(self, size: int, budget: int, coverage: str) -> float:
        control = BudgetControl([replace(layer, resident=None) for layer in self._control.layers])
        control.change(BudgetSettings.parse({"budget": budget, "coverage": coverage, "when": "all", "window": size}))
        for layer, texts in enumerate(self._texts):
            for text in texts:
                if rows := len(text.logits) // size * size:
                    control.apply(layer, text.logits[:rows], text.weights[:rows], text.ids[:rows], whole_step(rows))
        counted = control.counters.snapshot()
        return counted["experts"] / counted["shortlists"]

    def _curve(self, size: int) -> list[float]:
        """MoE-Spec's figure 2c: windows of ``size`` rows, the experts with the greatest sum of scores first."""
        shares = []
        for layer, texts in zip(self._control.layers, self._texts, strict=True):
            for text in (each for each in texts if len(each.logits) >= size):
                windows = layer.rule.probs(text.logits).double().unfold(0, size, size).sum(2)
                held = windows.sort(dim=1, descending=True).values.cumsum(1)
                shares.append(held / held[:, -1:])
        return torch.cat(shares).mean(0).tolist()


def fits(layer: BudgetedLayer, coverage: str, budget: int) -> bool:
    """Whether the layer can run with this budget: substitution needs ``top_k`` experts and a known routing rule."""
    return coverage == "truncation" or (budget >= layer.top_k and not layer.rule.custom)
