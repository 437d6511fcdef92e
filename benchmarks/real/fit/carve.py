"""Carves the dense FFNs into experts, layer by layer, on the carved model's own stream.

A layer's neurons become a shared expert of those that are always active and routed experts that are overlapping sets
of the others. For a token with normed input h the carved FFN computes

    y = down' [ silu(gate h) * (up h) * (1 on shared neurons + w(h) S) ],    w = k softmax(top-k of router h),

where S [experts, neurons] is 1 where an expert holds a neuron. Sets and router are fitted in turns to lose as little of
the activations' energy as possible (a selection is taken as it is, its gradient that of a sigmoid). Then down' is the
least-squares fit to the dense FFN of the same input, kept as down + left right of a low rank, which is chosen by the
error on the activations (reduced-rank regression), not by the size of the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.real import artefact
from benchmarks.real.artefact import Experts
from benchmarks.real.fit.llama import COMPUTE, Layer, Llama


@dataclass(frozen=True)
class Plan:
    """How a layer is carved and fitted."""

    shared: int = 576
    by_share: int = 2
    """In so many of the first layers the shared neurons are those with most of the squared share of a token's energy,
    in the others those with most energy. (Layer 0 turns an embedding of length 3.5 into a stream of length 42, so
    that the few tokens whose strongest neurons were missing lost a tenth of it.)"""
    experts: int = 64
    size: int = 96
    top_k: int = 8
    families: int = 8
    """The first sets: disjoint parts of the neurons by co-activation, each cut by as many clusters of tokens."""
    clusterings: int = 8
    """How many groups the families form. Those of a group share their clusters of tokens, so a token selects one expert
    of each of them, but for ``noise``; between groups a token may select two of one family and none of another. With
    one group for all, eight experts were one choice of eight: 118 different sets in 1,850 rows."""
    noise: float = 0.1
    """Of the routers of a group, as a part of their standard deviation."""
    steps: int = 60
    rounds: int = 3
    locality: tuple[float, float] = (0.03, 0.0)
    """How much a router is asked to select what the token before selected, in the first and in the last layer; in a
    line between them. (Neighbours share more experts in late layers by themselves.)"""
    balance: tuple[float, float] = (0.1, 0.3)
    """How much a router's load is asked to be even, likewise."""
    smooth: tuple[int, int] = (8, 15)
    """The first clusters are of activations averaged with those of the tokens beside, fully up to the first of these
    layers and by ``smooth_last`` from the second, in a line between them. (Without it neighbours share .20 of their
    experts in layer 8 and .42 in layer 15; with it .42 and .59. Published models: about .45.)"""
    smooth_last: float = 0.3
    alike: float = 0.5
    """The part of an expert's neurons that another one may have too."""
    spread: float = 0.25
    """Standard deviation of the selected experts' logits: how unequal their weights are."""

    def at(self, layer: int, layers: int) -> LayerPlan:
        """What changes from layer to layer."""
        depth, (full, least) = layer / (layers - 1), self.smooth
        locality, balance = (first + depth * (last - first) for first, last in (self.locality, self.balance))
        smooth = min(1.0, max(0.0, (least - layer) / (least - full)))
        smooth += (1 - smooth) * self.smooth_last
        return LayerPlan(locality, balance, smooth, layer < self.by_share)


@dataclass(frozen=True)
class LayerPlan:
    """The numbers of ``Plan`` that are a layer's own; ``smooth``: how much the tokens beside count, from 0 to 1."""

    locality: float
    balance: float
    smooth: float
    by_share: bool


