"""Reads a checkpoint's config.json and the headers of its safetensors files, but no weights.

Of quantised experts, the headers tell whether they have the scales that their ``quantization_config`` promises.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from vllm_spac.errors import UnsupportedError, brief
from vllm_spac.storage.checkpoint import quant_config, quantisation
from vllm_spac.system.untrusted import open_file, parse_json, read_header, read_text

# Model families use different names for the same fact; the first name that a config has counts.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts")
LAYERS = ("num_hidden_layers", "n_layers", "num_layers")
INNER = (
    "moe_intermediate_size",
    "expert_intermediate_size",
    "moe_ffn_hidden_size",
    "expert_ffn_hidden_size",
    "intermediate_size",
    "ffn_dim",
)

_INSTEAD = "name a folder with config.json and *.safetensors, or a model of the Hugging Face hub"


CONFIG, QUANTISED_BESIDE = "config.json", "hf_quant_config.json"  # the second of older ModelOpt
INDEX = "model.safetensors.index.json"
_MOST_INDEX = 100_000_000  # bytes
_MOST_TOTAL = 1 << 50  # bytes of a checkpoint
_EXPERT = re.compile(r".*?\b(?:layers?|blocks|h)\.(?P<index>\d{1,6})\..*?\bexperts\.(?:(?P<expert>\d{1,6})\.)?")
_TABLE = re.compile(r".*\.(?:ple_embedding\.ngram_embedding|engram\.embed\w*)\.")  # Qwen4-Exp, DeepSeek V4.1
_MOST = 1 << 20  # experts or layers that a config may claim


@dataclass(frozen=True)
class Checkpoint:
    """The experts of a checkpoint, according to its files."""

    name: str
    experts: int
    top_k: int
    layer_bytes: dict[int, int]  # bytes of all experts of each MoE layer, in the order of the layers
    other_bytes: int  # bytes of everything else
    # bytes of the layers after the target's last one, which only a draft of the same checkpoint uses
    draft_bytes: int = 0
    draft_layer_bytes: dict[int, int] = field(default_factory=dict)  # those of experts among them, by layer
    dtypes: frozenset[str] = field(default_factory=frozenset)  # element types of the experts
    quantisation: Mapping | None = None
    fp8_beside: str = ""  # the first tensor in e4m3 that is no expert's; empty: none
    table_bytes: int = 0  # bytes of n-gram tables, which vLLM reads in pinned host memory (--engram-config)

    @property
    def expert_bytes(self) -> list[int]:
        """The distinct sizes of one expert in bytes, ascending."""
        return sorted({count // self.experts for count in self.layer_bytes.values()})

    @property
    def total(self) -> int:
        return self.experts * len(self.layer_bytes)

    def slots(self, percent: int) -> list[tuple[int, int]]:
        """Returns (slots, bytes of an expert) per shape at ``--spac-slots percent%``, computed as the plugin does."""
        return [(-(-percent * total // 100), size) for size, total in self._shapes()]

    def slots_of_tokens(self, tokens: int) -> list[tuple[int, int]]:
        """Returns the same at ``--spac-slots {tokens}k``: for as many tokens as need no expert in common."""
        return [(min(total, tokens * self.top_k), size) for size, total in self._shapes()]

    def _shapes(self) -> list[tuple[int, int]]:
        """Bytes of an expert of each shape, and the number of such experts."""
        layers_of = Counter(count // self.experts for count in self.layer_bytes.values())
        return [(size, layers * self.experts) for size, layers in layers_of.items()]

    def smallest_percent(self) -> int:
        """Returns the smallest whole percentage that leaves each shape enough slots for one token."""
        return next(p for p in range(1, 101) if all(count >= self.top_k for count, _ in self.slots(p)))


def find_folder(model: str) -> Path:
    """Returns the folder of ``model``: itself, or its snapshot in the Hugging Face cache.

    Raises:
        UnsupportedError: it is neither.
    """
    if os.path.isdir(model):
        return Path(model)
    if is_hub_name(model):
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        try:
            return Path(snapshot_download(model, local_files_only=True))
        except (LocalEntryNotFoundError, HFValidationError) as error:
            raise UnsupportedError(
                f"{model} is neither a folder nor in the Hugging Face cache; run: hf download {model}"
            ) from error
    raise UnsupportedError(no_folder(model))


def is_hub_name(model: str) -> bool:
    """Whether ``model`` is a name on the Hugging Face hub, and no path; ``./model`` is a path, there or not."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model) is not None and not os.path.exists(model)


