"""Fixtures for all tests: no deadlines on slow machines, readable log records whatever engines do to vLLM's logger."""

import logging
import os
import runpy
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

if "PYTEST_XDIST_WORKER" in os.environ:  # one core each: threads that wait for one another spin on the others' cores
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

sys.path.insert(0, str(Path(__file__).parent))  # for what tests of several folders share
from effort import THOROUGH

# A shell starts what it puts in the background with Ctrl-C ignored, which commands that tests interrupt would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The weights of the toy model, which `make setup` has unpacked, unless they have changed since.
runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "toy" / "stored.py"))["unpack"]()

settings.register_profile(
    "busy",
    deadline=None,  # no look at the clock
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=not THOROUGH,
)
settings.load_profile("busy")

# What `make test` leaves to `make test-rest`: these folders but for some files, and what is marked so.
REST = ("benchmarks", "integration", "kernels", "parity", "soak", "upstream")
EVERYDAY = (
    "integration/test_moe_layer.py",
    "integration/test_timeline.py",
    "kernels/test_launches.py",
    "kernels/test_reference.py",
    "kernels/test_twins.py",
    "parity/test_cpu_experts.py",
    "parity/test_exactness.py",
    "parity/test_families.py",
    "parity/test_modes.py",
    "parity/test_packed_on_a_cpu.py",
    "parity/test_pointers.py",
    "parity/test_table.py",
)


# A worker of pytest-xdist runs whole files, so that their fixtures are made once. These take longest and come first, so
# that no worker still has a long one when the others are done.
LONGEST = (
    "parity/test_predictors.py",
    "kernels/test_on_device.py",
    "parity/test_ranks.py",
    "integration/test_server.py",
    "parity/test_speculation.py",
    "kernels/test_compiled.py",
    "unit/test_distribution.py",
    "parity/test_trees.py",
    "parity/test_families.py",
    "parity/test_votes.py",
    "integration/test_refusals.py",
    "integration/test_planned_commands.py",
    "integration/test_gpu_starts.py",
    "parity/test_prompt_lengths.py",
    "parity/test_disk_faults.py",
    "parity/test_host_memory.py",
    "parity/test_workers.py",
    "integration/test_quantised.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what `make test` leaves out, and puts the files of ``LONGEST`` first."""
    tests = Path(__file__).parent
    places = {tests / name: place for place, name in enumerate(LONGEST)}
    everyday = {tests / name for name in EVERYDAY}
    assert all(path.exists() for path in (*places, *everyday)), "LONGEST or EVERYDAY names a file that is not there"
    for item in items:
        if item.path.relative_to(tests).parts[0] in REST and item.path not in everyday:
            item.add_marker("rest")
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture(scope="session", autouse=True)
def shared_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Where workers of pytest-xdist keep what one of them computes for all, see ``parity/shared.py``."""
    base = tmp_path_factory.getbasetemp()
    os.environ["SPAC_TESTS_SHARED"] = str((base.parent if hasattr(request.config, "workerinput") else base) / "shared")


@pytest.fixture(autouse=True)
def no_command_waits() -> Iterator[None]:
    """A test that parses a command line in this process leaves no file behind in which later engines would end."""
    yield
    os.environ.pop("SPAC_LAST_WORDS", None)


@pytest.fixture(autouse=True)
def messages_reach_caplog(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Importing vLLM ends propagation, and the engine tests set its level to ERROR for the whole process."""
    logger = logging.getLogger("vllm.spac")
    before = logger.level
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    logger.setLevel(logging.INFO)
    yield
    logger.setLevel(before)
