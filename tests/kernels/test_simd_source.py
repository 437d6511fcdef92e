"""The compiled CPU experts under sanitizers: formats, refusals, the pool's threads and the mailbox, without Python."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import vllm_spac

SOURCE = Path(vllm_spac.__file__).parent / "cpu_kernels" / "source"
HARNESS = Path(__file__).parent / "simd" / "harness.c"
PARTS = {
    "formats": "every instruction set and number of threads gives what plain C does",
    "each product": "a product of any instruction set is plain C's but for the order of sums",
    "refusals": "what does not fit is refused",
    "mailbox": "requests are answered, replaced ones are not",
    "stuck": "a thread that never ends costs its patience, once",
    "paused": "a process that was stopped goes on",
    "kids": "a fork has no threads",
}


@pytest.fixture(scope="module", params=["address,undefined", "thread"])
def harness(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("harness")
    options = ["-std=gnu11", "-g", "-O1", f"-fsanitize={request.param}", "-fno-sanitize-recover=undefined", "-Werror"]
    for command in (
        [*options, "-Dcompute=computed", "-c", SOURCE / "layer.c", "-o", folder / "layer.o"],
        [*options, f"-I{SOURCE}", SOURCE / "products.c", SOURCE / "pool.c", folder / "layer.o", HARNESS]
        + ["-o", folder / "harness", "-lm", "-pthread"],
    ):
        subprocess.run([compiler, *map(str, command)], check=True)
    return folder / "harness"


@pytest.mark.parametrize("part", PARTS)
def test_sanitizers_find_nothing(harness: Path, part: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}  # as an engine leaves it
    done = subprocess.run([harness, part], capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), PARTS[part]