def no_checkpoint(model: str) -> str:
    """Returns what ``model`` is and what to name instead; empty if it may be a checkpoint, or is not there."""
    path = Path(model)
    if path.suffix.lower() == ".gguf" or (os.path.isfile(model) and _begins_as_gguf(path)):
        return f"{model} is a GGUF file, which is not read; {_INSTEAD}"
    if not os.path.isdir(model) or (path / "config.json").exists() or (path / "params.json").exists():
        return ""
    if any(path.glob("*.gguf")):
        return f"{model} is a folder of GGUF files, which are not read; {_INSTEAD}"
    return f"{model} is a folder without config.json; download the checkpoint completely, or {_INSTEAD}"


def _begins_as_gguf(path: Path) -> bool:
    try:
        with open_file(path) as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def no_folder(model: str) -> str:
    """Returns what ``model``, which is no folder, is instead, and what to name."""
    if problem := no_checkpoint(model):
        return problem
    if os.path.lexists(model):
        return f"{model} is not a folder but a file; {_INSTEAD}"
    return f"{model} is not a folder on this machine; check the path, or name a model as the hub does: OWNER/NAME"


def check_kind(path: Path) -> None:
    """Refuses what is no ``config.json``: a GGUF file, or one that a folder lacks.

    Raises:
        UnsupportedError: it says what is there instead, and what to name.
    """
    if problem := no_checkpoint(str(path)):
        raise UnsupportedError(problem)
    if not os.path.lexists(path):
        raise UnsupportedError(no_folder(str(path.parent)))


def read_checkpoint(folder: Path, kernels: quantisation.FormatKernels | None = None) -> Checkpoint:
    """Reads the checkpoint in ``folder``; ``kernels``: of quantised experts, as in ``quantisation.kept_bytes``.

    Raises:
        UnsupportedError: there is no such checkpoint, or it has no experts.
    """
    return count(read_config(folder / "config.json"), folder, _tensors(folder), kernels)


def count(
    config: dict, folder: Path, tensors: Iterable[tuple[str, dict]], kernels: quantisation.FormatKernels | None = None
) -> Checkpoint:
    """Adds up the experts and everything else of a checkpoint.

    Args:
        tensors: name and safetensors header entry of each.
        kernels: as in ``quantisation.kept_bytes``.

    Raises:
        UnsupportedError: there are no experts, or config and tensors contradict each other.
    """
    experts, top_k = first_number(config, EXPERTS), first_number(config, TOP_K)
    if not experts:
        raise UnsupportedError(f"{folder} is a dense model: it has no experts to keep outside; serve it without spac")
    if not top_k:
        raise UnsupportedError(f"{folder}/config.json does not say how many experts a token uses ({', '.join(TOP_K)})")
    if top_k > experts:
        raise UnsupportedError(f"{folder}/config.json says that a token uses {top_k} of {experts} experts")
    layers = first_number(config, LAYERS) or math.inf
    layer_bytes: Counter[int] = Counter()
    draft_layer_bytes: Counter[int] = Counter()
    dtypes, draft, other, named, fp8_beside, tables = set(), 0, 0, set(), "", 0
    coded: dict[str, dict] = {}
    quantised = quant_config.of(config)
    for name, entry in tensors:
        size = entry["data_offsets"][1] - entry["data_offsets"][0]
        match = _EXPERT.match(name)
        if name.startswith("mtp.") or (match and int(match["index"]) >= layers):
            draft += size
            if match:
                draft_layer_bytes[int(match["index"])] += size
        elif match:
            if quantised:
                coded[name] = entry
                size = quantisation.kept_bytes(quantised, name, entry["shape"], size, kernels)
            layer_bytes[int(match["index"])] += size
            dtypes.add(entry["dtype"])
            named.add(match["expert"])
        elif _TABLE.match(name):
            tables += size
        else:
            other += size
            fp8_beside = fp8_beside or (name if entry["dtype"] == "F8_E4M3" else "")
    if not layer_bytes:
        raise UnsupportedError(f"{folder} speaks of {experts} experts, but none of its tensors is one")
    if None not in named and len(named) != experts:
        raise UnsupportedError(f"{folder} has the tensors of {len(named)} experts, config.json says {experts}")
    if quantised:
        check_scales(quantised, coded, folder)
    return Checkpoint(
        name=str(config.get("model_type", "?")),
        experts=experts,
        top_k=top_k,
        layer_bytes=dict(sorted(layer_bytes.items())),
        other_bytes=other,
        draft_bytes=draft,
        draft_layer_bytes=dict(sorted(draft_layer_bytes.items())),
        dtypes=frozenset(dtypes),
        quantisation=quantised,
        fp8_beside=fp8_beside,
        table_bytes=tables,
    )


