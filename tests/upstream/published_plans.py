"""Plans for published checkpoints, from their configs: writes ``PUBLISHED.md``.

    python tests/upstream/published_plans.py [--tensors]

``published/NAME.json`` has the ``config.json`` of a checkpoint, without tokens and the like, and where it is from. Its
``tensors`` are calculated from that by the model's class in transformers, which needs seconds for each: they are kept,
and ``--tensors`` makes them again.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

from vllm_spac.errors import ConfigError, UnsupportedError
from vllm_spac.storage.checkpoint import described, quant_config, quantisation
from vllm_spac.storage.checkpoint.published import NamedModel
from vllm_spac.storage.checkpoint.quantisation import Capability
from vllm_spac.system.files import replacing
from vllm_spac.tools.planning.planned_machine import PlannedMachine
from vllm_spac.tools.planning.planned_memory import Choice, Load, command
from vllm_spac.tools.planning.planned_model import ServedModel
from vllm_spac.tools.planning.planned_serving import choices, with_tables

HERE = Path(__file__).parent
FOLDER, DOCUMENT = HERE / "published", HERE / "PUBLISHED.md"
CAPABILITIES: tuple[Capability, ...] = ((8, 0), (8, 6), (8, 9), (9, 0), (12, 0))
MACHINES = [(gpu, host << 30) for gpu in ("rtx3090", "rtx4090", "rtx5090") for host in (64, 128)]
LOAD = Load(context=8192, concurrency=1)
_HEAD = """# Published checkpoints

Written by `python tests/upstream/published_plans.py`. **Everything is calculated**, from the configs in `published/`,
which name their sources: no checkpoint was downloaded, and none of these was served. `tests/upstream/test_published.py`
has each command accepted by the rules of the engine's configuration.

Sizes are in GiB. *Beside* is what is no expert: it stays in GPU memory. *Tables* are of n-grams, which vLLM pins in
host memory. *Kernel*: **s** is vLLM's over slots, **p** only ours, over pointers or the table, **-** none.

The last columns are GPUs with GiB of host memory, for one request of 8,192 tokens. They have the largest
`--spac-slots`. The other experts are in host memory (*h*), or on the disk behind it (*h d*). With *all* stock vLLM
serves the model. Numbers in brackets are the sentences below. Heads for drafts are not counted: transformers does not
build them.

