"""Writes a quantised copy of a checkpoint, one file after the other.

Weights are rounded to the nearest code, without calibration: INT8 with a scale for each row and INT4 with one for each
group of columns, in the layout of compressed-tensors; FP8 with one for each block of 128 x 128, in the layout of
Qwen's and DeepSeek's own checkpoints. ``config.json`` is written last: a folder without it is an unfinished copy, which
the same call completes.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vllm_spac.errors import StoreError, UnsupportedError
from vllm_spac.storage.checkpoint import quant_config
from vllm_spac.storage.checkpoint.headers import entries, read_config, shards
from vllm_spac.system.files import remove_leftovers, replacing, write_text
from vllm_spac.system.untrusted import parse_json, read_text

_EXPERT = re.compile(r".*\.experts\.\d+\.\w+\.weight")
_NEVER = re.compile(r"(.*\.)?(lm_head|embed_tokens|gate|router|shared_expert_gate)\.weight")
_BESIDE = {".json", ".txt", ".model", ".jinja", ".md"}
_FLOATS = {"BF16", "F16", "F32"}
BLOCK = 128  # of FP8, in both directions
GROUPS = 128, 64, 32  # of INT4, which vLLM's kernels and ours read
_INDEX, _MARK, _CONFIG = "model.safetensors.index.json", "quantise.json", "config.json"


@dataclass(frozen=True)
class Rounding:
    """What becomes of which weights.

    Attributes:
        codes: fp8 by block, int8 by row, or int4 by group.
        group: columns that share a scale, of int4; None: the largest of ``GROUPS`` that divides the columns.
        linears: ``experts``: the routed experts' only; ``all``: of every linear layer but routers and the output.
    """

    codes: Literal["fp8", "int8", "int4"]
    group: int | None = 128
    linears: Literal["experts", "all"] = "experts"

    def takes(self, name: str, entry: Mapping) -> bool:
        """Returns whether the tensor with this header entry is rounded."""
        if len(entry["shape"]) != 2 or entry["dtype"] not in _FLOATS or not name.endswith(".weight"):
            return False
        return bool(_EXPERT.fullmatch(name)) or (self.linears == "all" and not _NEVER.fullmatch(name))

    def tensors(self, weight: Tensor) -> dict[str, Tensor]:
        """Returns what a weight [N, K] becomes, by the last parts of names."""
        if self.codes == "fp8":
            return fp8(weight)
        if self.codes == "int8":
            return int8(weight)
        assert self.group is not None
        return int4(weight, self.group)

    def entry(self, kept: list[str]) -> dict:
        """Returns the ``quantization_config``; ``kept``: modules whose weights stay as they are."""
        if self.codes == "fp8":
            facts = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
            return facts | {"weight_block_size": [BLOCK, BLOCK], "modules_to_not_convert": kept}
        weights = {"type": "int", "symmetric": True, "dynamic": False}
        rows = None
        if self.codes == "int8":
            weights |= {"num_bits": 8, "strategy": "channel"}
            rows = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
        else:
            weights |= {"num_bits": 4, "strategy": "group", "group_size": self.group}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": rows, "output_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": "int-quantized" if self.codes == "int8" else "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": kept,
        }


def fp8(weight: Tensor) -> dict[str, Tensor]:
    """Rounds [N, K] to FP8: ``weight`` e4m3 [N, K], ``weight_scale_inv`` float32 [N / 128, K / 128]."""
    tiles = weight.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [N / 128, 128, K / 128, 128]
    greatest = tiles.abs().amax((1, 3))
    scale = torch.where(greatest == 0, 1.0, greatest / torch.finfo(torch.float8_e4m3fn).max)
    codes = (tiles / scale[:, None, :, None]).flatten(2).flatten(0, 1)
    return {"weight": codes.to(torch.float8_e4m3fn), "weight_scale_inv": scale}


def int8(weight: Tensor) -> dict[str, Tensor]:
    """Rounds [N, K] to INT8: ``weight`` [N, K] and ``weight_scale`` [N, 1] float32, the greatest of a row is 127."""
    wide = weight.float()
    scale = _steps(wide, 127)
    return {"weight": (wide / scale).round().to(torch.int8), "weight_scale": scale}


def int4(weight: Tensor, group: int) -> dict[str, Tensor]:
    """Rounds [N, K] to INT4: ``weight_packed`` int32 [N, K / 8], ``weight_scale`` [N, K / group], ``weight_shape``.

    The range -8 ... 7 is used as compressed-tensors does: 7.5 steps to the greatest of a group, clamped.
    """
    wide = weight.float().unflatten(1, (-1, group))
    scale = _steps(wide, 7.5).to(weight.dtype)
    codes = (wide / scale.float()).round().clamp(-8, 7).flatten(1).to(torch.int64) + 8
    words = (codes.unflatten(1, (-1, 8)) << (4 * torch.arange(8))).sum(-1)
    packed = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    return {"weight_packed": packed, "weight_scale": scale.squeeze(2), "weight_shape": torch.tensor(weight.shape)}


def _steps(wide: Tensor, count: float) -> Tensor:
    """The size of a step, where ``count`` reach the greatest of the last dimension; 1 where all are zero."""
    greatest = wide.abs().amax(-1, keepdim=True)
    return torch.where(greatest == 0, 1.0, greatest / count)


def _group(rounding: Rounding, columns: Mapping[int, str]) -> int:
    """Returns the group of INT4.

    Args:
        columns: numbers of columns that weights have -> one of these weights.

    Raises:
        UnsupportedError: a weight has no multiple of these columns, or of any of ``GROUPS``.
    """
    fits = next((group for group in GROUPS if not any(count % group for count in columns)), None)
    group = fits if rounding.group is None else rounding.group
    step = math.lcm(group or GROUPS[-1], 8)  # a word has 8
    odd = next((count for count in columns if count % step), None)
    if odd is not None:
        way = "--format int8" if fits is None else f"--group {fits}"
        raise UnsupportedError(f"{columns[odd]} has {odd} columns, no multiple of {step}; use {way}")
    assert group is not None
    return group


class Copy:
    """A quantised copy that is to be written.

    Args:
        source: folder of an unquantised checkpoint.
        target: folder of the copy; empty, or an unfinished copy of the same.

    Attributes:
        files: name and bytes of each file that is to be read.
        rounding: with the group that was chosen.

    Raises:
        UnsupportedError: the source cannot be quantised so.
        StoreError: the target holds something else.
    """

    def __init__(self, source: Path, target: Path, rounding: Rounding) -> None:
        self._source, self._target = source, target
        self._config = read_config(source / _CONFIG)
        if quant_config.of(self._config) is not None:
            raise UnsupportedError(f"{source} is quantised already; name the checkpoint that it was made of")
        self._paths = shards(source)
        self._headers = {path.name: entries(path) for path in self._paths}
        all_entries = [(name, entry) for header in self._headers.values() for name, entry in header.items()]
        taken = [(name, entry) for name, entry in all_entries if rounding.takes(name, entry)]
        if not any(_EXPERT.fullmatch(name) for name, _ in taken):
            raise UnsupportedError(
                f"{source} has no experts in tensors of their own (experts.0.up_proj.weight, ...) in 16 or 32 bits"
            )
        columns = {entry["shape"][1]: name for name, entry in taken}
        self.rounding = rounding if rounding.codes != "int4" else replace(rounding, group=_group(rounding, columns))
        partial = next((name for name, entry in taken if any(size % BLOCK for size in entry["shape"])), None)
        if rounding.codes == "fp8" and partial is not None:
            raise UnsupportedError(f"{partial} is no multiple of {BLOCK} x {BLOCK}; use --format int8")
        taken_names = {name for name, _ in taken}
        self._kept = sorted(
            name.removesuffix(".weight")
            for name, entry in all_entries
            if name.endswith(".weight") and len(entry["shape"]) == 2 and name not in taken_names
        )
        facts = {path.name: path.stat() for path in self._paths}
        self.files = {name: found.st_size for name, found in facts.items()}
        self._times = {name: found.st_mtime_ns for name, found in facts.items()}

    def write(self) -> Iterator[tuple[str, int]]:
        """Writes the copy; yields the name and size of each source file when it is done, also if it was before."""
        self._begin()
        weights: dict[str, str] = {}
        total = 0
        for path in self._paths:
            target = self._target / path.name
            if not target.exists():
                tensors = dict(self._converted(path))
                try:
                    with replacing(target, by_name=True) as partial:
                        save_file(tensors, partial, metadata={"format": "pt"})
                except SafetensorError as error:  # of a full disk, too
                    raise StoreError(
                        f"{target} cannot be written: {error}; the same command goes on from here"
                    ) from error
            header = entries(target)
            weights |= dict.fromkeys(header, path.name)
            total += sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in header.values())
            yield path.name, self.files[path.name]
        self._put_all({"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))})

    def _put_all(self, index: dict) -> None:
        """Completes the copy: what is beside the weights, ``config.json`` last."""
        self._put(_INDEX, index)
        for path in sorted(self._source.iterdir()):  # tokenizer, generation, chat template
            if path.is_file() and path.suffix in _BESIDE and path.name not in (_INDEX, _CONFIG):
                shutil.copyfile(path, self._target / path.name)
        self._put(_CONFIG, self._config | {"quantization_config": self.rounding.entry(self._kept)})
        (self._target / _MARK).unlink()

    def _begin(self) -> None:
        """Makes the folder and says in it what it will hold."""
        mark = self._target / _MARK
        facts = {"source": str(self._source.resolve()), **asdict(self.rounding)}
        files = {name: [size, self._times[name]] for name, size in self.files.items()}
        self._target.mkdir(parents=True, exist_ok=True)
        if any(self._target.iterdir()):
            try:
                found = parse_json(read_text(mark))
            except (OSError, ValueError):
                found = None
            begun = found.pop("files", None) if isinstance(found, dict) else None
            if found != facts:
                raise StoreError(f"{self._target} holds something else; name a new folder with --output")
            if begun != files:
                raise StoreError(
                    f"the weights in {self._source} are not those that {self._target} was begun with; delete that "
                    "folder, or name a new one with --output"
                )
        for name in (*self.files, _INDEX, _CONFIG, _MARK):
            remove_leftovers(self._target / name)
        self._put(_MARK, facts | {"files": files})

    def _converted(self, path: Path) -> Iterator[tuple[str, Tensor]]:
        header = self._headers[path.name]
        with safe_open(path, framework="pt") as file:
            for name in header:
                tensor = file.get_tensor(name)
                if not self.rounding.takes(name, header[name]):
                    yield name, tensor
                    continue
                for last, part in self.rounding.tensors(tensor).items():
                    yield f"{name.removesuffix('weight')}{last}", part

    def _put(self, name: str, content: dict) -> None:
        write_text(self._target / name, json.dumps(content, indent=1))