def read_config(path: Path) -> dict:
    """Reads a ``config.json``; raises ``UnsupportedError`` if it is none.

    The quantisation that older ModelOpt describes in a file beside it is added, as vLLM does.
    """
    check_kind(path)
    config, beside = _mapping(path), path.with_name(QUANTISED_BESIDE)
    if quant_config.of(config) is None and beside.exists():
        config[quant_config.QUANTISED[0]] = _mapping(beside)
    return config


def _mapping(path: Path) -> dict:
    try:
        found = parse_json(read_text(path), strict=False)
    except (OSError, ValueError) as error:
        raise UnsupportedError(f"{path} cannot be read: {error}; download it again") from error
    if not isinstance(found, dict):
        raise UnsupportedError(f"{path} is no mapping; download it again")
    return found


def first_value(config: dict, names: tuple[str, ...]) -> Any:
    """Returns the first of ``names`` that the config or a nested model config has; None for none."""
    found = (part[name] for part in quant_config.parts(config) for name in names if part.get(name))
    return next(found, None)


def first_number(config: dict, names: tuple[str, ...], most: int = _MOST) -> int:
    """Returns the first of ``names`` that the config or a nested model config has, of a list the largest; 0 for none.

    Raises:
        UnsupportedError: it is no number from 0 to ``most``.
    """
    value = first_value(config, names) or 0
    values = value if isinstance(value, list) else [value]
    if not all(type(number) is int and 0 <= number <= most for number in values):
        raise UnsupportedError(f"config.json says {names[0]}={brief(value)}; it must be a number up to {most}")
    return max(values)


def shards(folder: Path) -> list[Path]:
    """Returns the safetensors files of the index, or all files if there is no index, by name.

    Raises:
        UnsupportedError: there are none, or the index is damaged or names files of other folders.
    """
    return sorted(_promised(folder))


def check_shards(folder: Path) -> None:
    """Reads all headers; raises ``UnsupportedError`` for a file that is cut off, or lacks a tensor of the index."""
    for path, names in _promised(folder).items():
        if lacking := sorted(names - entries(path).keys()):
            more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
            raise UnsupportedError(f"{path} lacks {brief(lacking[0])}{more}, which {INDEX} names; download both again")


def _promised(folder: Path) -> dict[Path, set[str]]:
    """Returns the tensors that each safetensors file has according to the index; without one, of all files none."""
    index = folder / INDEX
    files: dict[Path, set[str]] = {}
    if os.path.lexists(index):
        try:
            for tensor, name in parse_json(read_text(index, _MOST_INDEX))["weight_map"].items():
                if Path(name).is_absolute() or ".." in Path(name).parts:
                    raise ValueError(f"{name} is outside of its folder")
                files.setdefault(folder / name, set()).add(tensor)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UnsupportedError(
                f"{index} is not an index of safetensors files: {error!r}; download it again"
            ) from error
    else:
        files = {path: set() for path in folder.glob("*.safetensors")}
    if not files:
        raise UnsupportedError(f"{folder} has no *.safetensors; convert the checkpoint, or download it completely")
    return files


def read_total(index: Path) -> int | None:
    """Returns the bytes of all tensors, as the index of a checkpoint says; None: it does not.

    Raises:
        UnsupportedError: it is no index.
    """
    try:
        total = parse_json(read_text(index, _MOST_INDEX)).get("metadata", {}).get("total_size")
    except (OSError, ValueError, AttributeError) as error:
        raise UnsupportedError(f"{index} is not an index of safetensors files: {error!r}") from error
    return int(total) if isinstance(total, int | float) and 0 < total < _MOST_TOTAL else None


def entries(path: Path) -> dict[str, dict]:
    """Returns the header entry of each tensor of a file; raises ``UnsupportedError`` if it is not complete."""
    try:
        return read_header(path)[1]
    except (OSError, ValueError) as error:
        raise UnsupportedError(
            f"{path} is not a complete safetensors file: {error}; download or copy it again"
        ) from error


def _tensors(folder: Path) -> Iterator[tuple[str, dict]]:
    """Yields (name, header entry) of each tensor."""
    for path in shards(folder):
        yield from entries(path).items()