Of two precisions in one checkpoint, experts in NVFP4 beside attention in FP8 have been served, by a tiny one on a CPU
(`tests/parity/test_packed_on_a_cpu.py`). ModelOpt's have not, since vLLM has no kernel for their layers there.
"""


@dataclass(frozen=True)
class Facts:
    """What is known of one published checkpoint."""

    name: str
    config: dict[str, Any]
    source: str  # repository, path and commit of the config
    note: str = ""  # what the config lacks or what else is known
    billions: float | None = None  # of parameters, as published, without layers for drafts
    tensors: tuple[tuple[str, tuple[int, ...], str], ...] = ()  # name with {} for a layer, shape, and which layers

    @classmethod
    def read(cls, path: Path) -> Facts:
        content = json.loads(path.read_text(encoding="utf-8"))
        content["tensors"] = tuple((name, tuple(shape), layers) for name, shape, layers in content.get("tensors", ()))
        return cls(**content)

    @property
    def named(self) -> NamedModel:
        """The model as ``find_model`` returns it for its ``config.json``."""
        return NamedModel(self.name, self.config, Path(self.name), "config.json")

    @property
    def parameters(self) -> int:
        """Number of parameters, by the tensors."""
        return sum(math.prod(shape) * len(numbers(layers)) for _, shape, layers in self.tensors)

    @cached_property
    def entry(self) -> Any:
        return quant_config.of(self.config)

    @property
    def format(self) -> str:
        """How its experts are stored."""
        if self.entry is None:
            return "bf16"
        experts = quant_config.narrowed(self.entry, "model.layers.9.mlp.experts.gate_up_proj")
        if quantisation.is_nvfp4(experts):
            return "NVFP4"
        if "mxfp4" in f"{quant_config.method(experts)} {experts.get('format')}":
            return "MXFP4"
        if experts.get("weight_block_size") and max(experts["weight_block_size"]) > 1 << 20:
            return "FP8"  # with one scale for a matrix
        return {"fp8-block": "FP8 by block", "fp8-channel": "FP8"}.get(kind := quantisation.kind(experts), kind.upper())

    @contextmanager
    def built(self) -> Iterator[None]:
        """Sizes are calculated from the tensors, and not from a class of transformers."""

        def shapes(config: dict, folder: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
            if not self.tensors:
                raise UnsupportedError(f"{folder}: transformers has no model of type {config.get('model_type')}")
            for name, shape, layers in self.tensors:
                yield from ((name.replace("{}", number), shape) for number in numbers(layers))

        with mock.patch.object(described, "_shapes", shapes):
            yield


def numbers(layers: str) -> list[str]:
    """Returns the numbers of ``0-2,5``; of an empty text one that is empty, of what is in no layer."""
    if not layers:
        return [""]
    spans = [part.split("-") for part in layers.split(",")]
    return [str(number) for span in spans for number in range(int(span[0]), int(span[-1]) + 1)]


def spans(found: list[int]) -> str:
    """Returns the text that ``numbers`` reads."""
    parts: list[list[int]] = []
    for number in sorted(found):
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


def tensors(config: dict[str, Any], name: str) -> list[tuple[str, tuple[int, ...], str]]:
    """Returns the tensors of the model that transformers builds without memory; none where it has no such class."""
    found: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    try:
        for tensor, shape in described._shapes(config, Path(name)):
            number = re.search(r"(?<=\.)\d+(?=\.)", tensor)
            pattern = tensor if number is None else f"{tensor[: number.start()]}{{}}{tensor[number.end() :]}"
            found.setdefault((pattern, shape), []).extend([] if number is None else [int(number[0])])
    except UnsupportedError as error:
        print(f"{name}: {error}")
        return []
    return [(pattern, shape, spans(layers)) for (pattern, shape), layers in found.items()]


def read() -> list[Facts]:
    """All of them, by name."""
    return sorted(map(Facts.read, FOLDER.glob("*.json")), key=lambda facts: facts.name.lower())


def write(path: Path, content: dict[str, Any]) -> None:
    """Writes facts, with a line for each entry of the config and each tensor."""
    own = [key for key in content if key not in ("config", "tensors")]
    lines = [f"  {json.dumps(key)}: {json.dumps(content[key])}" for key in own]
    inner = ",\n".join(f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in content["config"].items())
    each = ",\n".join(f"    {json.dumps(one)}" for one in content["tensors"])
    lines += [f'  "config": {{\n{inner}\n  }}', f'  "tensors": [\n{each}\n  ]' if each else '  "tensors": []']
    with replacing(path) as partial:
        partial.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


# -- plans --


@dataclass(frozen=True)
class Planned:
    """What there is for a model on a machine: the commands of all choices, or a sentence why there is none."""

    cell: str = ""  # of the table, without the sentence
    commands: tuple[tuple[ServedModel, Choice, str], ...] = ()
    sentence: str = ""


def planned(facts: Facts, name: str, host: int) -> Planned:
    """Plans as ``vllm-spac plan`` does, but predicts no speed: each choice has its command."""
    machine = PlannedMachine.of(name, None, host)
    found: list[tuple[ServedModel, Choice, str]] = []
    problem = ""
    with facts.built():
        try:
            for model in ServedModel.ways(facts.named, on_cpu=False, capability=machine.capability):
                try:
                    held = with_tables(machine, model)
                    for choice in choices(model, held, LOAD):
                        load = Load(LOAD.context, LOAD.concurrency, choice.drafts)
                        found.append((model, choice, command(choice, model, held, load)))
                except ConfigError as error:
                    problem = problem or str(error)
        except UnsupportedError as error:
            return Planned(sentence=str(error))
    if not found:
        return Planned(sentence=problem or "no store has room for its experts; name a machine with a disk")
    where = {"disk": "d", "tiers": "h d", "host": "h", "none": "all"}  # the most of host memory last
    order = list(where)
    plain = [choice for _, choice, _ in found if not choice.drafts]
    best = max(plain, key=lambda one: (one.percent, one.tokens, order.index(one.store)))
    if best.store == "none":
        return Planned("all", tuple(found))
    return Planned(f"{best.slots.replace('%', ' %')} {where[best.store]}", tuple(found))


def kernel(facts: Facts, capability: Capability) -> str:
    """Returns what runs the experts on such a GPU: ``s`` slots, ``p`` our kernel alone, ``-`` nothing."""
    if facts.entry is None:
        return "s"
    ours = quantisation.refusal(facts.entry, quantisation.FormatKernels.OURS, capability)
    if (ours or quantisation.activation_refusal(facts.config)) is not None:
        stock = quantisation.refusal(facts.entry, quantisation.FormatKernels.GPU, capability)
        return "-" if stock is not None else "s"
    return "p" if quantisation.only_ours(facts.entry, capability) else "s"


def document(found: list[Facts]) -> str:
    """Returns the page in Markdown."""
    kernels = ", ".join(f"{major}{minor}" for major, minor in CAPABILITIES)
    gpus = " | ".join(f"{name.removeprefix('rtx')}, {host >> 30}" for name, host in MACHINES)
    lines = [_HEAD, f"| checkpoint | format | experts | GiB | beside | tables | kernel: sm_{kernels} | {gpus} |"]
    lines.append("|---" * (7 + len(MACHINES)) + "|")
    sentences: list[str] = []
    for facts in found:
        sizes, cells = _sizes(facts), []
        for name, host in MACHINES:
            plan = planned(facts, name, host)
            if plan.sentence and (text := f"{facts.name}: {plan.sentence}") not in sentences:
                sentences.append(text)
            cells.append(plan.cell or f"({1 + sentences.index(f'{facts.name}: {plan.sentence}')})")
        runs = " ".join(kernel(facts, capability) for capability in CAPABILITIES)
        lines.append(f"| `{facts.name}` | {facts.format} | {' | '.join(sizes)} | {runs} | {' | '.join(cells)} |")
    lines += ["", "## Why there is no plan", "", "```text"]
    lines += [f"({number}) {text}" for number, text in enumerate(sentences, 1)]
    return "\n".join([*lines, "```"]) + "\n"


def _sizes(facts: Facts) -> tuple[str, str, str, str]:
    with facts.built():
        try:
            sizes = facts.named.checkpoint()
        except UnsupportedError:
            return "-", "-", "-", "-"
    number = f"{len(sizes.layer_bytes)} x {sizes.experts}, top {sizes.top_k}"
    parts = (sum(sizes.layer_bytes.values()), sizes.other_bytes, sizes.table_bytes)
    return number, *(f"{part / (1 << 30):.1f}" if part else "" for part in parts)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", action="store_true", help="make the tables of tensors again, with transformers")
    if parser.parse_args().tensors:
        for path in sorted(FOLDER.glob("*.json")):
            content = json.loads(path.read_text(encoding="utf-8"))
            write(path, content | {"tensors": tensors(content["config"], content["name"])})
    with replacing(DOCUMENT) as partial:
        partial.write_text(document(read()), encoding="utf-8")


if __name__ == "__main__":
    main()
