"""A published model's shapes as a model to serve: ``shape:qwen3-30b-a3b@layers=24,stream=high``.

A folder with a ``config.json`` and the stream of what the routers choose. Weights are made while an engine loads
(``random_weights``), so that nothing is carried to a machine and nothing is written to its disk.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from benchmarks.common import ROOT, PlanError
from benchmarks.shapes import routing
from vllm_spac.storage.checkpoint import quant_config
from vllm_spac.storage.checkpoint.described import described
from vllm_spac.storage.checkpoint.headers import EXPERTS, INNER, LAYERS, TOP_K, Checkpoint
from vllm_spac.storage.checkpoint.published import published

PREFIX, TINY = "shape:", "tiny"
FOLDER = ROOT / ".cache" / "shapes"
MARK = "shape.json"
_LAYERS = 24  # at most, if none are asked for
_SIZES: Mapping[str, tuple[str, ...]] = {  # what may be asked for, and how configs call it
    "layers": LAYERS,
    "experts": EXPERTS,
    "top_k": TOP_K,
    "hidden": ("hidden_size",),
    "intermediate": INNER,
    "vocabulary": ("vocab_size",),
}
_TINY = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 4096,
    "max_position_embeddings": 40960,
}


def known() -> dict[str, dict[str, Any]]:
    """Returns the configs by the names that a shape may have."""
    found = {name.rpartition("/")[2].lower(): config for name, config in published().items()}
    return {TINY: _TINY} | {name: config for name, config in found.items() if _can_be_made(config)}


def _can_be_made(config: dict[str, Any]) -> bool:
    """Whether ``random_weights`` makes such weights: in bfloat16, or in FP8 with scales by block."""
    quantised = quant_config.of(config)
    return quantised is None or bool(quantised.get("weight_block_size"))


@dataclass(frozen=True)
class Shape:
    """A model of random weights.

    Attributes:
        text: how it was asked for, without the prefix.
        config: content of its ``config.json``.
        stream: of its routers, see ``routing.make``.
    """

    text: str
    config: Mapping[str, Any]
    stream: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses ``NAME`` or ``NAME@layers=24,stream=low``, with ``shape:`` in front of it or not.

        Raises:
            PlanError: the name or an argument is not known.
        """
        text = text.removeprefix(PREFIX)
        name, _, rest = text.partition("@")
        if (found := known().get(name)) is None:
            raise PlanError(f"{PREFIX}{name}: no shape has this name; use one of {', '.join(known())}")
        config, given = dict(found), dict(_arguments(text, rest))
        stream = given.pop("stream", routing.DEFAULT)
        routing.check(stream)
        layers = min(int(config["num_hidden_layers"]), _LAYERS)
        for argument, value in ({"layers": str(layers)} | given).items():
            if argument not in _SIZES:
                names = ", ".join([*_SIZES, "stream"])
                raise PlanError(f"{PREFIX}{text}: a shape has no argument {argument}; use {names}")
            if not value.isdigit() or not int(value):
                raise PlanError(f"{PREFIX}{text}: {argument}={value} is no positive number")
            config[next(key for key in _SIZES[argument] if key in config)] = int(value)
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][: config["num_hidden_layers"]]
        return cls(text, config, stream)

    def write(self, root: Path | None = None) -> Path:
        """Returns its folder in ``root``, by default ``FOLDER``; makes what is missing there.

        Raises:
            PlanError: a recorded stream does not fit the shape.
        """
        folder = (root or FOLDER) / re.sub(r"[^\w.-]+", "-", self.text)
        mark = folder / MARK
        content = json.dumps({"shape": self.text, "stream": self.stream, "config": dict(self.config)}, indent=1) + "\n"
        if not mark.is_file() or mark.read_text() != content:
            made = routing.make(self.stream, self.moe_layers, self.checkpoint.experts, self.checkpoint.top_k)
            folder.mkdir(parents=True, exist_ok=True)
            routing.save(made, folder)
            (folder / "config.json").write_text(json.dumps(dict(self.config), indent=1) + "\n")
            mark.write_text(content)  # last: with it, everything is there
        return folder

    @property
    def checkpoint(self) -> Checkpoint:
        """Its sizes, as if its weights were files."""
        return described(dict(self.config), Path(self.text))

    @property
    def moe_layers(self) -> int:
        return len(self.checkpoint.layer_bytes)

    @property
    def step_bytes(self) -> int:
        """Bytes of the weights that each step reads: without experts and embeddings, of which it reads some."""
        return self.checkpoint.other_bytes - 2 * self.config["vocab_size"] * self.config["hidden_size"]

    @property
    def context(self) -> int:
        """Tokens that a request may have."""
        return int(self.config["max_position_embeddings"])

    def kv_bytes(self, tokens: int) -> int:
        """Returns the bytes of the KV cache of so many tokens, in 16 bits and with attention in each layer."""
        config = self.config
        width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        heads = config.get("num_key_value_heads", config["num_attention_heads"])
        return tokens * 2 * 2 * config["num_hidden_layers"] * heads * width


def _arguments(text: str, rest: str) -> Iterator[tuple[str, str]]:
    for word in rest.split(",") if rest else []:
        name, equals, value = word.partition("=")
        if not equals or not name or not value:
            raise PlanError(f"{PREFIX}{text}: write NAME@argument=value, e.g. {PREFIX}{TINY}@layers=4,stream=low")
        yield name, value
