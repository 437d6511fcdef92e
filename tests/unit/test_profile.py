"""``vllm-spac check --measure``: fits are exact where they can be, files are read back, foreign ones are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch
from looped_experts import Looped
from typer.testing import CliRunner

from vllm_spac.cache.measured_costs import serving_rates
from vllm_spac.cli import measuring
from vllm_spac.cli.main import app
from vllm_spac.core import MoEShape
from vllm_spac.cpu_kernels._library import missing
from vllm_spac.cpu_kernels._thread import ExecutorThread
from vllm_spac.decisions.costs import (
    Costs,
    ExpertSize,
    HostWork,
    VllmStep,
    fit_compute,
    fit_host_work,
    fit_load,
    fit_vllm_step,
)
from vllm_spac.errors import ConfigError, StoreError
from vllm_spac.storage.host import HostStore
from vllm_spac.system.machine import Machine
from vllm_spac.tools.machine import measure as profile
from vllm_spac.tools.machine import vllm_step
from vllm_spac.tools.machine.host_work import (
    EXPERTS,
    HOST_WORK,
    LAYERS,
    MEASUREMENTS,
    TOP_K,
    LayerTimer,
    host_work,
    measure_host_work,
)
from vllm_spac.tools.machine.measure import compiled, host_memory, measure, measurements

NBYTES = 6 * 64 * 32


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "_POOL_BYTES", 1 << 18)
    monkeypatch.setattr(measuring, "_SECONDS", 0.01)
    monkeypatch.setattr(vllm_step, "seconds_per_token", lambda layers: 2e-3 + layers * 1e-4)


def run(*arguments, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


@pytest.mark.parametrize("nbytes", [6144, 49152, 1_000_000, 9_437_184, 3 * 4096 * 14336 * 2])
def test_sizes_are_near(nbytes: int) -> None:
    size = ExpertSize.of(nbytes)
    assert size.hidden % 32 == size.intermediate % 32 == 0
    assert size.nbytes == size.shape(2).expert_bytes == pytest.approx(nbytes, rel=0.05)
    assert size.intermediate <= size.hidden <= 8 * size.intermediate


def test_loads_are_fitted() -> None:
    rate = fit_load({n: 0.5 + n * 100 / 50 for n in (1, 2, 3)}, 100)
    assert (rate.fixed, rate.bytes_per_second) == pytest.approx((0.5, 50))
    for points in ({1: 1.0, 2: 3.0, 3: 5.0}, {1: 2.0}, {1: 2.0, 2: 2.0, 4: 2.0}, {1: 3.0, 2: 2.0}):
        rate = fit_load(points, 100)
        assert rate.fixed == 0 and rate.bytes_per_second > 0
    assert fit_load({1: 2.0, 2: 2.0, 4: 2.0}, 100).bytes_per_second == 200


def test_computing_is_fitted() -> None:
    rate = fit_compute({1: 3.0, 8: 4.0, 64: 9.0}, 64, fixed=1.0)
    assert rate.seconds(64, 1) == pytest.approx(3) and rate.seconds(64, 64) == pytest.approx(9)
    assert fit_compute({1: 3.0, 64: 2.9}, 64, fixed=0.1).flops_per_second is None
    assert fit_compute({1: 3.0, 64: 9.0}, 64, fixed=5.0).fixed == 1.5
    steep = fit_compute({1: 1.0, 64: 640.0}, 64, fixed=0.0)  # slower than in proportion: one row stays exact
    assert steep.seconds(64, 1) == pytest.approx(1.0)


def test_host_work_is_fitted() -> None:
    """Medians over the numbers of experts of what is added, which is not negative where noise would make it so."""
    loading, loads = {0: 3.0, 1: 6.0, 2: 8.0, 4: 90.0}, {1: 1.0, 2: 2.0, 4: 4.0}
    assert fit_host_work(1.0, loading, loads, {1: 8.0, 2: 9.0, 4: 9.5}) == HostWork(layer=2, load=3, divide=6)
    assert fit_host_work(4.0, {0: 3.0, 1: 2.0}, {1: 1.0}, {1: 2.0}) == HostWork()


def test_layers_miss_what_is_asked_for() -> None:
    """Whatever was evicted before; and a layer of which every expert has its slot decides nothing."""
    cpu = torch.device("cpu")
    with closing(LayerTimer(TOP_K * LAYERS, cpu, 1)) as timer:
        counters = timer.execution.counters
        for missed, layers in ((0, 2), (3, 5), (8, 4), (1, 6)):
            before = counters.hits, counters.misses, counters.waves
            found = len(timer.step(missed, layers))
            now = counters.hits, counters.misses, counters.waves
            each = tuple(after - first for after, first in zip(now, before, strict=True))
            assert each == (found * (TOP_K - missed), found * missed, found) and 0 < found <= layers
        timer.start_dividing()
        loads = counters.loads
        found = len(timer.step(3, 5))
        assert counters.cpu_experts == 3 * found > 0 and counters.loads == loads
    with closing(LayerTimer(EXPERTS * LAYERS, cpu, 1)) as timer:
        assert timer.execution.holds_all and set(timer.seconds((0,), 0.001)) == {0}


def test_host_work_is_without_the_loads() -> None:
    points = measure_host_work(torch.device("cpu"), 1, 0.001)
    assert len(points) == MEASUREMENTS and all(name.startswith(HOST_WORK) for name in points)
    assert all(seconds > 0 for each in points.values() for seconds in each.values())
    found = [{0: 1.0}, {0: 3.0, 1: 6.0, 2: 8.0, 4: 9.0}, {1: 8.0, 2: 9.0, 4: 9.5}, {1: 1.0, 2: 2.0, 4: 3.0}]
    points = dict(zip(points, found, strict=True))
    assert host_work(points) == HostWork(layer=2, load=3, divide=6)


@pytest.mark.parametrize("store", [None, "disk", "host"])
def test_measure(tmp_path: Path, store) -> None:
    told: list[str] = []
    options = {"store": store, "io_threads": 2, "seconds": 0.001}
    costs = measure(NBYTES, tmp_path / "new", **options, announce=told.append)
    assert len(told) == measurements(2, store) and any("64 rows" in text for text in told)
    assert list((tmp_path / "new").iterdir()) == []
    assert costs.load_at_once == 3
    points = costs.provenance.points
    reads = points["host reads at once" if store == "host" else "disk reads at once"]
    assert list(reads) == [1, 2, 3] and list(points["CPU expert by rows"]) == list(profile.ROWS)
    assert costs.load == fit_load(reads, NBYTES)
    assert costs.host_work == host_work(points) and costs.host_work.divide > 0
    assert costs.cpu.seconds(NBYTES, 1) == pytest.approx(points["CPU expert by rows"][1])
    assert torch.cuda.is_available() or costs.fast == costs.cpu
    assert costs.provenance.how == "measured" and costs.provenance.machine == Machine.here(tmp_path)


def test_nothing_is_left_behind_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments) -> None:
        raise StoreError("no room")

    monkeypatch.setattr(profile.DiskStore, "read", fail)
    with pytest.raises(StoreError, match="no room"):
        measure(NBYTES, tmp_path, io_threads=1, seconds=0.001)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(profile, "available_host_bytes", lambda: 1000)
    with pytest.raises(ConfigError, match="stop something else"):
        profile._turns(NBYTES)


_HELD = """
import sys
from pathlib import Path
from vllm_spac.tools.machine.measure import _scratch
with _scratch(Path(sys.argv[1])) as scratch:
    (scratch / "expert").write_bytes(bytes(5))
    print(scratch.name, flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_profile_left_is_removed_by_the_next_and_no_other(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _HELD, str(tmp_path)]
    killed, running = (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)
    )
    names = []
    for process in (killed, running):
        assert process.stdout is not None
        names.append(process.stdout.readline().strip())
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (elsewhere / "lock").touch()
    (tmp_path / ".profile-link").symlink_to(elsewhere)
    (tmp_path / ".profile-mine").mkdir()  # not made by a profile
    with profile._scratch(tmp_path) as scratch:
        assert {*names, scratch.name} < {path.name for path in tmp_path.iterdir()}
    killed.kill()
    killed.communicate()
    with profile._scratch(tmp_path) as scratch:
        left = {path.name for path in tmp_path.iterdir()}
    assert left == {scratch.name, names[1], ".profile-link", ".profile-mine", "elsewhere"}
    running.communicate("")
    assert not (tmp_path / names[1]).exists() and (elsewhere / "lock").exists()