_CODES = {"F8_E4M3", "I8", "U8", "I32"}  # dtypes of quantised weights
_BLOCKS = "_blocks"  # of GPT-OSS


class _Layout(NamedTuple):
    """Which scales the weights ``codes`` have."""

    codes: str
    scale: str  # the last part of their name
    # outputs, inputs: of the matrix that share a scale, 0 for all
    outputs: int
    inputs: int
    packed: int = 1  # inputs in an item of the codes, of AWQ outputs
    inputs_first: bool = False  # of codes and scales


def check_scales(quantised: Mapping, experts: Mapping[str, Mapping], where: object) -> None:
    """Compares the shapes of scales with those of their weights.

    Args:
        quantised: the ``quantization_config``; one with several groups is not checked.
        experts: header entry of each tensor of an expert, by name.

    Raises:
        UnsupportedError: a weight has no scales, or scales of another shape.
    """
    layout = _layout(quantised)
    for name, entry in experts.items():
        if entry["dtype"] not in _CODES or (found := _expected(quantised, layout, name, entry["shape"])) is None:
            continue
        scale, shape = found
        if scale not in experts:
            raise UnsupportedError(
                f"{where}: {brief(name)} has no {brief(scale)}; download or convert the checkpoint again"
            )
        if (given := list(experts[scale]["shape"])) != shape:
            raise UnsupportedError(
                f"{where}: {brief(scale)} is {given}, and {brief(name)} {list(entry['shape'])} needs {shape}; the "
                "weights do not match the quantization_config"
            )


def _expected(
    quantised: Mapping, layout: _Layout | None, name: str, shape: Sequence[int]
) -> tuple[str, list[int]] | None:
    """Returns name and shape of the scales of a weight; None for other tensors."""
    if quant_config.method(quantised) == "mxfp4":
        return (f"{name.removesuffix(_BLOCKS)}_scales", list(shape[:-1])) if name.endswith(_BLOCKS) else None
    stem, _, last = name.rpartition(".")
    if layout is None or last != layout.codes or len(shape) < 2:
        return None
    sizes = list(shape)
    if layout.inputs_first:
        sizes[-1 if quant_config.method(quantised) == "awq" else -2] *= layout.packed
        steps = layout.inputs, layout.outputs
    else:
        sizes[-1] *= layout.packed
        steps = layout.outputs, layout.inputs
    sizes[-2:] = [-(-size // step) if step else 1 for size, step in zip(sizes[-2:], steps, strict=True)]
    return f"{stem}.{layout.scale}", sizes


def _layout(quantised: Mapping) -> _Layout | None:
    """Returns how experts that can be run are laid out; None if the config does not say, or of GPT-OSS."""
    if quantisation.refusal(quantised) is not None:
        return None
    name, groups = quant_config.method(quantised), quant_config.groups(quantised)
    if name == "fp8":
        return _Layout("weight", "weight_scale_inv", *_pair(quantised.get("weight_block_size")))
    if name in ("gptq", "awq"):
        packed, group = 32 // _number(quantised.get("bits"), 4), _number(quantised.get("group_size"), 128)
        return _Layout("qweight", "scales", 1, group, packed, inputs_first=True)
    if name.startswith("modelopt") and quantisation.is_nvfp4(quantised):
        return _Layout("weight", "weight_scale", 1, 16, 2)
    if name != "compressed-tensors" or len(groups) != 1:
        return None
    weights = groups[0].get("weights") or {}
    if quantisation.is_nvfp4(quantised):
        return _Layout("weight_packed", "weight_scale", 1, 16, 2)
    if weights.get("type") == "int" and quantised.get("format") == "pack-quantized":
        packed = 32 // _number(weights.get("num_bits"), 4)
        return _Layout("weight_packed", "weight_scale", 1, _number(weights.get("group_size"), 0), packed)
    if weights.get("strategy") == "block":
        return _Layout("weight", "weight_scale", *_pair(weights.get("block_structure")))
    return _Layout("weight", "weight_scale", 1, 0) if weights.get("strategy") == "channel" else None


def _number(value: object, default: int) -> int:
    return value if isinstance(value, int) and value > 0 else default


def _pair(value: object) -> tuple[int, int]:
    """Returns the size of a block; vLLM has kernels for 128 x 128 where a config says nothing sensible."""
    first, second = value if isinstance(value, list) and len(value) == 2 else (128, 128)
    return _number(first, 128), _number(second, 128)
