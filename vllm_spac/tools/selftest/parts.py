"""The parts of a self-test, one after the other, on this machine."""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from vllm_spac.decisions.costs import Costs, names
from vllm_spac.errors import UnsupportedError
from vllm_spac.storage.checkpoint.headers import INNER
from vllm_spac.tools.machine.checks import CheckOutcome, Finding
from vllm_spac.tools.selftest import kernel_checks, plane_checks, tiny_model

Announce = Callable[[str], object]
_SMALL = 256, 128  # d and ff of experts where torch computes instead of kernels
_LARGEST = 4096, 2048  # of experts that kernels are tried with; larger ones are cut to that
PARTS = 4


def run(
    config: Mapping,
    *,
    engines: bool,
    seconds: float = float("inf"),
    announce: Announce = lambda text: None,
    times: dict[str, float] | None = None,
) -> Iterator[CheckOutcome]:
    """Yields what each part finds, and a note for each part that did not begin within ``seconds``.

    A part that has begun is finished.

    Args:
        config: content of a ``config.json``, whose family and whose width of experts are tried.
        engines: whether to start some, which takes most of the time.
        seconds: after the call, no part begins any more.
        announce: called with the name of each of the ``PARTS`` parts before it starts.
        times: gets the seconds that each part took, by name.
    """
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    size = sizes(config) if gpu else _SMALL
    parts: dict[str, Callable[[], Iterator[CheckOutcome]]] = {
        "kernels": lambda: kernel_checks.formats(device, *size),
        "moving experts": lambda: kernel_checks.moving_experts(device, *_SMALL),
        "the link to host memory": lambda: _link(device, size),
        "engines": lambda: _tokens(config, gpu) if engines else iter(()),
    }
    begin = time.monotonic()
    for name, part in parts.items():
        announce(name)
        if (started := time.monotonic()) - begin >= seconds:
            text = f"left out: the parts before took {started - begin:.0f} s of {seconds:.0f}"
            yield CheckOutcome(Finding(name, "note", text, "a larger --seconds runs it"))
            continue
        yield from part()
        if times is not None:
            times[name] = round(time.monotonic() - started, 1)


def _link(device: torch.device, size: tuple[int, int]) -> Iterator[CheckOutcome]:
    if device.type == "cuda":
        yield kernel_checks.link(device, *size, profile_of(torch.cuda.get_device_name()))
        torch.cuda.empty_cache()
    else:
        text = "not measured: there is no GPU"
        yield CheckOutcome(Finding("link", "note", text, "run it on the machine that serves"))


def _tokens(config: Mapping, gpu: bool) -> Iterator[CheckOutcome]:
    with tempfile.TemporaryDirectory(prefix="spac-selftest-") as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        try:
            tiny_model.write(config, folder)
        except UnsupportedError as error:
            text = f"{error}; Qwen3-MoE is tried in its place"
            yield CheckOutcome(
                Finding("tiny model", "note", text, "vllm-spac check --engines without MODEL says the same")
            )
            shutil.rmtree(folder)
            folder.mkdir()
            tiny_model.write(tiny_model.QWEN3_MOE, folder)
        else:
            yield CheckOutcome(Finding("tiny model", "ok", f"random, of type {config.get('model_type')}"))
        yield from plane_checks.compared(plane_checks.planes(gpu), plane_checks.measurer(folder, gpu))


def sizes(config: Mapping) -> tuple[int, int]:
    """Returns (d, ff) of a model's experts, multiples of 128 and no larger than ``_LARGEST``."""
    text = config.get("text_config") if isinstance(config.get("text_config"), Mapping) else config
    assert text is not None
    ff = next((value for name in INNER if isinstance(value := text.get(name), int)), _LARGEST[1])
    widths = text.get("hidden_size", _LARGEST[0]), ff
    d, ff = (max(128, min(int(size), most) // 128 * 128) for size, most in zip(widths, _LARGEST, strict=True))
    return d, ff


def profile_of(gpu: str) -> Costs | None:
    """Returns the packaged profile of a GPU by its name, such as ``NVIDIA GeForce RTX 4090``; None: there is none."""
    plain = re.sub(r"[^a-z0-9]", "", gpu.lower())
    matching = [name for name in names() if name in plain]
    return Costs.read(max(matching, key=len)) if matching else None
