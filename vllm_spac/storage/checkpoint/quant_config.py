"""Reads the quantisation of a checkpoint out of its ``config.json``: methods, groups of layers, which are left out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache

# Where multimodal models describe their language model, and what vLLM calls the quantisation in either place.
INNER_CONFIGS = ("text_config", "language_config", "llm_config", "ffn_config")
QUANTISED = ("quantization_config", "compression_config", "quant_config")

MXFP4 = "mxfp4"  # of GPT-OSS
GPTQ_LIKE = ("gptq", "awq")
NVFP4 = ("NVFP4", "W4A16_NVFP4")  # of ModelOpt
NV_GROUP, MX_GROUP = 16, 32
COMPRESSED = "compressed-tensors"
FP8, EXPERTS_IN = "fp8", "expert_dtype"  # what DeepSeek V4 calls the format of experts within an FP8 checkpoint
MIXED = "MIXED_PRECISION"  # of ModelOpt, which then names the format of each layer
_EXPERTS = ".experts"  # after the name of a layer's MLP
_FP4_BY_DEFAULT = ("deepseek_v4", "deepseek_v41")  # types of models whose experts vLLM takes for FP4
# Embeddings, towers and projectors of images: no published checkpoint quantises them, and not all say so.
_NEVER = (
    *("lm_head", "embed_tokens", "embeddings", "visual", "vision_tower", "vision_model", "patch_embed"),
    *("mm_projector", "multi_modal_projector"),
)
_ROUTER = re.compile(r"\.(?:gate|router)(?:\.weight)?$")
_SOME_EXPERTS = [f"model.layers.{place}.mlp.experts.0.{part}_proj" for place in range(128) for part in ("gate", "down")]
_LAYERS = ("num_hidden_layers", "n_layers", "num_layers")
_BEFORE_LAYERS = re.compile(r"(?:(?:model|language_model|backbone|transformer)\.)+(?=layers\.)")  # not of MTP heads
_WHOLE = 1 << 40  # rows or columns of a block that is a whole matrix


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
        entry = {"quant_method": "modelopt", **inner, "ignore": inner.get("exclude_modules") or []}
    if layers := mapping(mapping(entry).get("quantized_layers")):
        entry = {**mapping(entry), "quantized_layers": _by_module(layers)}
    if entry is None or method(entry) not in (FP8, COMPRESSED):
        return entry
    return _with_experts(config, entry) if method(entry) == FP8 else _without_heads(config, entry)


def _by_module(layers: Mapping) -> dict[str, dict[str, str]]:
    """Returns ModelOpt's format of each module by its name from the layer on, with one entry for a layer's experts."""
    found: dict[str, dict[str, str]] = {}
    for name, entry in layers.items():
        before, experts, _ = str(name).partition(_EXPERTS)
        module, algorithm = _from_layers(before + experts), str(mapping(entry).get("quant_algo")).upper()
        known = found.setdefault(module, {"quant_algo": algorithm})["quant_algo"]
        if algorithm not in known.split("/"):
            found[module]["quant_algo"] = f"{known}/{algorithm}"
    return found


def _without_heads(config: Mapping, entry: Mapping) -> Mapping:
    """Returns the entry of compressed-tensors without groups for MTP heads, whose layers follow the model's last."""
    layers = next((part[name] for part in parts(config) for name in _LAYERS if isinstance(part.get(name), int)), 0)
    given = mapping(entry.get("config_groups"))
    head = [f"model.layers.{layers}.mlp.experts.0.{part}_proj" for part in ("gate", "down")]
    own = [name for name in _SOME_EXPERTS if int(name.split(".")[2]) < layers]
    kept = {
        name: group
        for name, group in given.items()
        if not any(_targets(mapping(group), one) for one in head) or any(_targets(mapping(group), one) for one in own)
    }
    return entry if not layers or len(kept) == len(given) else {**entry, "config_groups": kept}


def _with_experts(config: Mapping, entry: Mapping) -> Mapping:
    """Returns the entry of an FP8 checkpoint with the format of its experts, or without it if these are FP8."""
    found = [entry.get("moe_quant_algo"), entry.get(EXPERTS_IN), *(part.get(EXPERTS_IN) for part in parts(config))]
    if any(part.get("model_type") in _FP4_BY_DEFAULT for part in parts(config)):
        found.append("fp4")
    named = str(next(filter(None, found), FP8)).lower()
    plain = {name: value for name, value in entry.items() if name != EXPERTS_IN}
    return plain if named == FP8 else {**plain, EXPERTS_IN: named}


