"""Where threads that compute experts run: the rule by tables and properties, and what is read of a system."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_spac.errors import ConfigError
from vllm_spac.system import host_memory, machine, processors
from vllm_spac.system.host_blocks import huge_pages
from vllm_spac.system.processors import Processors, bound_cpus, described, places


def machine_of(cores: int, *, threads: int = 1, nodes: int = 1, **facts: object) -> Processors:
    """A machine whose second threads are numbered behind all first ones, as most are."""
    every = range(cores * threads)
    siblings = {cpu: frozenset(range(cpu % cores, cores * threads, cores)) for cpu in every}
    node = {cpu: cpu % cores * nodes // cores for cpu in every}
    return Processors(frozenset(every), siblings, node)._replace(**facts)


HALF = {0: 0.5, 1: 0.5}
RULE = [
    # facts, arguments, CPUs
    (machine_of(4), {}, (0, 1, 2, 3)),
    (machine_of(4), {"beside": True}, (1, 2, 3)),
    (machine_of(1), {"beside": True}, (0,)),
    (machine_of(4, threads=2), {}, (0, 1, 2, 3)),
    (machine_of(4, threads=2), {"beside": True}, (1, 2, 3)),
    (machine_of(4, threads=2)._replace(cpus=frozenset({1, 4, 5, 6})), {}, (1, 4, 6)),  # a mask of halves of cores
    (machine_of(8, quota=4.5), {}, (0, 1, 2, 3)),
    (machine_of(8, quota=4.5), {"beside": True}, (1, 2, 3)),
    (machine_of(8, quota=0.5), {"beside": True}, (1,)),
    (machine_of(8, quota=4.0, share=(1, 2)), {}, (4, 5)),
    (machine_of(4, threads=2, share=(0, 2)), {}, (0, 1)),  # not the second threads of another's cores
    (machine_of(4, threads=2, share=(1, 2)), {"beside": True}, (3,)),
    (machine_of(2, share=(0, 3)), {}, (0,)),  # fewer cores than processes
    (machine_of(4, bound=frozenset({0, 1, 2})), {}, (0, 1, 2)),  # vLLM keeps one for its scheduler
    (machine_of(4, bound=frozenset({0, 1, 2})), {"beside": True, "number": 2}, (3, 2)),
    (machine_of(4, threads=2, bound=frozenset({4, 5, 6})), {}, (4, 5, 6)),  # it takes the last thread of a core
    (machine_of(4, threads=2, bound=frozenset({1, 5})), {}, (1, 5)),  # both of a core, as the user has bound them
    (machine_of(4, threads=2, bound=frozenset({4, 5, 6})), {"beside": True, "number": 2}, (3, 6)),
    (machine_of(4, nodes=2, bound=frozenset({2, 3}), share=(1, 2)), {}, (2, 3)),
    (machine_of(4, nodes=2), {"memory": {1: 1.0}}, (2, 3, 0, 1)),
    (machine_of(4, nodes=2), {"memory": {1: 1.0}, "beside": True}, (3, 0, 1)),
    (machine_of(4, nodes=2, quota=2), {"memory": {0: 0.1, 1: 0.9}}, (2, 3)),
    (machine_of(4, nodes=2), {"memory": {0: 0.49, 1: 0.51}}, (0, 1, 2, 3)),  # samples vary
    (machine_of(4, nodes=2), {"memory": HALF, "number": 3}, (0, 1, 2)),
    (machine_of(2, threads=2), {"number": 3}, (0, 1, 2)),  # the user wants two on a core
    (machine_of(4), {"number": 4, "beside": True}, (1, 2, 3, 0)),
]


@pytest.mark.parametrize("facts, arguments, cpus", RULE)
def test_the_rule(facts: Processors, arguments: dict, cpus: tuple[int, ...]) -> None:
    assert places(facts, **arguments) == cpus


@pytest.mark.parametrize(
    "facts, number, named",
    [
        (machine_of(2, threads=2), 5, "5 threads .* has 4 CPUs; export OMP_NUM_THREADS=4"),
        (machine_of(8, quota=2.5), 3, "the time of 2.5; export OMP_NUM_THREADS=2"),
        (machine_of(8, quota=5, share=(0, 2)), 3, "the time of 5, shared by 2 processes; export OMP_NUM_THREADS=2"),
    ],
)
def test_more_threads_than_there_are_processors_for_are_refused(facts: Processors, number: int, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        places(facts, number)


@st.composite
def systems(draw: st.DrawFn) -> Processors:
    cores, threads, nodes = draw(st.integers(1, 12)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    full = machine_of(cores, threads=threads, nodes=nodes)
    allowed = draw(st.sets(st.sampled_from(sorted(full.cpus)), min_size=1))
    count = draw(st.integers(1, 3))
    return full._replace(
        cpus=frozenset(allowed),
        bound=frozenset(draw(st.sets(st.sampled_from(sorted(allowed))))),
        quota=draw(st.none() | st.floats(0.1, 40)),
        share=(draw(st.integers(0, count - 1)), count),
    )


@given(systems(), st.booleans(), st.none() | st.integers(1, 12), st.dictionaries(st.integers(0, 3), st.floats(0, 1)))
def test_any_system(facts: Processors, beside: bool, number: int | None, memory: dict[int, float]) -> None:
    try:
        found = places(facts, number, beside=beside, memory=memory)
    except ConfigError:
        assert number is not None
        return
    assert found and len(set(found)) == len(found) and set(found) <= facts.cpus
    assert facts.quota is None or len(found) <= max(1, facts.quota / facts.share[1])
    if number is not None:
        assert len(found) == number
    elif beside or not facts.bound:
        assert len({facts.cores[cpu] for cpu in found}) == len(found), "one on each core"
    else:
        assert set(found) <= facts.bound
    if number is None and facts.quota is None and facts.share[1] == 1 and not facts.bound:
        cores = len({facts.cores[cpu] & facts.cpus for cpu in facts.cpus})
        assert len(found) == max(1, cores - beside), "and on all cores but one"


@given(systems())
def test_processes_share_no_core(facts: Processors) -> None:
    count, facts = facts.share[1], facts._replace(bound=frozenset())
    parts = [{facts.cores[cpu] for cpu in places(facts._replace(share=(i, count)))} for i in range(count)]
    if len({facts.cores[cpu] & facts.cpus for cpu in facts.cpus}) >= count:
        assert sum(map(len, parts)) == len(set().union(*parts))


def test_what_the_log_says() -> None:
    assert described(machine_of(8), (5, 1, 2, 3)) == "CPUs 1-3,5"
    assert described(machine_of(8, quota=1.5), (1,)) == (
        "CPU 1, of 8 CPUs, and its control groups allow the time of 1.5"
    )


@pytest.mark.parametrize(
    "environment, found",
    [
        ({"OMP_PLACES": "{0,1,2}"}, {0, 1, 2}),  # as vLLM binds GNU's OpenMP, Intel's, and any other
        ({"GOMP_CPU_AFFINITY": "0 2 5"}, {0, 2, 5}),
        ({"KMP_AFFINITY": "granularity=fine,explicit,proclist=[4,5]"}, {4, 5}),
        ({"GOMP_CPU_AFFINITY": "0-3"}, {0, 1, 2, 3}),
        ({"OMP_PLACES": "cores"}, set()),
        ({"OMP_PLACES": "{0:4}"}, set()),  # not CPUs 0 and 4
        ({"KMP_AFFINITY": "granularity=fine,compact,1,0"}, set()),
        ({"OMP_PLACES": ""}, set()),
        ({}, set()),
    ],
)
def test_where_OpenMP_is_bound(environment: dict[str, str], found: set[int]) -> None:
    assert bound_cpus(environment) == found


GROUPS = [
    # /proc/self/cgroup, files, quota
    ("0::/\n", {"cpu.max": "150000 100000"}, 1.5),
    ("0::/\n", {"cpu.max": "max 100000"}, None),
    ("0::/\n", {}, None),
    ("0::/a/b\n", {"cpu.max": "max 100000", "a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"}, 2.0),
    ("0::/a/b\n", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "50000 100000"}, 0.5),
    ("3:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "300000", "cpu/a/cpu.cfs_period_us": "100000"}, 3.0),
    (
        "3:cpu:/a\n",
        {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_quota_us": "400", "cpu/cpu.cfs_period_us": "100"},
        4.0,
    ),
    ("3:cpu:/gone\n", {"cpu/cpu.cfs_quota_us": "250", "cpu/cpu.cfs_period_us": "100"}, 2.5),  # as a container sees it
    ("3:cpuset:/a\n", {"a/cpu.max": "100 100"}, None),
]


@pytest.mark.parametrize("own, files, quota", GROUPS)
def test_quotas_of_control_groups(
    own: str, files: dict[str, str], quota: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(host_memory, "_OWN_GROUPS", tmp_path / "own")
    for name, text in {"own": own, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text.strip()}\n")
    assert processors.quota() == quota


def test_what_is_read_of_a_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = os.sched_getaffinity(0)
    for cpu in allowed:
        (tmp_path / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(f"{cpu},{cpu + 512}\n")
    (tmp_path / "node3").mkdir()
    (tmp_path / "node3" / "cpulist").write_text("0-1023\n")
    monkeypatch.setattr(processors, "_CPUS", tmp_path)
    monkeypatch.setattr(processors, "_NODES", tmp_path)
    monkeypatch.setenv(machine.VARIABLE, f"{min(allowed)},900")  # what the engine's first process could use
    for name in processors._BINDINGS:
        monkeypatch.delenv(name, raising=False)
    facts = processors.processors()
    assert facts.cpus == allowed and not facts.bound, "vLLM binds a worker to its GPU's node, with all its threads"
    assert facts.cores[min(allowed)] == {min(allowed), min(allowed) + 512} and facts.nodes[min(allowed)] == 3
    monkeypatch.setenv("OMP_PLACES", f"{{{min(allowed)}}}")
    facts = processors.processors()
    assert facts.cpus == {min(allowed), 900} and facts.bound == {min(allowed)}, "a thread of OpenMP's has one CPU"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert processors.asked(facts) is None and processors.asked(facts._replace(bound=frozenset())) == 7


def test_nodes_of_memory() -> None:
    """Its pages are where they were written first; of those that were not, nothing is known."""
    untouched = torch.empty(1 << 22, dtype=torch.uint8)
    found = processors.nodes_of([torch.ones(1 << 20), torch.ones(3)])
    assert sum(found.values()) == pytest.approx(1.0) or not found  # a kernel without NUMA
    assert set(found) <= set(range(64)) and processors.nodes_of([]) == {}
    assert set(processors.nodes_of([untouched])) <= set(found)


def test_memory_is_placed_on_a_node() -> None:
    """On the only one that this machine has; a node that it does not have is refused."""
    there = sorted(processors.nodes())
    if not there:
        pytest.skip("this system has no NUMA nodes")
    memory = huge_pages(1 << 22)
    assert processors.prefer_node(memory, there[-1]) and not processors.prefer_node(memory, 900)
    memory.fill_(1)
    assert processors.nodes_of([memory]) in ({there[-1]: 1.0}, {})


def test_the_node_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the system says it of the PCI address that CUDA names; not asked on a machine with one node."""
    device = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=1)
    monkeypatch.setattr(processors, "_NODES", tmp_path)
    monkeypatch.setattr(processors, "_PCI", tmp_path)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {3: device}.get)
    monkeypatch.setattr(processors, "gpu_node", processors.gpu_node.__wrapped__)  # what is asked each time
    for node in (0, 1):
        assert processors.gpu_node() is None
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{node}\n")
    assert processors.gpu_node() is None, "no such device"
    (tmp_path / "0000:c1:01.0").mkdir()
    for text, node in (("1\n", 1), ("-1\n", None)):
        (tmp_path / "0000:c1:01.0" / "numa_node").write_text(text)
        assert processors.gpu_node() == node
