"""With the options that the plugin sets, vLLM 0.33 and 0.32 choose kernels and builds layers that the plugin can run.

Its own selection runs, see ``selection``, for each GPU, format, and with and without its optional packages.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import defaultdict
from pathlib import Path

import pytest
import selection
import wheels
from selection import CAPABILITIES, KNOBS, STOCK, Choice

from vllm_spac.integration.layers.quant_schemes import SCHEMES

_AMPERE = [(8, 0), (8, 6)]
VERSIONS = ["0.33.0", "0.32.0"]


def _unpacked(version: str) -> Path:
    """Returns a folder with vLLM's sources, which is kept: compiling them takes longer than choosing."""
    folder = wheels.CACHE / version
    if not folder.exists():
        try:
            archive = wheels.sources(version)
        except wheels.NoSourcesError as error:
            pytest.skip(f"vLLM {version}: {error}")
        partial = Path(tempfile.mkdtemp(dir=wheels.CACHE))
        with zipfile.ZipFile(archive) as opened:
            opened.extractall(partial)
        try:
            partial.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(partial)
    return folder


@pytest.fixture(scope="module", params=VERSIONS)
def choices(request: pytest.FixtureRequest) -> list[Choice]:
    version = request.param
    call = [sys.executable, selection.__file__, str(_unpacked(version)), version]
    done = subprocess.run(call, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    tuples = ("capability", "options")
    found = [Choice(**one | {name: tuple(one[name]) for name in tuples}) for one in json.loads(done.stdout)]
    _show(found, version)
    return found


def _show(choices: list[Choice], version: str) -> None:
    """Prints which kernel stock chooses, what the plugin sets, and what is then chosen; GPUs that agree in a line."""
    stock = {(one.format, one.capability, one.packages): one.kernel for one in choices if one.asked == STOCK}
    lines = defaultdict(list)
    for one in choices:
        if one.asked in ("default", "plane=table"):
            then = one.refused or one.failed or one.kernel
            own = stock[one.format, one.capability, one.packages]
            gpu = "sm_{}{}".format(*one.capability) + ("" if one.packages else "*")
            lines[one.format, one.asked, own, " ".join(one.options), then].append(gpu)
    print(f"\nvLLM {version}; *: without {', '.join(sorted(selection._PACKAGES))}")
    for (experts, asked, own, options, then), gpus in sorted(lines.items()):
        print(f"{experts} | {asked} | {' '.join(gpus)} | stock: {own} | {options} | {then}")


def test_all_were_tried(choices: list[Choice]) -> None:
    formats = {one.format for one in choices}
    assert len(formats) == 10 and len(choices) == len(formats) * len(CAPABILITIES) * 2 * (1 + len(KNOBS))


def test_stock_chooses_a_kernel_for_each(choices: list[Choice]) -> None:
    """And others where FlashInfer and the rest are installed, so that the stubs are seen."""
    assert [one for one in choices if one.asked == STOCK and (one.failed or not one.kernel)] == []
    names = [{one.kernel for one in choices if one.asked == STOCK and one.packages is has} for has in (True, False)]
    assert {"TrtLlmBf16ExpertsMonolithic", "FlashInferExperts", "HummingIndexedExperts"} <= names[0] - names[1]


@pytest.mark.parametrize("asked", KNOBS)
def test_layers_are_those_that_the_plugin_runs(choices: list[Choice], asked: str) -> None:
    for one in (one for one in choices if one.asked == asked and not one.refused):
        assert not one.failed, one
        if one.layout == "kernel":
            assert one.kernel in SCHEMES[one.method].kernels, one


def test_fp8_rows_are_rounded_where_stock_rounds_them(choices: list[Choice]) -> None:
    """Marlin leaves them as they are, and vLLM chooses it where Triton's kernel does not multiply in FP8."""
    stock = {(one.format, one.capability, one.packages): one.kernel for one in choices if one.asked == STOCK}
    ours = [one for one in choices if one.format.startswith("fp8") and one.layout == "plain"]
    assert {one.capability for one in ours} == set(CAPABILITIES)
    for one in ours:
        assert one.rounds is (stock[one.format, one.capability, one.packages] != "MarlinExperts"), one
        assert one.rounds is (one.capability not in _AMPERE), one


def test_refused_is_only_vllms_kernel_where_it_reads_no_slots_and_what_is_named_works(choices: list[Choice]) -> None:
    for one in (one for one in choices if one.refused):
        assert one.asked == "plane=slots" and one.instead == "--spac-plane table", one
        assert one.format.startswith(("mxfp4", "nvfp4")) or one.capability in _AMPERE, one


def test_by_default_the_device_decides(choices: list[Choice]) -> None:
    for one in (one for one in choices if one.asked == "default"):
        assert one.options[0] == "--spac-plane pointers", one
