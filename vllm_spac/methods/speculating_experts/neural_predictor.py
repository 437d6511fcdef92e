"""Speculating Experts' estimator: a small network per layer from this layer's input and choice to the next router."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from vllm_spac.decisions.predictors._trained import Material, Sizes, Specs, Trained
from vllm_spac.decisions.predictors.base import PredictorInputs, Signal
from vllm_spac.methods.speculating_experts.quasi_hidden_predictor import LayerFeatures, mixing

INNER = 256  # units of the hidden layers
_STEPS, _RATE = 600, 2e-3
_BATCH = 512  # rows of a gradient step
_PARTS = ("in", "in_bias", "up", "up_bias", "down", "down_bias", "scale", "shift", "head", "skip", "bias")


class Neural(Trained):
    """Scores of layer l + 1 on layer l, after the paper's appendix A.

    With x = [h_l | m_l] (router input, routing weights): z = x @ in, z += silu(z @ up) @ down,
    scores = norm(z) @ head + x @ skip, norm a LayerNorm. Each layer has a network of its own, in place of the paper's
    layer embedding, and a linear part (skip) that starts as the ridge regression. Trained by the KL divergence to the
    router's distribution.
    """

    needs = frozenset({Signal.ROUTER_INPUT, Signal.ROUTING})

    def __init__(self, sizes: Sizes, tensors: Mapping[str, Tensor], beside: Mapping[str, Trained]) -> None:
        super().__init__(sizes, tensors, beside)
        self._features = LayerFeatures(sizes.width, sizes.experts)
        self._nets = {
            target: _merged({part: tensors[f"{part}.{target}"].float() for part in _PARTS})
            for target in range(1, sizes.layers)
        }
        self._first = torch.empty(0)  # [rows, INNER + N], written anew in each layer; and its two parts
        self._hidden, self._skipped = self._first, self._first

    @classmethod
    def specs(cls, sizes: Sizes) -> Specs:
        features, experts = sizes.width + sizes.experts, sizes.experts
        shapes: dict[str, tuple[int, ...]] = {"in": (features, INNER), "up": (INNER, INNER), "down": (INNER, INNER)}
        shapes |= {"head": (INNER, experts), "skip": (features, experts), "bias": (experts,)}
        shapes |= dict.fromkeys(("in_bias", "up_bias", "down_bias", "scale", "shift"), (INNER,))
        return {
            f"{part}.{target}": (torch.bfloat16 if len(shapes[part]) == 2 else torch.float32, shapes[part])
            for target in range(1, sizes.layers)
            for part in _PARTS
        }

    @classmethod
    def stages(cls, sizes: Sizes) -> int:
        return sizes.layers - 1

    @classmethod
    def train(cls, stage: int, material: Material, beside: Mapping[str, Trained]) -> dict[str, Tensor]:
        samples, target = material.samples, stage + 1
        chosen = mixing(samples.ids[stage], samples.weights[stage], samples.experts)
        inputs = torch.cat([samples.hidden[stage].float(), chosen], 1)
        mean, deviation = inputs.mean(0), inputs.std(0, unbiased=False) + 1e-5
        inputs, logits = (inputs - mean) / deviation, samples.logits[target]
        net = _fresh(inputs, logits, seed=stage)
        parameters = list(net.values())
        train_map(parameters, lambda rows: _run(net, rows), inputs, logits, steps=_STEPS, rate=_RATE, seed=stage)
        for part, shift in (("in", "in_bias"), ("skip", "bias")):  # the inputs of ``guesses`` are not normalised
            net[part] = net[part] / deviation[:, None]
            net[shift] = net[shift] - mean @ net[part]
        return {f"{part}.{target}": value.bfloat16() if value.ndim == 2 else value for part, value in net.items()}

    def of_next(self, inputs: PredictorInputs) -> Tensor:
        return self._run(self._nets[inputs.layer + 1], self._features.of(inputs))

    def _run(self, net: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """Returns what ``_run`` does, up to rounding: with ``net`` of ``_merged``, in six calls of torch."""
        hidden, skipped = self._products(net, inputs)
        inner = functional.silu(torch.addmm(net["up_bias"], hidden, net["up"]), inplace=True)
        hidden = torch.addmm(hidden, inner, net["down"])
        hidden = functional.layer_norm(hidden, (INNER,), net["scale"], net["shift"])
        return torch.addmm(skipped, hidden, net["head"])

    def _products(self, net: Mapping[str, Tensor], inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what the hidden layers and the linear part make of the input, [rows, INNER] and [rows, N]."""
        parts = INNER, self.sizes.experts
        if inputs.is_cuda:  # a graph refers to memory, which must not be that of another size's buffer
            return torch.addmm(net["first_bias"], inputs, net["first"]).split(parts, 1)
        if len(inputs) != len(self._first):
            with torch.inference_mode(False):  # a buffer for calls inside and outside of it
                self._first = torch.empty(len(inputs), sum(parts))
                self._hidden, self._skipped = self._first.split(parts, 1)
        torch.addmm(net["first_bias"], inputs, net["first"], out=self._first)
        return self._hidden, self._skipped


