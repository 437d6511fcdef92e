"""An EAGLE-3 head for the toy model, in the form that stock vLLM runs (``LlamaForCausalLMEagle3``).

At base position t the head reads the target's hidden states of t (three depths) and the embedding of
token t+1, and predicts token t+2; its own residual stream then replaces the target's at t+1, and so on.
Training unrolls that chain ("training-time test" of the EAGLE-3 paper): the keys of step 0, which come
from the target's states, are causal, and step j attends in addition only to the keys of its own steps 1..j.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from export import common_config, write_checkpoint
from nets import Attention, CausalLM, DenseMLP, RMSNorm, Shape, rotary_table
from torch import Tensor, nn

AUX_LAYERS = (2, 4, 6)  # how many target layers have run; 6 is the last hidden state before the final norm
STEP_DECAY = 0.8  # weight of step j in the loss: later steps matter only if the earlier ones were right


def head_shape(target: Shape) -> Shape:
    return replace(target, layers=1, experts=0, top_k=0, intermediate=2 * target.hidden)


class MidLayer(nn.Module):
    """Pre-norm decoder layer whose attention reads [embedding, hidden]; the residual is the hidden part."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden)
        self.hidden_norm = RMSNorm(shape.hidden)
        self.self_attn = Attention(shape, input_size=2 * shape.hidden, qk_norm=False)
        self.post_attention_layernorm = RMSNorm(shape.hidden)
        self.mlp = DenseMLP(shape)
        nn.init.normal_(self.self_attn.o_proj.weight, std=0.02)
        nn.init.normal_(self.mlp.down_proj.weight, std=0.02)

    def project(self, embeds: Tensor, x: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """embeds, x [batch, length, hidden] -> q, k, v [batch, heads, length, head_dim]."""
        return self.self_attn.project(torch.cat([self.input_layernorm(embeds), self.hidden_norm(x)], -1), table)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """x [batch, length, hidden], attended [batch, heads, length, head_dim] -> the next residual stream."""
        x = x + self.self_attn.merge(attended)
        return x + self.mlp(self.post_attention_layernorm(x))[0]


def attend_chain(q: Tensor, base: tuple[Tensor, Tensor], chain: list[tuple[Tensor, Tensor]], future: Tensor) -> Tensor:
    """Computes the attention of one later step: keys of step 0 up to the base, and the chain's own keys.

    q and every (k, v) of ``chain`` [batch, heads, bases, head_dim]: row i of the chain is visible to row i only.
    base: (k, v) of step 0 [batch, heads, length, head_dim]; future [bases, length] masks those after the base.
    """
    base_k, base_v = base
    scale = q.shape[-1] ** -0.5
    scores = (q @ base_k.mT * scale).masked_fill(future, -torch.inf)
    own = [(q * k).sum(-1, keepdim=True) * scale for k, _ in chain]
    weights = torch.cat([scores, *own], -1).softmax(-1)
    length = base_k.shape[2]
    out = weights[..., :length] @ base_v
    for i, (_, v) in enumerate(chain):
        out = out + weights[..., length + i, None] * v
    return out


class Head(nn.Module):
    """The EAGLE-3 head. Parameters have the names of published heads; the embeddings are the target's."""

    def __init__(self, shape: Shape, aux_layers: tuple[int, ...] = AUX_LAYERS) -> None:
        super().__init__()
        self.shape, self.aux_layers = shape, aux_layers
        self.fc = nn.Linear(len(aux_layers) * shape.hidden, shape.hidden, bias=False)
        self.midlayer = MidLayer(shape)
        self.norm = RMSNorm(shape.hidden)
        self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False)

    @torch.no_grad()
    def start_from(self, target: CausalLM) -> None:
        """Starts in the target's own output space: its last hidden state, final norm and language-model head."""
        self.fc.weight.mul_(0.1)
        self.fc.weight[:, -self.shape.hidden :] += torch.eye(self.shape.hidden)
        self.norm.load_state_dict(target.norm.state_dict())
        self.lm_head.load_state_dict(target.lm_head.state_dict())

    def logits(self, x: Tensor) -> Tensor:
        return self.lm_head(self.norm(x))

    def unroll(self, embeds: Tensor, features: Tensor, steps: int, bases: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields (positions [n] of the base rows, residual stream [batch, n, hidden]) for each step.

        embeds [batch, length + steps - 1, hidden]: embedding of the token after each position.
        features [batch, length, 3 * hidden]: the target's hidden states.
        bases [n]: positions that the chain starts from after step 0, which always runs at all of them.
        """
        length = features.shape[1]
        cos, sin = rotary_table(length + steps, self.shape.head_dim)
        x = self.fc(features)
        q, base_k, base_v = self.midlayer.project(embeds[:, :length], x, (cos[:length], sin[:length]))
        x = self.midlayer.finish(x, F.scaled_dot_product_attention(q, base_k, base_v, is_causal=True))
        yield torch.arange(length), x
        x, chain = x[:, bases], []
        future = torch.arange(length) > bases[:, None]
        for step in range(1, steps):
            rows = bases + step
            q, k, v = self.midlayer.project(embeds[:, rows], x, (cos[rows], sin[rows]))
            chain.append((k, v))
            x = self.midlayer.finish(x, attend_chain(q, (base_k, base_v), chain, future))
            yield bases, x


@torch.no_grad()
def teacher(target: CausalLM, ids: Tensor, aux_layers: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """ids [batch, n] -> (logits [batch, n, vocab], features [batch, n, 3 * hidden], embeddings of ids)."""
    logits, _, states = target(ids, hidden_states=True)
    return logits, torch.cat([states[i] for i in aux_layers], -1), states[0]


def unrolled_loss(head: Head, target: CausalLM, ids: Tensor, steps: int, bases_per_step: int) -> Tensor:
    """Cross-entropy to the target's distribution, averaged over the steps with decaying weights.

    ids [batch, length + steps]; the steps after the first run at ``bases_per_step`` random positions, as
    they need the keys of all positions only from step 0.
    """
    logits, features, embeds = teacher(target, ids, head.aux_layers)
    wanted = logits.softmax(-1)
    length = ids.shape[1] - steps
    bases = torch.randperm(length)[:bases_per_step].sort().values
    total, weight_sum = features.new_zeros(()), 0.0
    for step, (rows, x) in enumerate(head.unroll(embeds[:, 1:], features[:, :length], steps, bases)):
        goal = wanted[:, rows + 1 + step].flatten(0, 1)
        total = total + STEP_DECAY**step * F.cross_entropy(head.logits(x).flatten(0, 1), goal)
        weight_sum += STEP_DECAY**step
    return total / weight_sum


@torch.no_grad()
def evaluate(head: Head, target: CausalLM, ids: Tensor, steps: int = 8) -> dict:
    """Measures greedy agreement with the target on text (ids [windows, length + steps]), by step and as a chain."""
    length = ids.shape[1] - steps
    agree, losses = torch.zeros(steps), []
    chained = torch.zeros(steps)
    chunks = ids.split(8)
    for chunk in chunks:
        logits, features, embeds = teacher(target, chunk, head.aux_layers)
        alive = torch.ones(chunk.shape[0], length, dtype=torch.bool)
        for step, (rows, x) in enumerate(head.unroll(embeds[:, 1:], features[:, :length], steps, torch.arange(length))):
            ours, theirs = head.logits(x), logits[:, rows + 1 + step]
            same = ours.argmax(-1) == theirs.argmax(-1)
            alive &= same
            agree[step] += same.float().mean() / len(chunks)
            chained[step] += alive.float().mean() / len(chunks)
            if step == 0:
                losses.append(F.cross_entropy(ours.flatten(0, 1), theirs.softmax(-1).flatten(0, 1)).item())
    return {
        "validation_loss": round(sum(losses) / len(losses), 4),
        "agreement_by_step": [round(v, 4) for v in agree.tolist()],
        "all_steps_so_far_agree": [round(v, 4) for v in chained.tolist()],
    }


@torch.no_grad()
def simulate(head: Head, target: CausalLM, ids: Tensor, prompt_length: int, drafts: int) -> tuple[int, int]:
    """Returns what an engine would count on a greedy output: (drafts made, draft tokens accepted).

    ids [n]: prompt and greedy continuation. The chain is fed the true tokens, which is exact: it only
    matters up to the first draft token that differs. The last tokens, whose chain would run past the end
    of ``ids``, are left out.
    """
    logits, features, embeds = teacher(target, ids[None], head.aux_layers)
    length = len(ids) - drafts - 1
    good = torch.ones(length, dtype=torch.bool)
    accepted = torch.zeros(length, dtype=torch.long)
    for step, (_, x) in enumerate(head.unroll(embeds[:, 1:], features[:, :length], drafts, torch.arange(length))):
        good &= head.logits(x)[0].argmax(-1) == ids[2 + step : 2 + step + length]
        accepted += good
    position, rounds, total = prompt_length - 1, 0, 0
    while position < length:
        rounds, total = rounds + 1, total + int(accepted[position])
        position += int(accepted[position]) + 1
    return rounds, total


def write_head(head: Head, folder: Path) -> None:
    shape = head.shape
    config = common_config(shape) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "intermediate_size": shape.intermediate,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "draft_vocab_size": shape.vocab,
        "target_hidden_size": shape.hidden,
        "eagle_aux_hidden_state_layer_ids": list(head.aux_layers),
    }
    write_checkpoint(folder, config, head.state_dict())
