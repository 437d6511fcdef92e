"""Random checkpoints whose experts are quantised, and engines that run them in vLLM's kernels for a CPU.

vLLM selects these kernels on a CPU with AMX only. They also run on one with AVX-512 and its bf16 and integer products,
where ``allow`` makes vLLM select them: for stock vLLM and for the plugin, so that both are compared here, too. Our own
kernels read the same checkpoints on any CPU, without ``allow``.

`quantised.py JSON` prints the runs of several engines, one after the other in one process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

KERNELS = ("CPUExpertsFp8", "CPUExpertsInt8", "CPUExpertsInt4", "CPUExpertsMxfp4")
NEEDED = {"avx512f", "avx512_bf16", "avx512_vnni"}  # or AMX
HIDDEN, INNER, EXPERTS, TOP_K = 256, 128, 16, 4
BLOCK, MX, NV = 128, 32, 16
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # which column the nibbles of a word hold

Write = Callable[[Tensor], dict[str, Tensor]]


def missing() -> str | None:
    """Why this machine cannot run the kernels; None if it can."""
    flags = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "")
    if torch.cpu._is_amx_tile_supported() or set(flags.split()) >= NEEDED:
        return None
    return f"vLLM's kernels for quantised experts need AMX, or {', '.join(sorted(NEEDED))}"


def allow() -> None:
    """Makes vLLM select its kernels on this CPU, though it may lack AMX."""
    from vllm.model_executor.kernels.linear.scaled_mm import cpu as linear
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    for name in KERNELS:
        getattr(cpu_moe, name)._supports_current_device = staticmethod(lambda: True)
    linear.CPUFp8BlockScaledMMKernel.is_supported = classmethod(lambda cls, compute_capability=None: (True, None))


def allow_float32() -> None:
    """Makes vLLM serve quantised checkpoints in float32, too, where rounding decides no token."""
    from vllm.model_executor.layers.quantization import get_quantization_config

    for name in ("fp8", "compressed-tensors", "auto_gptq", "auto_awq", "gpt_oss_mxfp4"):
        found = get_quantization_config(name)
        found.get_supported_act_dtypes = classmethod(lambda cls: [torch.float32, torch.float16, torch.bfloat16])


# --- schemes ----------------------------------------------------------------------------------------------------------


def words(codes: Tensor, dim: int) -> Tensor:
    """Packs codes 0 ... 15 along ``dim`` into int32, the lowest nibble first."""
    nibbles = codes.to(torch.int64).movedim(dim, -1).unflatten(-1, (-1, 8))
    packed = (nibbles << (4 * torch.arange(8))).sum(-1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32).movedim(-1, dim).contiguous()


def grouped(weight: Tensor, size: int, zero_points: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes 0 ... 15 [N, K], scales and zero points [N, K / size] of ``weight``."""
    parts = weight.float().unflatten(1, (-1, size))
    if zero_points:
        low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
        scale = ((high - low) / 15).clamp(min=1e-6).to(torch.float16).float()
        zero = (-low / scale).round().clamp(0, 15)
    else:
        scale = (parts.abs().amax(-1) / 7).clamp(min=1e-6).to(torch.float16).float()
        zero = torch.full_like(scale, 8)
    codes = (parts / scale[..., None] + zero[..., None]).round().clamp(0, 15)
    return codes.flatten(1), scale, zero