def _merged(net: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a network with the two products of its input in one, and the bias of ``down`` in that of ``in``."""
    shifted = (net["up_bias"].double() - net["down_bias"].double() @ net["up"].double()).float()
    kept = {part: net[part] for part in ("up", "down", "scale", "shift", "head")}
    biases = torch.cat([net["in_bias"] + net["down_bias"], net["bias"]])
    return kept | {"first": torch.cat([net["in"], net["skip"]], 1), "first_bias": biases, "up_bias": shifted}


def _fresh(inputs: Tensor, logits: Tensor, seed: int) -> dict[str, Tensor]:
    """Returns a network whose scores are those of the ridge regression."""
    generator = torch.Generator().manual_seed(seed)
    features, experts = inputs.shape[1], logits.shape[1]

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) / rows**0.5

    net = {"in": matrix(features, INNER), "up": matrix(INNER, INNER), "down": 0.1 * matrix(INNER, INNER)}
    net |= {name: torch.zeros(INNER) for name in ("in_bias", "up_bias", "down_bias", "shift")}
    net |= {"scale": torch.ones(INNER), "head": torch.zeros(INNER, experts)}
    return net | {"skip": ridge(inputs, logits), "bias": (logits - logits.mean(1, keepdim=True)).mean(0)}


def _run(net: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
    hidden = torch.addmm(net["in_bias"], inputs, net["in"])
    inner = functional.silu(torch.addmm(net["up_bias"], hidden, net["up"]))
    hidden = hidden + torch.addmm(net["down_bias"], inner, net["down"])
    hidden = functional.layer_norm(hidden, (INNER,), net["scale"], net["shift"])
    return torch.addmm(net["bias"], hidden, net["head"]) + inputs @ net["skip"]


def ridge(inputs: Tensor, targets: Tensor, strength: float = 1e-2) -> Tensor:
    """Returns W [f, n], the least squares solution of ``inputs @ W = targets`` with a penalty.

    Minimises ||X W - Y||^2 + s ||W||^2, s = ``strength`` * rows * the mean variance of the columns of X. Before the
    fit the mean of each row of Y is subtracted: adding a constant to all scores of a row changes no ranking.

    Args:
        inputs: float [rows, f] (X).
        targets: float [rows, n] (Y).
    """
    targets = targets - targets.mean(1, keepdim=True)
    gram = inputs.T @ inputs
    gram.diagonal().add_(penalty(inputs, strength))
    return torch.linalg.solve(gram, inputs.T @ targets)


def penalty(inputs: Tensor, strength: float) -> float:
    """Returns s of ``ridge``."""
    return max(strength * len(inputs) * float(inputs.var(0, unbiased=False).mean()), 1e-12)


def train_map(
    parameters: Sequence[Tensor],
    logits: Callable[[Tensor], Tensor],
    inputs: Tensor,
    targets: Tensor,
    *,
    steps: int,
    rate: float,
    seed: int,
) -> None:
    """Minimises the KL divergence from a router's distribution to that of ``logits``, with Adam.

    Args:
        parameters: float tensors that ``logits`` computes with; changed in place.
        logits: [rows, f] -> [rows, N].
        inputs, targets: [rows, f] and the router's logits [rows, N].
        rate: learning rate at the beginning; it falls linearly.
    """
    generator = torch.Generator().manual_seed(seed)
    wanted = targets.softmax(-1)
    with torch.enable_grad():
        for parameter in parameters:
            parameter.requires_grad_()
        optimiser = torch.optim.Adam(parameters, rate)
        for step in range(steps):
            optimiser.param_groups[0]["lr"] = rate * (1 - step / steps)
            batch = torch.randint(len(inputs), (min(_BATCH, len(inputs)),), generator=generator)
            loss = -(wanted[batch] * logits(inputs[batch]).log_softmax(-1)).sum(-1).mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    for parameter in parameters:
        parameter.requires_grad_(False)