def test_command_writes_what_costs_reads(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "here.json"
    options = ("--disk-dir", tmp_path / "d", "--io-threads", 1)
    text = run("check", "--measure", "--expert-bytes", NBYTES, *options, "--output", path)
    assert "disk reads at once" in text and "CPU expert by rows" in text and str(path) in text
    costs = Costs.read(path, here=True, disk_dir=tmp_path / "d")
    assert (costs.vllm.step, costs.vllm.layer) == (pytest.approx(2e-3), pytest.approx(1e-4))
    assert costs.provenance.points["vLLM's step by layers"].keys() == set(vllm_step.LAYERS)
    assert "vLLM's step by layers" in text
    assert costs.provenance.source == f"vllm-spac check --measure --expert-bytes={NBYTES} --io-threads=1"
    assert sorted(item.name for item in path.parent.iterdir()) == ["here.json"]
    text = run("check", "--measure", "--expert-bytes", NBYTES, *options, "--output", path, "--no-vllm")
    costs = Costs.read(path)
    assert costs.vllm == VllmStep() and "vLLM's step" not in text
    assert costs.provenance.source.startswith(
        f"vllm-spac check --measure --expert-bytes={NBYTES} --no-vllm --io-threads=1"
    )


def test_vllm_s_own_work_is_fitted() -> None:
    found = fit_vllm_step({2: 3e-3, 14: 9e-3})
    assert (found.step, found.layer) == (pytest.approx(2e-3), pytest.approx(5e-4))
    for points in ({2: 3e-3, 14: 2e-3}, {2: 1e-3, 14: 9e-3}):  # noise: nothing is negative
        found = fit_vllm_step(points)
        assert found.step >= 0 and found.layer >= 0


def test_foreign_profiles_are_refused(tmp_path: Path) -> None:
    content = json.loads(measure(NBYTES, tmp_path, io_threads=1, seconds=0.001).model_dump_json())
    machine = content["provenance"]["machine"]
    for name, value, named in (
        ("cpu", "i486", "cpu: i486, not "),
        ("cores", 4096, "cores: 4096, not "),
        ("gpus", ["Voodoo"], "gpus: Voodoo, not "),
        ("disk", "/dev/floppy fat 1 GB", "disk: /dev/floppy fat 1 GB, not "),
    ):
        content["provenance"]["machine"] = machine | {name: value}
        (tmp_path / "p.json").write_text(json.dumps(content))
        assert Costs.read(tmp_path / "p.json")
        with pytest.raises(ConfigError, match=f"another machine .{named}.*run vllm-spac check --measure"):
            Costs.read(tmp_path / "p.json", here=True, disk_dir=tmp_path)
    content["provenance"]["machine"] = machine | {"disk": ""}
    (tmp_path / "p.json").write_text(json.dumps(content))
    assert Costs.read(tmp_path / "p.json", here=True)
    content["provenance"]["machine"] = None
    (tmp_path / "p.json").write_text(json.dumps(content))
    for name in (tmp_path / "p.json", "h200"):
        with pytest.raises(ConfigError, match="not measured on this machine; run vllm-spac check --measure"):
            Costs.read(name, here=True)


def test_profiles_of_other_experts_are_refused(tmp_path: Path) -> None:
    costs = measure(NBYTES, tmp_path, io_threads=1, seconds=0.001, store="host")
    costs.check_experts("p", NBYTES, "host")
    for nbytes, store in ((2 * NBYTES, "host"), (NBYTES, "disk")):
        with pytest.raises(ConfigError, match=f"{NBYTES} bytes from host, not of {nbytes} bytes from {store}"):
            costs.check_experts("p", nbytes, store)
    older = costs.model_copy(
        update={"provenance": costs.provenance.model_copy(update={"expert_bytes": None, "store": ""})}
    )
    with pytest.raises(ConfigError, match="unknown bytes from an unknown store"):
        older.check_experts("p", NBYTES, "host")


def test_rates_are_measured_in_the_engine_that_serves() -> None:
    """The parts that are not measured are zero, the others are seconds of this store, group and kernel."""
    size = ExpertSize.of(NBYTES)
    tensors = size.shape(1).tensors
    shape = MoEShape(("a", "b"), 4, 2, tensors)
    store, calls = HostStore(shape, ""), []
    for key in range(shape.total):
        store.put(key, {name: torch.zeros(spec.shape, dtype=spec.dtype) for name, spec in tensors.items()})
    group = ExecutorThread(Looped(shape, 1, "silu"))
    try:
        options = {
            "hidden": size.hidden,
            "dtype": torch.bfloat16,
            "device": torch.device("cpu"),
            "io_threads": 2,
            "seconds": 0.001,
        }
        rates = serving_rates(store, group, lambda: calls.append(1), **options)
    finally:
        group.close()
    assert min(rates.fast, rates.stream, rates.cpu, rates.memory) > 0 and rates.cpu_row >= 0 and rates.draft == 0
    assert calls


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_compiled_kernel_and_the_memory_that_it_shares_with_loads(tmp_path: Path) -> None:
    """As beside a GPU; here the experts are loaded to the CPU."""
    size, told = ExpertSize.of(NBYTES), []
    assert host_memory(size, tmp_path, torch.device("cpu"), 1, 0.001, told.append) > 0 and len(told) == 1
    weights = torch.randn(2, 2 * size.intermediate, size.hidden), torch.randn(2, size.hidden, size.intermediate)
    compiled(*(weight.bfloat16() for weight in weights))(
        torch.randn(3, size.hidden).bfloat16(), torch.ones(3, 1), torch.tensor([[0], [1], [0]], dtype=torch.int32)
    )


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ((), "either MODEL or --expert-bytes N"),
        (("m", "--expert-bytes", 1), "either MODEL"),
        (("/nowhere",), "not a folder"),
        (("--expert-bytes", 9), "at least 6144"),
        (("--expert-bytes", NBYTES, "--output", "/proc/p.json"), "cannot be written"),
        (("--expert-bytes", NBYTES, "--disk-dir", "/proc/d", "--output", "/tmp/profile-p.json"), "--disk-dir"),
    ],
)
def test_refusals_are_one_line(tmp_path: Path, options, named: str) -> None:
    if "--disk-dir" not in options:
        options = (*options, "--disk-dir", tmp_path)
    text = run("check", "--measure", *options, code=1)
    assert "error:" in text and named in text and "Traceback" not in text
