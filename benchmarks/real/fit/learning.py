"""Trains a drafter on what the target itself goes on to say (``rolls.py``): at that it has to be good.

Its goal is the target's distribution over the tokens that it drafts. What it has learned is a running mean of its
weights, so that training can end, and go on, at any time.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.real.fit.eagle import Eagle, streams_of
from benchmarks.real.fit.llama import FFN, Llama, normed
from benchmarks.real.fit.rolls import Rolls

STEPS = 7  # of a chain while it learns
DECAY = 0.8  # weight of step j in the loss: later steps matter only if the earlier ones were right
BASES = 64  # positions of a window whose chains go on after step 0
ROWS = 0.1  # the rate of what is added to output rows, as a part of that of all others
MATRICES = ("fc", "qkv", "o", "gate", "up", "down")  # whose steps are orthogonalised (Muon)
MOMENTS = "exp_avg", "exp_avg_sq", "momentum_buffer"  # of AdamW, and of Muon
HIDDEN = 1.0  # weight of the relative error of the last streams, where training begins
HIDDEN_TOKENS = 300_000  # after which it has fallen to nothing
WARM_UP = 50  # steps to the full rate
KEPT = 1_500_000  # tokens of which the target's streams are kept for the next pass: 3.5 KB each
MEAN = 0.999  # of the weights' running mean, a step


@dataclass
class Learned:
    """How far training is: what a later run goes on from."""

    windows: int  # that were learned from, each pass counted
    tokens: int  # of these, without their prompts
    curve: list[tuple[int, float]]  # (tokens, tokens a step on held prompts), by time


class Trainer:
    """Trains a drafter, ``batch`` windows of ``rolls`` at a time.

    Args:
        ffn: of the target.
        rate: learning rate, after a warm-up.
    """

    def __init__(self, head: Eagle, model: Llama, ffn: FFN, rolls: Rolls, rate: float, batch: int) -> None:
        self.head, self.learned = head, Learned(0, 0, [])
        self._model, self._ffn, self._rolls, self._rate, self._batch = model, ffn, rolls, rate, batch
        named = dict(head.named_parameters())
        matrices = [named.pop(name) for name in MATRICES]
        rows = [named.pop(name) for name in ("rows_left", "rows_right") if name in named]
        groups = [{"params": [*named.values()], "share": 1.0}, {"params": rows, "share": ROWS}]
        self._optimisers = (
            torch.optim.Muon(
                [{"params": matrices, "share": 1.0}], lr=rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), weight_decay=0.05),
        )
        self._mean = {name: weight.detach().clone() for name, weight in head.named_parameters()}
        self._kept: dict[int, Tensor] = {}  # the target's streams of a window, so that a later pass costs half
        self._drafted = torch.zeros(len(model.embedding), dtype=torch.bool)
        self._drafted[head.vocabulary] = True

    @property
    def steps(self) -> int:
        return self.learned.windows // self._batch

    def mean(self) -> dict[str, Tensor]:
        """The running mean of the weights, by name, float32."""
        return self._mean

    def step(self) -> tuple[float, list[float]]:
        """Learns from the next windows.

        Returns:
            the loss, and how often each step of a chain agrees with the target's choice.
        """
        for optimiser in self._optimisers:
            optimiser.zero_grad()
        losses, agreed, parts = 0.0, torch.zeros(STEPS), torch.zeros(STEPS)
        for number in range(self.learned.windows, self.learned.windows + self._batch):
            turn, place = divmod(number, len(self._rolls))
            order = torch.randperm(len(self._rolls), generator=torch.Generator().manual_seed(turn))
            window = int(order[place])
            ids, begun = self._rolls.window(window)
            generator = torch.Generator().manual_seed(number)
            loss, same = self._loss(ids, begun, self._streams(window, ids), generator)
            if loss.requires_grad:  # else nothing in this window is ever drafted
                (loss / self._batch).backward()
            losses += float(loss.detach()) / self._batch
            known = ~same.isnan()
            agreed[known] += same[known]
            parts += known
            self.learned.tokens += len(ids) - begun
        self.learned.windows += self._batch
        for optimiser in self._optimisers:
            for group in optimiser.param_groups:
                nn.utils.clip_grad_norm_(group["params"], 1.0)
                group["lr"] = self._rate * group["share"] * min(1, self.steps / WARM_UP)
            optimiser.step()
        keep = min(MEAN, self.steps / (self.steps + 10))
        for name, weight in self.head.named_parameters():
            self._mean[name].lerp_(weight.detach(), 1 - keep)
        return losses, (agreed / parts).tolist()

    def _streams(self, window: int, ids: Tensor) -> Tensor:
        """The target's streams of a window [its tokens]: [1, tokens, depths, hidden]."""
        found = self._kept.get(window)
        if found is None:
            found = streams_of(self._model, ids, self._ffn, self.head.depths)
            if int(self._rolls.ends[window]) <= KEPT:
                self._kept[window] = found
        return found

    def _loss(self, ids: Tensor, begun: int, streams: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Of one window [tokens]; and how often each step agrees [STEPS], NaN where it drafted nothing.

        Args:
            streams: the target's, [1, tokens, depths, hidden].
        """
        head, model = self.head, self._model
        finals = normed(streams[:, 1:, -1], model.norm, model.shape.epsilon)  # of position t + 1 at index t
        size = finals.float().pow(2).mean()
        last = len(ids) - 2  # positions from which a known token is drafted
        first = max(0, begun - 1)
        bases = first + torch.randperm(max(0, last - first - STEPS + 1), generator=generator)[:BASES].sort().values
        loss, weights, agreed = torch.zeros(()), 0.0, torch.full((STEPS,), torch.nan)
        embedded = F.embedding(ids[None, 1:], model.embedding)
        near = HIDDEN * max(0.0, 1 - self.learned.tokens / HIDDEN_TOKENS)
        for number, (starts, x) in enumerate(head.unrolled(embedded, streams, bases, STEPS)):
            rows = starts + number
            # Where the target says a token that is never drafted, the chain ends whatever is drafted.
            kept = (rows >= first) & (rows < last) & self._drafted[ids[(rows + 2).clamp_max(len(ids) - 1)]]
            if not kept.any():
                continue
            x, rows = x[:, kept], rows[kept]
            goal = head.goals(finals[:, rows])
            got = head.logits(x).log_softmax(-1)
            apart = F.kl_div(got, goal.log_softmax(-1), log_target=True, reduction="none").sum(-1).mean()
            if near:
                apart = apart + near * (head.finals(x).float() - finals[:, rows].float()).pow(2).mean() / size
            loss = loss + DECAY**number * apart
            weights += DECAY**number
            agreed[number] = (goal.argmax(-1) == got.argmax(-1)).float().mean()
        return loss / max(weights, 1e-9), agreed

    def _moments(self, name: str) -> dict[Any, Any]:
        """What the optimiser of the weights ``name`` knows, by weights."""
        matrices, others = self._optimisers
        return (matrices if name in MATRICES else others).state

    def save(self, path: Path) -> None:
        """Writes all that ``resume`` needs."""
        tensors: dict[str, Tensor] = {}
        for name, weight in self.head.named_parameters():
            moments = self._moments(name).get(weight, {})
            parts = {"weight": weight.detach(), "mean": self._mean[name]}
            parts |= {part: moments[part] for part in MOMENTS if part in moments}
            tensors |= {f"{name}.{part}": tensor.contiguous() for part, tensor in parts.items()}
        scratch = path.with_name(f"{path.name}.part")
        save_file(tensors, scratch, {"learned": json.dumps(self.learned.__dict__)})
        scratch.replace(path)

    def resume(self, path: Path) -> None:
        """Goes on from what ``save`` wrote."""
        with safe_open(path, "pt") as file, torch.no_grad():
            self.learned = Learned(**json.loads(file.metadata()["learned"]))
            names = set(file.keys())
            for name, weight in self.head.named_parameters():
                weight.copy_(file.get_tensor(f"{name}.weight"))
                self._mean[name].copy_(file.get_tensor(f"{name}.mean"))
                parts = [part for part in MOMENTS if f"{name}.{part}" in names]
                if parts:
                    state: dict[str, Any] = {"step": torch.tensor(float(self.steps))}
                    self._moments(name)[weight] = state | {part: file.get_tensor(f"{name}.{part}") for part in parts}
