"""``vllm-spac inspect``: what a checkpoint needs, from its ``config.json`` and safetensors headers alone."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_spac import quantisation
from vllm_spac.errors import UnsupportedError
from vllm_spac.memory import gib

EXAMPLES = """[bold]Examples[/]

vllm-spac inspect ./Qwen3-30B-A3B

vllm-spac inspect Qwen/Qwen3-30B-A3B   [dim]# a model in the Hugging Face cache; nothing is downloaded[/]
"""

# The families call the same facts by other names; the first one that a config has counts.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts")
LAYERS = ("num_hidden_layers", "n_layers", "num_layers")

SHARES = (10, 25, 50, 100)
_EXPERT = re.compile(r".*?\b(?:layers?|blocks|h)\.(?P<index>\d+)\..*?\bexperts\.(?:(?P<expert>\d+)\.)?")
_MAX_HEADER = 100_000_000  # the limit that the safetensors library sets itself


@dataclass(frozen=True)
class Checkpoint:
    """What the files say.

    Attributes:
        name: name of the model type.
        experts: routed experts in a layer.
        top_k: experts that one token uses.
        layer_bytes: bytes of all experts of each MoE layer, in the order of the layers.
        other_bytes: bytes of everything else.
        draft_bytes: bytes of layers after the last, which only a draft of the same checkpoint uses.
        dtypes: element types of the experts.
        quantisation: the ``quantization_config`` of a quantised checkpoint.
    """

    name: str
    experts: int
    top_k: int
    layer_bytes: dict[int, int]
    other_bytes: int
    draft_bytes: int = 0
    dtypes: frozenset[str] = field(default_factory=frozenset)
    quantisation: Mapping | None = None

    @property
    def expert_bytes(self) -> list[int]:
        """Bytes of one expert, each size that occurs once."""
        return sorted({count // self.experts for count in self.layer_bytes.values()})

    @property
    def total(self) -> int:
        return self.experts * len(self.layer_bytes)

    def slots(self, percent: int) -> list[tuple[int, int]]:
        """(slots, bytes of an expert) of each shape at ``--spac-slots percent%``, computed as the plugin does."""
        layers_of = Counter(count // self.experts for count in self.layer_bytes.values())
        return [(math.ceil(percent / 100 * (layers * self.experts)), size) for size, layers in layers_of.items()]

    def smallest_percent(self) -> int:
        """The smallest whole percentage that leaves each shape enough slots for one token."""
        return next(p for p in range(1, 101) if all(count >= self.top_k for count, _ in self.slots(p)))


def inspect(
    model: Annotated[str, typer.Argument(help="Folder of the checkpoint, or its name in the Hugging Face cache.")],
) -> None:
    """Show what a checkpoint needs and whether it can be served; reads headers only, never weights."""
    checkpoint = read_checkpoint(find_folder(model))
    console = Console()
    console.print(_facts(model, checkpoint))
    if checkpoint.quantisation and (reason := quantisation.refusal(checkpoint.quantisation)):
        raise UnsupportedError(f"{model} has {reason}")
    console.print(_needs(checkpoint))
    smallest = checkpoint.smallest_percent()
    flags = quantisation.flags(checkpoint.quantisation) if checkpoint.quantisation else ()
    options = " ".join(("--plugin spac", f"--spac-slots {max(25, smallest)}%", *flags))
    console.print(
        f"smallest --spac-slots: [bold]{smallest}%[/] (shared by all layers), or [bold]{checkpoint.top_k}[/] a layer\n"
        f"[green]supported[/]: vllm serve {escape(model)} {options}",
        highlight=False,
        soft_wrap=True,
    )


def find_folder(model: str) -> Path:
    """The folder of ``model``: itself, or its snapshot in the Hugging Face cache.

    Raises:
        UnsupportedError: it is neither.
    """
    if Path(model).is_dir():
        return Path(model)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model) and not Path(model).exists():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            return Path(snapshot_download(model, local_files_only=True))
        except LocalEntryNotFoundError as error:
            raise UnsupportedError(
                f"{model} is neither a folder nor in the Hugging Face cache; run: hf download {model}"
            ) from error
    raise UnsupportedError(f"{model} is not a folder; name a folder with config.json and *.safetensors")


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read ``folder``.

    Raises:
        UnsupportedError: there is no such checkpoint, or it has no experts.
    """
    config = _read_config(folder)
    experts, top_k = _first(config, EXPERTS), _first(config, TOP_K)
    if not experts:
        raise UnsupportedError(f"{folder} is a dense model: it has no experts to keep outside; serve it without spac")
    if not top_k:
        raise UnsupportedError(f"{folder}/config.json does not say how many experts a token uses ({', '.join(TOP_K)})")
    layers = _first(config, LAYERS) or math.inf
    layer_bytes: Counter[int] = Counter()
    dtypes, draft, other, named = set(), 0, 0, set()
    quantised = quantisation.of(config)
    for name, entry in _tensors(folder):
        size = entry["data_offsets"][1] - entry["data_offsets"][0]
        match = _EXPERT.match(name)
        if name.startswith("mtp.") or (match and int(match["index"]) >= layers):
            draft += size
        elif match:
            if quantised:
                size = quantisation.kept_bytes(quantised, name, entry["shape"], size)
            layer_bytes[int(match["index"])] += size
            dtypes.add(entry["dtype"])
            named.add(match["expert"])
        else:
            other += size
    if not layer_bytes:
        raise UnsupportedError(f"{folder} speaks of {experts} experts, but none of its tensors is one")
    if None not in named and len(named) != experts:
        raise UnsupportedError(f"{folder} has the tensors of {len(named)} experts, config.json says {experts}")
    return Checkpoint(
        name=str(config.get("model_type", "?")),
        experts=experts,
        top_k=top_k,
        layer_bytes=dict(sorted(layer_bytes.items())),
        other_bytes=other,
        draft_bytes=draft,
        dtypes=frozenset(dtypes),
        quantisation=quantised,
    )