def fp8_blocks(weight: Tensor, scale_name: str) -> dict[str, Tensor]:
    """Blocks of 128 x 128, the last of which may be smaller."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    tiles = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [N / 128, 128, K / 128, 128]
    scale = (tiles.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max).clamp(min=1e-8)
    codes = (tiles / scale[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :columns]
    return {"weight": codes.to(torch.float8_e4m3fn), scale_name: scale}


def fp8_channels(weight: Tensor) -> dict[str, Tensor]:
    scale = (weight.float().abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max).clamp(min=1e-8)
    return {"weight": (weight.float() / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def int8_channels(weight: Tensor) -> dict[str, Tensor]:
    scale = (weight.float().abs().amax(1, keepdim=True) / 127).clamp(min=1e-8)
    return {"weight": (weight.float() / scale).round().to(torch.int8), "weight_scale": scale.to(torch.bfloat16)}


def int4_groups(weight: Tensor, size: int) -> dict[str, Tensor]:
    codes, scale, _ = grouped(weight, size, False)
    shape = torch.tensor(weight.shape)
    return {"weight_packed": words(codes, 1), "weight_scale": scale.to(torch.bfloat16), "weight_shape": shape}


def gptq(weight: Tensor, size: int) -> dict[str, Tensor]:
    codes, scale, zero = grouped(weight, size, False)
    return {
        "qweight": words(codes.T, 0),
        "scales": scale.T.to(torch.float16).contiguous(),
        "qzeros": words(zero.T - 1, 1),
        "g_idx": (torch.arange(weight.shape[1]) // size).to(torch.int32),
    }


def awq(weight: Tensor, size: int) -> dict[str, Tensor]:
    codes, scale, zero = grouped(weight, size, True)

    def pack(values: Tensor) -> Tensor:
        return words(values.unflatten(1, (-1, 8))[..., AWQ_ORDER].flatten(1), 1)

    return {"qweight": pack(codes.T), "scales": scale.T.to(torch.float16).contiguous(), "qzeros": pack(zero.T)}


def nvfp4(weight: Tensor) -> dict[str, Tensor]:
    """With another scale for each tensor, of which the checkpoint has the reciprocal."""
    values, groups = torch.tensor(E2M1), weight.float().unflatten(1, (-1, NV))
    of_tensor = 448 * 6 / groups.abs().max()
    scale = (groups.abs().amax(-1) / 6 * of_tensor).to(torch.float8_e4m3fn)
    scaled = groups / (scale.float() / of_tensor).clamp(min=1e-30)[..., None]
    codes = ((scaled.abs()[..., None] - values).abs().argmin(-1) | ((scaled < 0).long() << 3)).flatten(1)
    return {
        "weight_packed": (codes[:, ::2] | (codes[:, 1::2] << 4)).to(torch.uint8),
        "weight_scale": scale,
        "weight_global_scale": of_tensor[None],
        "input_global_scale": torch.tensor([1.0]),
    }


def mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes uint8 [..., K / 32, 16] and exponents uint8 [..., K / 32] of ``weight`` [..., K]."""
    values = torch.tensor(E2M1)
    groups = weight.float().unflatten(-1, (-1, MX))
    exponent = groups.abs().amax(-1).clamp(min=1e-30).log2().floor() - 2
    scaled = groups / torch.exp2(exponent)[..., None]
    codes = (scaled.abs()[..., None] - values).abs().argmin(-1) | ((scaled < 0).long() << 3)
    return (codes[..., ::2] | (codes[..., 1::2] << 4)).to(torch.uint8), (exponent + 127).clamp(0, 254).to(torch.uint8)


