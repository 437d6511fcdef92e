"""Stand-ins for layers of vLLM's models whose kernels no CPU has, so that their MoE layers run here.

``install(architecture)`` replaces them in this process, before its model is built, for stock vLLM and for the plugin
alike. Everything else is vLLM's: the model's class, its loader, its routers and its layer of experts.

- Attention, and recurrent layers: ``PlainAttention``, which has weights of its own, of the layer's name.
- Residual streams: the same sums in PyTorch, by vLLM's own reference where it has one.
- Routers that vLLM leaves out on a CPU: the classes that a GPU gets, with their kernels in PyTorch.
- Experts with an activation or a limit that vLLM's kernel for a CPU has not: the same product in PyTorch.
"""

from __future__ import annotations

import importlib.util
import sys
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import torch
from torch import Tensor
from torch.nn import functional

HEADS, KV_HEADS, WIDTH = 4, 2, 32


@dataclass(frozen=True)
class StandIn:
    """One kind of layer.

    Attributes:
        of: what it stands for, in the table of families.
        install: replaces it in vLLM's modules.
    """

    of: str
    install: Callable[[], None]


def install(architecture: str) -> str:
    """Returns what was stood in for, in words; empty if nothing was."""
    found = STAND_INS.get(architecture, ())
    for each in found:
        each.install()
    return ", ".join(each.of for each in found)


def attention(*places: str, recurrent: str = "") -> StandIn:
    """``PlainAttention`` for classes, ``module:name``; ``recurrent``: the model's class, which has no states then."""

    def replace() -> None:
        for place in places:
            _put(place, _plain_attention())
        _found("vllm.config:ModelConfig").use_mla = False  # blocks of its cache are those of attention with heads
        if recurrent:
            _found(recurrent).is_hybrid = False

    return StandIn("attention and recurrent layers" if recurrent else "attention", replace)