def weights_of(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """k times the softmax of the top-k logits, 0 elsewhere: float32 [tokens, experts]."""
    values, ids = logits.topk(top_k, -1)
    return torch.zeros_like(logits).scatter(-1, ids, values.softmax(-1) * top_k)


Choice = Callable[[torch.Tensor, int], torch.Tensor]
"""From the router's logits and k to the weights of experts, as ``weights_of`` does."""


def always_of(experts: Experts) -> torch.Tensor:
    """1 for each neuron of the shared expert, float32 [neurons]."""
    return torch.zeros(experts.neurons).index_fill(0, experts.shared, 1.0)


def holders_of(sets: torch.Tensor, neurons: int) -> torch.Tensor:
    """S: float32 [experts, neurons], 1 where an expert holds a neuron; sets int64 [experts, size]."""
    return torch.zeros(len(sets), neurons).scatter(1, sets, 1.0)


class CarvedLayer:
    """A carved FFN as a function of its normed input."""

    def __init__(self, layer: Layer, experts: Experts, top_k: int) -> None:
        self.experts, self.top_k, self._layer = experts, top_k, layer
        self._holders, self._always = holders_of(experts.sets, experts.neurons), always_of(experts)
        self._router = experts.router.to(COMPUTE)
        self.update()

    def update(self) -> None:
        """Takes the experts' ``left`` and ``right`` as they are now."""
        self._down = self.experts.corrected(self._layer.down).to(COMPUTE)

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        """The router's logits, float32 [..., experts]."""
        return F.linear(h, self._router).float()

    def neurons(self, h: torch.Tensor, choice: Choice | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """What ``down'`` multiplies, float32 [tokens, neurons], and the router's logits [tokens, experts]."""
        logits = self.logits(h)
        weights = (choice or weights_of)(logits, self.top_k)
        active = F.silu(F.linear(h, self._layer.gate)) * F.linear(h, self._layer.up)
        return active.float() * (self._always + weights @ self._holders), logits

    def __call__(self, h: torch.Tensor) -> torch.Tensor:
        return self.output(self.neurons(h)[0])

    def output(self, neurons: torch.Tensor) -> torch.Tensor:
        return F.linear(neurons.to(COMPUTE), self._down)


def carved_layers(model: Llama, path: Path) -> list[CarvedLayer]:
    """The FFNs of the target that an artefact makes of the dense model."""
    target = artefact.load(path)[artefact.TARGET]
    top_k = target.numbers["top_k"]
    return [CarvedLayer(layer, experts, top_k) for layer, experts in zip(model.layers, target.layers, strict=True)]


def energies(layer: Layer, h: torch.Tensor) -> torch.Tensor:
    """How much each neuron adds to the output of each token, float32 [tokens, neurons]."""
    active = F.silu(F.linear(h, layer.gate)) * F.linear(h, layer.up)
    return (active.float() * layer.down.float().norm(dim=0)).pow(2)


def first_families(energy: torch.Tensor, count: int, size: int) -> torch.Tensor:
    """Balanced k-means of the neurons by the tokens that they are active on: int64 [count, size]."""
    generator = torch.Generator().manual_seed(0)
    profiles = F.normalize(energy.sqrt(), dim=0).T
    profiles = profiles @ torch.randn(profiles.shape[1], 128, generator=generator)
    profiles = F.normalize(profiles - profiles.mean(0), dim=1)
    centres = profiles[torch.randperm(len(profiles), generator=generator)[:count]]
    where = torch.empty(len(profiles), dtype=torch.long)
    for _ in range(6):
        near = profiles @ centres.T
        order = near.argsort(dim=1, descending=True).tolist()
        left = [size] * count
        for neuron in (near.amax(1) - near.mean(1)).argsort(descending=True).tolist():
            family = next(family for family in order[neuron] if left[family])
            left[family] -= 1
            where[neuron] = family
        centres = F.normalize(torch.stack([profiles[where == family].mean(0) for family in range(count)]), dim=1)
    return torch.stack([(where == family).nonzero()[:, 0] for family in range(count)])


def smoothed(x: torch.Tensor, window: int, share: float) -> torch.Tensor:
    """x [tokens, width] with, by ``share``, the mean of each token and those beside it in its window."""
    columns = x.view(-1, window, x.shape[1]).transpose(1, 2)
    mean = F.avg_pool1d(columns, 3, 1, 1, count_include_pad=False).transpose(1, 2).reshape(x.shape)
    return x.lerp(mean, share)


def clusters_of(points: torch.Tensor, count: int) -> torch.Tensor:
    """k-means: the cluster of each point, int64 [points]."""
    generator = torch.Generator().manual_seed(0)
    centres = points[torch.randperm(len(points), generator=generator)[:count]]
    where = torch.zeros(len(points), dtype=torch.long)
    for _ in range(12):
        where = (points @ centres.T - centres.pow(2).sum(1) / 2).argmax(1)
        found = [points[where == cluster] for cluster in range(count)]
        centres = torch.stack([rows.mean(0) if len(rows) else centres[i] for i, rows in enumerate(found)])
    return where


class Regression:
    """Least squares without an offset from one set of inputs, float32 [tokens, inputs]."""

    def __init__(self, inputs: torch.Tensor, ridge: float) -> None:
        self._inputs = inputs
        gram = inputs.T @ inputs
        self._root = torch.linalg.cholesky(gram + torch.eye(len(gram)) * gram.diagonal().mean() * ridge)

    def solved(self, outputs: torch.Tensor) -> torch.Tensor:
        """float32 [inputs, outputs] for outputs [tokens, outputs]."""
        return torch.cholesky_solve(self._inputs.T @ outputs, self._root)


def sets_and_router(h: torch.Tensor, energy: torch.Tensor, window: int, plan: Plan, own: LayerPlan) -> Experts:
    """Sets of neurons and a router, for h [tokens, hidden] and their neurons' energies [tokens, neurons]."""
    shares = (energy / energy.sum(1, keepdim=True)).pow(2) if own.by_share else energy
    order = shares.mean(0).argsort(descending=True)
    shared, rest = order[: plan.shared], order[plan.shared :]
    e = energy[:, rest]
    e = e / (e.sum(1, keepdim=True) + 0.1 * e.sum(1).mean())
    inputs = h.float()
    families = first_families(energy[:2048][:, rest], plan.families, len(rest) // plan.families)
    regression = Regression(inputs, 0.3)
    per_family, together = plan.experts // plan.families, plan.families // plan.clusterings
    rows, sets = [], []
    for group in families.split(together):
        part = smoothed(e[:, group.flatten()], window, own.smooth)
        guess = inputs @ regression.solved(part)
        where = clusters_of(guess / guess.std(), per_family)
        labels = F.one_hot(where, per_family).float()
        rows.append(regression.solved(labels - labels.mean(0)).T)
        for family in group:
            for cluster in range(per_family):
                mine = where == cluster
                mean = (e[mine][:, family].sum(0) + 20 * e[:, family].mean(0)) / (mine.sum() + 20)
                sets.append(family[mean.argsort(descending=True)[: plan.size]])
    shared_rows = torch.cat(rows)
    shared_rows /= (inputs @ shared_rows.T).std(0, keepdim=True).T
    generator = torch.Generator().manual_seed(2)
    noise = plan.noise * shared_rows.std() * torch.randn(plan.experts, h.shape[1], generator=generator)

    def expanded(rows: torch.Tensor) -> torch.Tensor:
        groups = rows.unflatten(0, (plan.clusterings, 1, per_family)).expand(-1, together, -1, -1)
        return groups.flatten(0, 2) + noise

    chosen = torch.stack(sets)
    for turn in range(plan.rounds + 1):
        shared_rows = _router_fitted(inputs, e, chosen, shared_rows, expanded, window, plan, own, turn)
        router = expanded(shared_rows)
        if turn < plan.rounds:
            chosen = _sets_fitted(inputs, e, chosen, router, plan, first=turn == 0)
    selected = F.linear(inputs, router).topk(plan.top_k, -1).values
    router *= plan.spread / selected.std(1).mean()
    hidden, neurons = h.shape[1], energy.shape[1]
    none = torch.zeros(hidden, 1), torch.zeros(1, neurons)
    return Experts(shared.sort().values, rest[chosen].sort(1).values, router, *none)


def _router_fitted(
    inputs: torch.Tensor,
    e: torch.Tensor,
    sets: torch.Tensor,
    rows: torch.Tensor,
    expanded: Callable[[torch.Tensor], torch.Tensor],
    window: int,
    plan: Plan,
    own: LayerPlan,
    turn: int,
) -> torch.Tensor:
    """Rows that are ``expanded`` to a router [experts, hidden], fitted by the energy that its choice loses."""
    holders = holders_of(sets, e.shape[1])
    rows = rows.clone().requires_grad_(True)
    optimiser = torch.optim.Adam([rows], lr=0.03 * float(rows.detach().std()), betas=(0.9, 0.98))
    generator = torch.Generator().manual_seed(turn)
    texts = inputs.view(-1, window, inputs.shape[1])
    energy = e.view(-1, window, e.shape[1])
    for step in range(plan.steps):
        pick = torch.randint(0, len(texts), (8,), generator=generator)
        z = F.linear(texts[pick], expanded(rows))
        top = z.topk(plan.top_k + 1, -1).values
        soft = torch.sigmoid((z - (top[..., -1:] + top[..., -2:-1]).detach() / 2) * 2)
        hard = (z >= top[..., -2:-1]).float()
        selected = hard + soft - soft.detach()
        lost = (energy[pick] * (selected @ holders - 1).pow(2)).sum(-1).mean()
        share = soft / soft.sum(-1, keepdim=True)
        load = plan.experts * (hard.mean((0, 1)) / plan.top_k * share.mean((0, 1))).sum()
        stay = (selected[:, 1:] * selected[:, :-1]).sum(-1).mean() / plan.top_k
        loss = lost + own.balance * load - own.locality * stay
        for group in optimiser.param_groups:
            group.setdefault("first", group["lr"])
            group["lr"] = group["first"] * (1 - step / plan.steps)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return rows.detach()


def _sets_fitted(
    inputs: torch.Tensor, e: torch.Tensor, sets: torch.Tensor, router: torch.Tensor, plan: Plan, first: bool
) -> torch.Tensor:
    """Each expert in turn takes the neurons that lose least energy, given what the others hold.

    Args:
        first: the sets may be more alike than ``plan.alike``: then an expert minds only those before it.
    """
    _, ids = F.linear(inputs, router).topk(plan.top_k, -1)
    chosen = torch.zeros(len(inputs), plan.experts).scatter(1, ids, 1.0)
    holders = holders_of(sets, e.shape[1])
    held = chosen @ holders
    for expert in range(plan.experts):
        rows = chosen[:, expert].nonzero()[:, 0]
        others = held[rows] - holders[expert]
        gain = (e[rows] * (1 - 2 * others)).sum(0)  # of (others - 1)^2 - (others + 1 - 1)^2
        minded = holders[:expert] if first else torch.cat([holders[:expert], holders[expert + 1 :]])
        new = torch.zeros_like(holders[expert])
        new[_apart(gain, minded, plan.size, int(plan.alike * plan.size))] = 1
        held[rows] = others + new
        holders[expert] = new
    return holders.topk(plan.size, 1).indices


def _apart(gain: torch.Tensor, others: torch.Tensor, size: int, most: int) -> list[int]:
    """Takes ``size`` neurons, the best first, but at most ``most`` of each of ``others`` [experts, neurons]."""
    taken: list[int] = []
    shared = torch.zeros(len(others))
    for neuron in gain.argsort(descending=True).tolist():
        holding = others[:, neuron]
        if not (holding * (shared >= most)).any():
            taken.append(neuron)
            shared += holding
            if len(taken) == size:
                return taken
    raise ValueError(f"no {size} neurons share at most {most} with each other expert")


class DownFit:
    """Least squares for the down projection, accumulated over batches of tokens."""

    def __init__(self, layer: Layer) -> None:
        hidden, neurons = layer.down.shape
        self._down = layer.down.float()
        self._gram = torch.zeros(neurons, neurons)
        self._cross = torch.zeros(neurons, hidden)

    def add(self, neurons: torch.Tensor, target: torch.Tensor) -> None:
        """neurons [tokens, neurons] and what the layer should add [tokens, hidden]; rows weigh by their length."""
        goal = target.float()
        length = goal.pow(2).sum(-1)
        weighted = neurons / (length + 0.3 * length.median())[:, None]
        self._gram += weighted.T @ neurons
        self._cross += weighted.T @ (goal - F.linear(neurons, self._down))

    def solved(self, rank: int, ridge: float) -> tuple[torch.Tensor, torch.Tensor]:
        """left [hidden, rank] and right [rank, neurons] of the correction to down."""
        gram = self._gram + torch.diag(ridge * self._gram.diagonal() + 1e-3 * ridge * self._gram.diagonal().mean())
        root = torch.linalg.cholesky(gram)
        change = torch.cholesky_solve(self._cross, root).T
        u, s, v = torch.linalg.svd(change @ root, full_matrices=False)
        right = torch.linalg.solve_triangular(root, v[:rank], upper=False, left=False)
        return u[:, :rank] * s[:rank], right


Progress = Callable[[int, float], None]
"""Told each layer and the median relative error of its FFN, on its own input."""


def carved(model: Llama, ids: torch.Tensor, plan: Plan, progress: Progress) -> list[Experts]:
    """Sets and routers of every layer, without corrections; ids int64 [windows, length]."""

    def made(number: int, student: torch.Tensor) -> CarvedLayer:
        some = torch.randperm(len(student), generator=torch.Generator().manual_seed(number))[:48]
        layer = model.layers[number]
        h = model.ffn_input(number, student[some]).flatten(0, 1)
        own = plan.at(number, model.shape.layers)
        experts = sets_and_router(h, energies(layer, h), ids.shape[1], plan, own)
        return CarvedLayer(layer, experts, plan.top_k)

    return _layer_by_layer(model, ids, made, progress)


def corrected(
    model: Llama,
    experts: list[Experts],
    ids: torch.Tensor,
    top_k: int,
    ranks: list[int],
    ridge: float,
    progress: Progress,
) -> list[Experts]:
    """The same layers with corrections of ``ranks`` to their down projections.

    A layer's goal is what the dense FFN computes of the same input. The dense model's stream is no goal: to make up for
    the errors of the layers before, corrections grow that do harm later (measured: 3.6 times the perplexity).
    """

    def made(number: int, student: torch.Tensor) -> CarvedLayer:
        carved = CarvedLayer(model.layers[number], experts[number], top_k)
        fit = DownFit(model.layers[number])
        for rows in student.split(16):
            h = model.ffn_input(number, rows).flatten(0, 1)
            fit.add(carved.neurons(h)[0], model.ffn(number, h))
        carved.experts.left, carved.experts.right = fit.solved(ranks[number], ridge)
        carved.update()
        return carved

    return _layer_by_layer(model, ids, made, progress)


def _layer_by_layer(
    model: Llama, ids: torch.Tensor, made: Callable[[int, torch.Tensor], CarvedLayer], progress: Progress
) -> list[Experts]:
    """Makes each layer of the stream [windows, length, hidden] that the layers before it give."""
    rotations = model.rotations(ids.shape[1])
    student = F.embedding(ids, model.embedding)
    layers = []
    for number in range(model.shape.layers):
        for rows in torch.arange(len(ids)).split(16):
            student[rows] = model.attended(number, student[rows], rotations)
        layer, errors = made(number, student), []
        for rows in torch.arange(len(ids)).split(16):
            h = model.ffn_input(number, student[rows])
            goal, y = model.ffn(number, h).float(), layer(h)
            errors.append((y.float() - goal).pow(2).sum(-1) / (goal.pow(2).sum(-1) + 1e-9))
            student[rows] += y
        layers.append(layer.experts)
        progress(number, float(torch.cat(errors).median()))
    return layers