def mapping(value: object) -> Mapping:
    """Returns ``value`` if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def method(quantisation: Mapping) -> str:
    """Returns the name of the quantisation method; vLLM renames that of GPT-OSS when it makes its own config."""
    name = str(quantisation.get("quant_method", "unnamed method"))
    return MXFP4 if name == "gpt_oss_mxfp4" else name


def groups(quantisation: Mapping) -> list[Mapping]:
    """Returns the groups of layers that compressed-tensors quantises alike: those of experts, where it says which."""
    found = list(map(mapping, mapping(quantisation.get("config_groups")).values()))
    return [group for group in found if any(_targets(group, name) for name in _SOME_EXPERTS)] or found


def _targets(group: Mapping, name: str) -> bool:
    """Whether a group of compressed-tensors is for the module ``name``; any class of modules is."""
    names = group.get("targets")
    return not isinstance(names, list) or any(
        not str(target).startswith("re:") or re.match(str(target)[3:], name) for target in names
    )


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


def expert_formats(quantisation: Mapping) -> set[str]:
    """Returns the formats of routed experts that a mixed checkpoint of ModelOpt names; layers of MTP heads left out."""
    layers = mapping(quantisation.get("quantized_layers"))
    named = {name for name in layers if _EXPERTS in name and not name.startswith("mtp.")}
    return {str(mapping(layers[name]).get("quant_algo")) for name in named}


def narrowed(quantisation: Mapping, name: str) -> Mapping:
    """Returns the quantisation of the tensor ``name``, where a checkpoint mixes formats another than its own."""
    if _EXPERTS in name and (experts := str(quantisation.get(EXPERTS_IN, FP8))) != FP8:
        return {"quant_method": MXFP4} if experts == "fp4" else _of_modelopt(experts.upper())
    if not method(quantisation).startswith("modelopt"):
        return quantisation
    algorithm = str(quantisation.get("quant_algo")).upper()
    return _of_modelopt(_listed(quantisation, name) or algorithm, quantisation)


def _of_modelopt(algorithm: str, quantisation: Mapping | None = None) -> Mapping:
    """Returns what a format of ModelOpt's is to the sizes of weights; its plain FP8 has one scale."""
    if algorithm in NVFP4:
        return {"quant_method": "modelopt", "quant_algo": algorithm}
    if algorithm.startswith(("FP8", "MXFP8")):
        block = {"MXFP8": [1, MX_GROUP], "FP8_PB_WO": [128, 128]}.get(algorithm, [_WHOLE, _WHOLE])
        return {"quant_method": FP8, "weight_block_size": block}
    return quantisation or {"quant_method": "modelopt", "quant_algo": algorithm}


def _listed(quantisation: Mapping, name: str) -> str | None:
    """Returns the format of ``name`` in a mixed checkpoint of ModelOpt; None: it is in none."""
    layers, parts_of = mapping(quantisation.get("quantized_layers")), _from_layers(name).split(".")
    modules = (".".join(parts_of[:count]) for count in range(len(parts_of), 0, -1))
    found = next((layers[module] for module in modules if module in layers), None)
    return None if found is None else str(mapping(found).get("quant_algo"))


def spares_experts(quantisation: Mapping, layers: int) -> bool:
    """Returns whether the experts of no layer are quantised."""
    if mapping(quantisation.get("quantized_layers")):
        return not expert_formats(quantisation)
    return all(excluded(quantisation, f"model.layers.{layer}.mlp.experts.0.gate_proj") for layer in range(layers))


def excluded(quantisation: Mapping, name: str) -> bool:
    """Returns whether the module ``name`` stays unquantised."""
    if method(quantisation) == MXFP4 and ("experts" not in name or name.endswith("bias")):
        return True
    names = [*(quantisation.get("modules_to_not_convert") or ()), *(quantisation.get("ignore") or ())]
    if any(_matches(entry, name) for entry in map(str, (*_NEVER, *names))) or _ROUTER.search(name):
        return True
    if method(quantisation) == COMPRESSED:
        return not _is_targeted(quantisation, name)
    layers = mapping(quantisation.get("quantized_layers"))
    return bool(layers) and method(quantisation) != FP8 and _listed(quantisation, name) is None


def _is_targeted(quantisation: Mapping, name: str) -> bool:
    """Whether a group of compressed-tensors is for the tensor ``name``; transformers stacks experts, it does not."""
    module = name.removesuffix(".weight")
    if _EXPERTS in module:
        before, _, last = module.rpartition(".")
        before = before if re.search(r"\.\d+$", before) else f"{before}.0"
        module = f"{before}.{last.replace('gate_up', 'gate')}"
    given = map(mapping, mapping(quantisation.get("config_groups")).values())
    names = (module, f"model.{_from_layers(module)}")
    return any(_targets(group, each) for group in given for each in names)


def _matches(entry: str, name: str) -> bool:
    """Whether a module that is left out names ``name``: compressed-tensors' pattern, ModelOpt's wildcard, or a part.

    What is before the number of a layer is not compared: transformers has other names there than checkpoints.
    The experts of a layer are one module in vLLM: ``gate`` is no part of them, though ``gate_proj`` is one of theirs.
    """
    if entry.startswith("re:"):
        return bool(re.match(entry[3:], name))
    entry, shorter = _from_layers(entry), _from_layers(name)
    if "*" in entry:
        return fnmatchcase(name, entry) or fnmatchcase(shorter, entry)
    before, experts, _ = shorter.partition(_EXPERTS)
    return entry in (shorter if _EXPERTS in entry else before + experts)


@lru_cache(1 << 16)
def _from_layers(name: str) -> str:
    """Returns a module's name from its layer on: ``model.layers.0.mlp`` and ``backbone.layers.0.mlp`` are the same."""
    found = _BEFORE_LAYERS.match(name)
    return name[found.end() :] if found else name
