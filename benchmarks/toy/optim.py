"""Muon for the matrices, AdamW for the rest; one learning-rate schedule over the run's progress."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def orthogonalize(matrix: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz iteration towards the nearest orthogonal matrix; batched over leading dimensions."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised (K. Jordan, 2024); a stack of experts is a batch of matrices."""

    def __init__(self, params, lr: float = 0.02, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure is ever given
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalize(p.grad.lerp(buffer, group["momentum"]))
                scale = max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5
                p.add_(update, alpha=-group["lr"] * scale)


def optimizers(
    model: nn.Module, matrix_lr: float = 0.02, lr: float = 3e-3, router_lr: float | None = None
) -> list[torch.optim.Optimizer]:
    """Muon for hidden matrices and experts; AdamW for embeddings, head, norms and routers (``router_lr`` or ``lr``)."""
    matrices: list[nn.Parameter] = []
    routers: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, p in model.named_parameters():
        if "mlp.gate.weight" in name:
            routers.append(p)
        elif p.ndim < 2 or any(part in name for part in ("embed_tokens", "lm_head")):
            rest.append(p)
        else:
            matrices.append(p)
    adam: list[dict[str, Any]] = [{"params": rest}, *([{"params": routers, "lr": router_lr or lr}] if routers else [])]
    groups = [Muon(matrices, lr=matrix_lr), torch.optim.AdamW(adam, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)]
    for optimizer in groups:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return groups


def schedule(optimizers: list[torch.optim.Optimizer], progress: float) -> float:
    """Sets every learning rate for ``progress`` in [0, 1]: short warm-up, flat, linear decay to zero."""
    factor = min(1.0, progress / 0.02, max(0.0, (1 - progress) / 0.6))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
    return factor