def _found(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def _put(place: str, value: Any) -> None:
    """Fails if vLLM has no such name, which a stand-in for it would hide."""
    module, _, name = place.partition(":")
    assert hasattr(importlib.import_module(module), name), f"vLLM has no {place}"
    setattr(importlib.import_module(module), name, value)


def _plain_attention() -> type[torch.nn.Module]:
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.attention import Attention

    class PlainAttention(torch.nn.Module):
        """Causal attention of few heads, without positions, over vLLM's cache; no weight of it is in a checkpoint."""

        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__()
            prefix = named.get("prefix") or next(each for each in args if isinstance(each, str))
            config = get_current_vllm_config()
            self.hidden, dtype = config.model_config.get_hidden_size(), config.model_config.dtype
            generator = torch.Generator().manual_seed(zlib.crc32(prefix.encode()))
            inner = torch.randn((HEADS + 2 * KV_HEADS) * WIDTH, self.hidden, generator=generator) / self.hidden**0.5
            outer = torch.randn(self.hidden, HEADS * WIDTH, generator=generator) / (HEADS * WIDTH) ** 0.5
            self.register_buffer("inner", 2 * inner.to(dtype), persistent=False)
            self.register_buffer("outer", outer.to(dtype), persistent=False)
            self.attn = Attention(
                HEADS, WIDTH, WIDTH**-0.5, KV_HEADS, cache_config=config.cache_config, prefix=f"{prefix}.attn"
            )
            self.o_proj = SimpleNamespace(reduce_results=False)  # which some models set

        def forward(self, *args: Any, **named: Any) -> Tensor:
            given = [each for each in (*args, *named.values()) if isinstance(each, Tensor)]
            [x] = [each for each in given if each.is_floating_point() and each.shape[-1] == self.hidden]
            parts = functional.linear(x, self.inner).split([HEADS * WIDTH, KV_HEADS * WIDTH, KV_HEADS * WIDTH], -1)
            return functional.linear(self.attn(*(part.contiguous() for part in parts)), self.outer)

        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
            list(weights)  # those of the layer that it stands for
            return set()

    return PlainAttention


# -- routers -----------------------------------------------------------------------------------------------


def _routers() -> None:
    router = "vllm.model_executor.layers.fused_moe.router"
    _put(f"{router}.router_factory:current_platform", SimpleNamespace(is_cpu=lambda: False))
    kernels = SimpleNamespace(
        topk_softmax=_top_k(lambda logits: logits.softmax(-1)),
        topk_sigmoid=_top_k(torch.sigmoid),
        topk_hash_softplus_sqrt=_top_k_of_tokens,
    )
    for module in ("fused_topk_router", "fused_topk_bias_router"):
        _put(f"{router}.{module}:ops", kernels)
    _put(f"{router}.zero_expert_router:zero_experts_compute_triton", _identity_experts)


def _top_k(score: Callable[[Tensor], Tensor]) -> Callable[..., None]:
    """In place of vLLM's kernels: chosen with a bias, weighed without; written to ``weights`` and ``ids``."""

    def run(
        weights: Tensor, ids: Tensor, places: Tensor, logits: Tensor, renormalize: bool = False,
        bias: Tensor | None = None, scale: float = 1.0, **others: Any,
    ) -> None:  # fmt: skip
        scores = score(logits.float())
        _write_choice(weights, ids, scores, scores if bias is None else scores + bias, renormalize, scale)

    return run


def _top_k_of_tokens(
    weights: Tensor, ids: Tensor, places: Tensor, logits: Tensor, renormalize: bool, scale: float, bias: Tensor | None,
    tokens: Tensor | None, table: Tensor | None, **others: Any,
) -> None:  # fmt: skip
    """DeepSeek-V4's: the experts of the first layers are those of a token in ``table``."""
    scores = functional.softplus(logits.float()).sqrt()
    if table is None:
        _write_choice(weights, ids, scores, scores if bias is None else scores + bias, renormalize, scale)
        return
    assert tokens is not None
    ids.copy_(table[tokens.long()])
    _write_weights(weights, ids, scores, renormalize, scale)


def _write_choice(
    weights: Tensor, ids: Tensor, scores: Tensor, ranked: Tensor, renormalize: bool, scale: float
) -> None:
    ids.copy_(ranked.topk(ids.shape[1], dim=-1).indices)
    _write_weights(weights, ids, scores, renormalize, scale)


def _write_weights(weights: Tensor, ids: Tensor, scores: Tensor, renormalize: bool, scale: float) -> None:
    weights.copy_(scores.gather(1, ids.long()))
    if renormalize:
        weights.div_(weights.sum(-1, keepdim=True))
    weights.mul_(scale)


def _identity_experts(
    expert_indices: Tensor, expert_scales: Tensor, num_experts: int, zero_expert_type: str, hidden_states: Tensor
) -> Tensor:
    assert zero_expert_type == "identity"
    kept = expert_scales.masked_fill(expert_indices < num_experts, 0.0).sum(-1, keepdim=True)
    return (kept * hidden_states.float()).to(hidden_states.dtype)


# -- experts -----------------------------------------------------------------------------------------------


def _experts() -> None:
    """vLLM's kernel for experts in 16 or 32 bits on a CPU, with the activations and limits of its kernels for a GPU."""
    cpu_moe = importlib.import_module("vllm.model_executor.layers.fused_moe.experts.cpu_moe")
    oracle = importlib.import_module("vllm.model_executor.layers.fused_moe.activation")
    known = oracle.MoEActivation.SILU, oracle.MoEActivation.SWIGLUOAI_UNINTERLEAVE
    experts = cpu_moe.CPUUnquantizedExperts
    experts._supports_activation = staticmethod(lambda activation: activation in known)
    experts.process_weights_after_loading = lambda self, layer: None

    def apply(
        self: Any, output: Tensor, hidden_states: Tensor, w1: Tensor, w2: Tensor, topk_weights: Tensor,
        topk_ids: Tensor, activation: Any, *others: Any, **named: Any,
    ) -> None:  # fmt: skip
        config = oracle.ApplyMoEActivationConfig.from_configs(self.moe_config, self.quant_config)
        x, dtype = hidden_states.float(), hidden_states.dtype
        pairs = torch.zeros(*topk_ids.shape, output.shape[-1])
        for expert in topk_ids.unique().tolist():
            rows, places = (topk_ids == expert).nonzero(as_tuple=True)
            gate, up = (x[rows] @ w1[expert].float().T).to(dtype).float().chunk(2, -1)
            if config.clamp_limit is not None:
                gate, up = gate.clamp(max=config.clamp_limit), up.clamp(-config.clamp_limit, config.clamp_limit)
            acted = (gate * torch.sigmoid(config.alpha * gate)).to(dtype).float() * (up + config.beta)
            pairs[rows, places] = acted.to(dtype).float() @ w2[expert].float().T
        output.copy_(sum(pairs.mul(topk_weights[..., None]).to(dtype).float().unbind(1), torch.zeros(())).to(dtype))

    experts.apply = apply


# -- residual streams --------------------------------------------------------------------------------------


def _residual_streams() -> None:
    """mHC of DeepSeek-V4 and GLM-5.3, by vLLM's references in PyTorch; the head's sum has none there."""
    kernels = "vllm.model_executor.kernels.mhc"
    reference = _found(f"{kernels}.torch:mhc_pre_delayed_torch")

    def pre(residual: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
        post, comb, _, mixed = reference(residual, *others[:8])
        return post, comb, (mixed[..., None] * residual.float()).sum(1).to(residual.dtype)

    def head(x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, rms_eps: float, eps: float) -> Tensor:
        flat = x.flatten(-2).float()
        mixes = (flat @ fn.T) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + rms_eps)
        gates = torch.sigmoid(mixes * scale + base) + eps
        return (gates[..., None] * x.float()).sum(-2).to(x.dtype)

    _put(f"{kernels}:mhc_pre_cpu", pre)
    _put(f"{kernels}:mhc_post_cpu", _found(f"{kernels}.torch:mhc_post_torch"))
    _put(f"{kernels}:hc_head_fused_cpu", head)


def _gated_residuals() -> None:
    """Qwen4Exp's, as ``qwen4_exp.common.hyperconnection`` has them in PyTorch."""
    module = "vllm.models.qwen4_exp.nvidia.hyperconnection"

    def norm(x: Tensor, weight: Tensor, eps: float, count: int) -> Tensor:
        streams = x.float().unflatten(-1, (count, -1))
        normed = (streams * torch.rsqrt(streams.square().mean(-1, keepdim=True) + eps)).flatten(-2)
        return (normed * (1.0 + weight.float())).to(x.dtype)

    def combine(residual: Tensor, output: Tensor, injection: Tensor | None, count: int) -> Tensor:
        factor = torch.ones(()) if injection is None else 2.0 * torch.sigmoid(injection.float() / count)[..., None]
        return (
            (residual.float().unflatten(-1, (count, -1)) + output.float()[..., None, :] * factor)
            .flatten(-2)
            .to(residual.dtype)
        )

    def combine_norm(
        residual: Tensor, output: Tensor, injection: Tensor | None, weight: Tensor, eps: float, count: int
    ) -> tuple[Tensor, Tensor]:
        combined = combine(residual, output, injection, count)
        return combined, norm(combined, weight, eps, count)

    def mix(x: Tensor, gate: Tensor, count: int) -> Tensor:
        return (torch.sigmoid(gate.float()) * x.float()).unflatten(-1, (count, -1)).mean(-2).to(x.dtype)

    _put(f"{module}:grouped_gemma_rmsnorm", norm)
    _put(f"{module}:hc_silu", lambda x, count: functional.silu(x.float() / count).to(x.dtype))
    _put(f"{module}:hc_gate_mix", mix)
    _put(f"{module}:hc_combine", combine)
    _put(f"{module}:hc_combine_norm", combine_norm)


def _gemma_norms() -> None:
    """MiniMax-M3's, which are FlashInfer's."""

    def norm(self: Any, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if residual is not None:
            x = residual = (x.float() + residual.float()).to(x.dtype)
        scaled = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.variance_epsilon)
        normed = (scaled * (1.0 + self.weight.float())).to(x.dtype)
        return normed if residual is None else (normed, residual)

    _found("vllm.models.minimax_m3.nvidia.model:MiniMAXGemmaRMSNorm").forward = norm


class _Images:
    """Finds torchvision's modules, empty ones: what models for images import, and text does not use."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, _Images(), is_package=True) if name.partition(".")[0] == "torchvision" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = MagicMock(spec_set=None, name=spec.name)
        module.__spec__, module.__path__ = spec, []
        return cast(ModuleType, module)

    def exec_module(self, module: ModuleType) -> None:
        pass


def _images() -> None:
    if importlib.util.find_spec("torchvision") is None:
        sys.meta_path.append(cast(Any, _Images))


IMAGES = StandIn("what it has for images", _images)
ROUTERS = StandIn("the routers' kernels", _routers)
EXPERTS = StandIn("the product of experts", _experts)
STREAMS = StandIn("residual streams", _residual_streams)
_V4, _GLM, _QWEN = "vllm.models.deepseek_v4", "vllm.models.glm5next.common.model", "vllm.models.qwen4_exp.nvidia.model"
_M3, _KIMI = "vllm.models.minimax_m3.nvidia.model", "vllm.models.kimi_k3.nvidia.model"
_V32 = "vllm.model_executor.models.deepseek_v2:DeepseekV2Attention"  # vLLM's choice without latent attention

STAND_INS: dict[str, tuple[StandIn, ...]] = {
    "DeepseekV4ForCausalLM": (attention(f"{_V4}.cpu.model:DeepseekV4CPUAttention"), STREAMS, ROUTERS, EXPERTS),
    "Qwen4ExpForCausalLM": (
        IMAGES,
        attention(
            f"{_QWEN}:QwenGatedDeltaNetAttention",
            f"{_QWEN}:Qwen4ExpQSAAttention",
            recurrent=f"{_QWEN}:Qwen4ExpForCausalLM",
        ),
        StandIn("residual streams", _gated_residuals),
    ),
    "Glm5NextForCausalLM": (
        IMAGES,
        attention(
            f"{_GLM}:Glm5NextLinearAttention", f"{_GLM}:Glm5NextMLAAttention", recurrent=f"{_GLM}:Glm5NextForCausalLM"
        ),
        STREAMS,
        EXPERTS,
    ),
    "MiniMaxM3SparseForCausalLM": (
        IMAGES,
        attention(f"{_M3}:MiniMaxM3SparseAttention", f"{_M3}:MiniMaxM3Attention"),
        StandIn("norms", _gemma_norms),
        ROUTERS,
        EXPERTS,
    ),
    "KimiLinearForCausalLM": (
        StandIn("reductions across GPUs", lambda: _put(f"{_KIMI}:maybe_init_gemm_rs_ar", lambda *args, **named: None)),
        attention(
            f"{_KIMI}:KimiLinearGatedDeltaNetAttention",
            f"{_KIMI}:MultiHeadLatentAttention",
            recurrent=f"{_KIMI}:KimiLinearForCausalLM",
        ),
        ROUTERS,
    ),
    "DeepseekV32ForCausalLM": (attention(_V32),),
    "GlmMoeDsaForCausalLM": (attention(_V32),),
    "LongcatFlashForCausalLM": (ROUTERS,),
    "MiniMaxM2ForCausalLM": (ROUTERS,),
    "Step3p5ForCausalLM": (ROUTERS,),
    "K2HorizonForCausalLM": (ROUTERS,),
    "LagunaForCausalLM": (ROUTERS,),
}
