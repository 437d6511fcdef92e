"""Reads the quantisation of a checkpoint out of its ``config.json``: methods, groups of layers, which are left out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

# Where multimodal models describe their language model, and what vLLM calls the quantisation in either place.
INNER_CONFIGS = ("text_config", "language_config", "llm_config", "ffn_config")
QUANTISED = ("quantization_config", "compression_config", "quant_config")

MXFP4 = "mxfp4"  # of GPT-OSS
GPTQ_LIKE = ("gptq", "awq")
NVFP4 = ("NVFP4", "W4A16_NVFP4")  # of ModelOpt
NV_GROUP, MX_GROUP = 16, 32
_EXPERTS = ".experts"  # after the name of a layer's MLP


def parts(config: Mapping) -> Iterator[Mapping]:
    """Yields the config itself, then its nested model configs."""
    yield config
    for name in INNER_CONFIGS:
        if isinstance(config.get(name), Mapping):
            yield config[name]


def of(config: Mapping) -> Mapping | None:
    """Returns the quantisation that a checkpoint's ``config.json`` names, or None."""
    entry = next((part[name] for part in parts(config) for name in QUANTISED if part.get(name)), None)
    if entry is not None and not isinstance(entry, Mapping):
        return {"quant_method": entry}
    inner = mapping(mapping(entry).get("quantization"))
    if "quant_algo" in inner:  # ModelOpt's own file, hf_quant_config.json
        return {"quant_method": "modelopt", **inner, "ignore": inner.get("exclude_modules") or []}
    return entry


def mapping(value: object) -> Mapping:
    """Returns ``value`` if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def method(quantisation: Mapping) -> str:
    """Returns the name of the quantisation method; vLLM renames that of GPT-OSS when it makes its own config."""
    name = str(quantisation.get("quant_method", "unnamed method"))
    return MXFP4 if name == "gpt_oss_mxfp4" else name


def groups(quantisation: Mapping) -> list[Mapping]:
    """Returns the groups of layers that compressed-tensors quantises alike."""
    return list(map(mapping, mapping(quantisation.get("config_groups")).values()))


def group_is_fp8(group: Mapping) -> bool:
    kinds = [mapping(group.get(name)) for name in ("weights", "input_activations")]
    return all((kind.get("type"), kind.get("num_bits")) == ("float", 8) for kind in kinds)


def group_is_int8(group: Mapping) -> bool:
    """Whether weights are INT8 by channel, multiplied by INT8 rows."""
    weights, activations = mapping(group.get("weights")), mapping(group.get("input_activations"))
    kinds = [(kind.get("type"), kind.get("num_bits"), kind.get("strategy")) for kind in (weights, activations)]
    return kinds == [("int", 8, "channel"), ("int", 8, "token")]


def group_is_nvfp4(group: Mapping) -> bool:
    """Whether weights are in NVFP4; activations may be quantised, too."""
    weights = mapping(group.get("weights"))
    given = (weights.get("type"), weights.get("num_bits"), weights.get("strategy"), weights.get("group_size"))
    return given == ("float", 4, "tensor_group", NV_GROUP)


def has_zero_points(quantisation: Mapping) -> bool:
    if method(quantisation) in GPTQ_LIKE:
        return bool(quantisation.get("zero_point")) if method(quantisation) == "awq" else not quantisation.get("sym")
    return any(mapping(group.get("weights")).get("symmetric") is False for group in groups(quantisation))


def spares_experts(quantisation: Mapping, layers: int) -> bool:
    """Returns whether the experts of no layer are quantised."""
    return all(excluded(quantisation, f"model.layers.{layer}.mlp.experts.0.gate_proj") for layer in range(layers))


def excluded(quantisation: Mapping, name: str) -> bool:
    """Returns whether the module ``name`` stays unquantised."""
    if method(quantisation) == MXFP4 and ("experts" not in name or name.endswith("bias")):
        return True
    names = [*(quantisation.get("modules_to_not_convert") or ()), *(quantisation.get("ignore") or ())]
    return any(_matches(entry, name) for entry in map(str, ("lm_head", "embed_tokens", *names)))


def _matches(entry: str, name: str) -> bool:
    """Whether a module that is left out names ``name``: compressed-tensors' pattern, ModelOpt's wildcard, or a part.

    The experts of a layer are one module in vLLM: ``gate`` is no part of them, though ``gate_proj`` is one of theirs.
    """
    if entry.startswith("re:"):
        return bool(re.match(entry[3:], name))
    if "*" in entry:
        return fnmatchcase(name, entry)
    before, experts, _ = name.partition(_EXPERTS)
    return entry in (name if _EXPERTS in entry else before + experts)