def read_header(path: Path) -> dict:
    """The header of one safetensors file.

    Raises:
        UnsupportedError: the file is not one.
    """
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_MAX_HEADER, path.stat().st_size - 8):
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
    except (OSError, ValueError) as error:
        raise UnsupportedError(f"{path} is not a complete safetensors file: {error}") from error
    if not isinstance(header, dict):
        raise UnsupportedError(f"{path} is not a safetensors file: its header is no mapping")
    return header


def _read_config(folder: Path) -> dict:
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UnsupportedError(f"{folder}/config.json cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise UnsupportedError(f"{folder}/config.json is no mapping")
    return config


def _first(config: dict, names: tuple[str, ...]) -> int:
    found = (part[name] for part in quantisation.parts(config) for name in names if part.get(name))
    value = next(found, 0)
    return max(value) if isinstance(value, list) else int(value)


def _tensors(folder: Path) -> Iterator[tuple[str, dict]]:
    """(name, header entry) of each tensor that the checkpoint's index names, or of all files when it has none."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise UnsupportedError(f"{index} is not an index of safetensors files: {error!r}") from error
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UnsupportedError(f"{folder} has no *.safetensors; convert the checkpoint, or download it completely")
    for path in files:
        for name, entry in read_header(path).items():
            if name != "__metadata__":
                yield name, entry


def _facts(model: str, checkpoint: Checkpoint) -> Table:
    sizes, experts = checkpoint.expert_bytes, sum(checkpoint.layer_bytes.values())
    table = Table(title=escape(model), show_header=False, title_justify="left")
    rows = {
        "family": checkpoint.name,
        "MoE layers x experts": f"{len(checkpoint.layer_bytes)} x {checkpoint.experts} = {checkpoint.total}",
        "experts a token (top-k)": str(checkpoint.top_k),
        "one expert": " or ".join(gib(size) for size in sizes) + f" ({', '.join(sorted(checkpoint.dtypes))})",
        "all experts": gib(experts),
        "everything else": gib(checkpoint.other_bytes),
    }
    if checkpoint.quantisation:
        rows["quantised by"] = quantisation.method(checkpoint.quantisation) + ", and so in slots"
    elif "F32" in checkpoint.dtypes:
        rows["served as"] = "16 bits, half of these sizes, unless --dtype float32"
    if checkpoint.draft_bytes:
        rows["draft layers (not served)"] = gib(checkpoint.draft_bytes)
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _needs(checkpoint: Checkpoint) -> Table:
    """The table of what each ``--spac-slots`` needs; KV cache and activations come on top."""
    table = Table(title="fast memory, without KV cache and activations", title_justify="left")
    for name in ("--spac-slots", "slots", "experts in fast memory", "with everything else"):
        table.add_column(name, justify="right")
    for percent in SHARES:
        shapes = checkpoint.slots(percent)
        count, size = sum(n for n, _ in shapes), sum(n * size for n, size in shapes)
        valid = percent >= checkpoint.smallest_percent()
        marks = (gib(size), gib(size + checkpoint.other_bytes)) if valid else ("too few for one token", "")
        table.add_row(f"{percent}%", str(count), *marks, style=None if valid else "dim")
    return table