def compressed(layout: str, weights: dict[str, Any], rows: dict[str, Any] | None) -> dict[str, Any]:
    """The entry of compressed-tensors in a ``config.json``, for experts alone."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": rows, "output_activations": None}
    ignored = ["re:.*self_attn.*", "re:.*mlp.gate$", "re:.*shared_expert.*", "lm_head"]
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignored,
    }


UNQUANTISED = ["self_attn", "mlp.gate", "lm_head"]  # as AWQ names parts of modules; FP8 names each
_MODULES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate")
_FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
_NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": NV, "symmetric": True}
_INT = {"type": "int", "symmetric": True, "dynamic": False}


def _int4_entry(size: int) -> dict[str, Any]:
    return compressed("pack-quantized", _INT | {"num_bits": 4, "strategy": "group", "group_size": size}, None)


def _gptq_entry(size: int) -> dict[str, Any]:
    kept = {r"-:.*self_attn.*": {}, r"-:.*mlp\.gate$": {}}
    return {"quant_method": "gptq", "bits": 4, "group_size": size, "sym": True, "desc_act": False, "dynamic": kept}


def _awq_entry(size: int) -> dict[str, Any]:
    entry = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}
    return entry | {"modules_to_not_convert": UNQUANTISED}


@dataclass(frozen=True)
class Scheme:
    """Quantised checkpoints.

    Attributes:
        family: of the model.
        entry: its ``quantization_config``.
        projection: how a projection of an expert is written; None: as GPT-OSS's.
        whole: attention and dense layers are quantised, too, but for routers and the head.
    """

    family: str
    entry: dict[str, Any]
    projection: Write | None
    whole: bool = False


_MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn", "router", "lm_head"]}
SCHEMES = {
    "fp8": Scheme(
        "qwen3_moe",
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": ["lm_head", *(f"model.layers.{n}.{name}" for n in range(3) for name in _MODULES)],
        },
        partial(fp8_blocks, scale_name="weight_scale_inv"),
    ),
    "fp8, compressed": Scheme(
        "qwen3_moe",
        compressed(
            "float-quantized",
            _FP8 | {"strategy": "block", "block_structure": [BLOCK, BLOCK], "dynamic": False},
            _FP8 | {"strategy": "group", "group_size": BLOCK, "dynamic": True},
        ),
        partial(fp8_blocks, scale_name="weight_scale"),
    ),
    "int8": Scheme(
        "qwen3_moe",
        compressed(
            "int-quantized",
            _INT | {"num_bits": 8, "strategy": "channel"},
            {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True},
        ),
        int8_channels,
    ),
    "int4 by 64": Scheme("qwen3_moe", _int4_entry(64), partial(int4_groups, size=64)),
    "int4 by 128": Scheme("qwen3_moe", _int4_entry(128), partial(int4_groups, size=128)),
    "gptq by 32": Scheme("qwen3_moe", _gptq_entry(32), partial(gptq, size=32)),
    "gptq by 128": Scheme("qwen3_moe", _gptq_entry(128), partial(gptq, size=128)),
    "awq by 32": Scheme("qwen3_moe", _awq_entry(32), partial(awq, size=32)),
    "awq by 128": Scheme("qwen3_moe", _awq_entry(128), partial(awq, size=128)),
    "mxfp4": Scheme(
        "gpt_oss", {"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn", "router", "lm_head"]}, None
    ),
}

# Those that vLLM has no kernel for on any CPU.
ONLY_OURS = {
    "fp8 by channel": Scheme(
        "qwen3_moe",
        compressed(
            "float-quantized",
            _FP8 | {"strategy": "channel", "dynamic": False},
            _FP8 | {"strategy": "token", "dynamic": True},
        ),
        fp8_channels,
    ),
    "int4 by 32": Scheme("qwen3_moe", _int4_entry(32), partial(int4_groups, size=32)),
    "nvfp4": Scheme(
        "qwen3_moe",
        compressed("nvfp4-pack-quantized", _NVFP4, _NVFP4 | {"dynamic": "local"}),
        nvfp4,
    ),
}

_WHOLE_FP8 = SCHEMES["fp8"].entry | {
    "modules_to_not_convert": ["lm_head", *(f"model.layers.{n}.mlp.gate" for n in range(3))]
}
# Whole checkpoints, as they are published in FP8 (Qwen3, DeepSeek), GPTQ and AWQ; in the others experts alone are
# quantised.
WHOLE = {
    "fp8, whole": Scheme("qwen3_moe", _WHOLE_FP8, SCHEMES["fp8"].projection, True),
    "fp8, whole, latent attention": Scheme("deepseek_v2", _WHOLE_FP8, SCHEMES["fp8"].projection, True),
    "gptq, whole": Scheme(
        "qwen3_moe", _gptq_entry(128) | {"dynamic": {r"-:.*mlp\.gate$": {}}}, partial(gptq, size=128), True
    ),
    "awq, whole": Scheme(
        "qwen3_moe", _awq_entry(128) | {"modules_to_not_convert": ["mlp.gate", "lm_head"]}, partial(awq, size=128), True
    ),
}


def meant(scheme: Scheme, weight: Tensor, parts: dict[str, Tensor]) -> Tensor:
    """The weight [N, K] that ``parts``, which were made of ``weight``, mean: float32."""
    if "qweight" in parts:
        size, zeros = scheme.entry["group_size"], scheme.entry["quant_method"] == "awq"
        codes, scale, zero = grouped(weight, size, zeros)
        return ((codes.unflatten(1, (-1, size)) - zero[..., None]) * scale[..., None]).flatten(1)
    if "weight_global_scale" in parts:
        packed, table = parts["weight_packed"], torch.tensor(E2M1 + [-value for value in E2M1])
        values = table[torch.stack([packed & 15, packed >> 4], -1).flatten(1).long()]
        scale = parts["weight_scale"].float() * (1 / parts["weight_global_scale"])
        return (values.unflatten(1, (-1, NV)) * scale[..., None]).flatten(1)
    return read_back(parts)


def read_back(parts: dict[str, Tensor]) -> Tensor:
    """The weight [N, K] that ``parts`` of FP8, INT8 or compressed-tensors' INT4 mean: float32."""
    (scale,) = (part.float() for name, part in parts.items() if "scale" in name)
    if "weight_packed" in parts:
        shifts = 4 * torch.arange(8)
        codes = ((parts["weight_packed"].long()[..., None] >> shifts) & 15).flatten(1).float() - 8
    else:
        codes = parts["weight"].float()
    rows, columns = codes.shape
    for dim, size in ((0, rows), (1, columns)):
        scale = scale.repeat_interleave(-(-size // scale.shape[dim]), dim).narrow(dim, 0, size)
    return codes * scale


def read_back_mxfp4(codes: Tensor, exponents: Tensor) -> Tensor:
    """What codes [..., K / 32, 16] and exponents [..., K / 32] mean: [..., K], which bfloat16 has all of."""
    table = torch.tensor(E2M1 + [-value for value in E2M1])
    values = table[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()]
    return (values * torch.exp2(exponents.float() - 127)[..., None]).flatten(-2)


def write(scheme: str, folder: Path, dequantised: torch.dtype | None = None) -> Path:
    """Writes the checkpoint of ``scheme`` into ``folder``, which it returns.

    ``dequantised``: with the weights that its codes mean, rounded to this dtype once.
    """
    import zoo

    made_of = (SCHEMES | ONLY_OURS | WHOLE)[scheme]
    projection = made_of.projection
    torch.manual_seed(0)
    model = zoo.FAMILIES[made_of.family](hidden_size=HIDDEN, **_SIZES[made_of.family]).to(torch.bfloat16)
    zoo.prepare(model)
    model.save_pretrained(folder)
    found = load_file(folder / "model.safetensors")
    rounded = {name for name in found if _is_expert(name) or (made_of.whole and _is_linear(name))}
    made = {name: tensor for name, tensor in found.items() if name not in rounded}
    for name in rounded:
        tensor = found[name]
        if projection is None:  # GPT-OSS has inputs first
            codes = mxfp4(tensor.transpose(1, 2))
            if dequantised:
                made[name] = read_back_mxfp4(*codes).transpose(1, 2).contiguous().to(dequantised)
            else:
                made[f"{name}_blocks"], made[f"{name}_scales"] = codes
            continue
        parts = projection(tensor)
        if dequantised:
            made[name] = meant(made_of, tensor, parts).to(dequantised)
        else:
            stem = name.removesuffix("weight")
            made |= {f"{stem}{last}": part.contiguous() for last, part in parts.items()}
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    if not dequantised:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": made_of.entry}))
    return folder


def add_fp8_attention(folder: Path) -> Path:
    """Rounds attention to FP8 by channel, in a config of compressed-tensors; experts stay as they are."""
    weights, path = folder / "model.safetensors", folder / "config.json"
    made, config = load_file(weights), json.loads(path.read_text())
    for name in [each for each in made if "self_attn" in each and _is_linear(each)]:
        parts = fp8_channels(made.pop(name))
        made |= {f"{name.removesuffix('weight')}{last}": part.contiguous() for last, part in parts.items()}
    save_file(made, weights, metadata={"format": "pt"})
    rows, columns = _FP8 | {"strategy": "token", "dynamic": True}, _FP8 | {"strategy": "channel", "dynamic": False}
    entry = compressed("float-quantized", columns, rows)
    entry["config_groups"]["group_0"]["targets"] = ["re:.*self_attn.*"]
    if (experts := config.get("quantization_config")) is not None:
        entry["format"] = "mixed-precision"
        entry["config_groups"]["group_0"]["format"] = "float-quantized"
        own = {"targets": ["re:.*mlp.experts.*"], "format": experts["format"]}
        entry["config_groups"]["group_1"] = experts["config_groups"]["group_0"] | own
    entry["ignore"] = ["re:.*mlp.gate$", "lm_head", *([] if experts else ["re:.*mlp.experts.*"])]
    path.write_text(json.dumps(config | {"quantization_config": entry}))
    return folder


def _is_expert(name: str) -> bool:
    return ".experts." in name and name.endswith((".weight", "gate_up_proj", "down_proj"))


def _is_linear(name: str) -> bool:
    return name.endswith("_proj.weight") or "_proj_with_mqa" in name or "_a_proj" in name


# What kernels for quantised experts need, beside what ``zoo`` has: sizes that are multiples of a block.
_SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_hidden_layers": 3, "head_dim": 64, "moe_intermediate_size": INNER},
    # Its inner size is no multiple of 128, as published ones' is none.
    "gpt_oss": {"intermediate_size": 192, "num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K},
    "deepseek_v2": {"moe_intermediate_size": INNER, "n_shared_experts": 1},
}


# --- engines ----------------------------------------------------------------------------------------------------------


ONE_THREAD = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


def runs(model: Path, configurations: list[dict | None], allowed: bool = True, **options: Any) -> list[Any]:
    """What engines say in a process of their own, one after the other; None is stock vLLM.

    Not ``allowed``: vLLM selects its kernels as on this CPU, and serves quantised checkpoints in float32. Ranks have a
    thread each.
    """
    import engines
    import forked

    asked = json.dumps({"model": str(model), "configurations": configurations, "options": options, "allowed": allowed})
    return [engines.Run(**each) for each in forked.answer(forked.run([__file__, asked], _changes(options)))]


def logprobs(model: Path, configurations: list[dict | None], allowed: bool = True, **options: Any) -> list[list[list]]:
    """As ``runs``: the log-probabilities of each prompt's tokens and of the five best at each answer's places."""
    import forked

    asked = json.dumps(
        {
            "model": str(model),
            "configurations": configurations,
            "options": options,
            "allowed": allowed,
            "logprobs": True,
        }
    )
    return forked.answer(forked.run([__file__, asked], _changes(options)))


def _changes(options: dict[str, Any]) -> dict[str, str] | None:
    return ONE_THREAD if "tensor_parallel_size" in options else None


def _logprobs(model: str, spac: dict | None, options: dict[str, Any]) -> list[list]:
    import engines
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, detokenize=False, logprobs=5, prompt_logprobs=0
    )
    with engines.engine(model, spac, **options) as llm:
        requests = [{"prompt_token_ids": prompt} for prompt in engines.PROMPTS]
        outputs = llm.generate(requests, sampling, use_tqdm=False)
    places = [[*(output.prompt_logprobs or [])[1:], *output.outputs[0].logprobs] for output in outputs]
    return [[sorted((token, one.logprob) for token, one in place.items()) for place in each] for each in places]


def main(asked: dict[str, Any]) -> list:
    import engines

    (allow if asked["allowed"] else allow_float32)()
    if asked.get("logprobs"):
        return [_logprobs(asked["model"], spac, asked["options"]) for spac in asked["configurations"]]
    return [asdict(engines.run(asked["model"], spac, **asked["options"])) for spac in asked["configurations"]]


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
elif __name__ == "__mp_main__":  # a rank of an engine, which begins with vLLM as it is
    (allow if json.loads(sys.argv[1])["allowed"] else allow_float32)()
