"""The guard in V2's scheduler: its inputs for overlapping steps, and its decisions."""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace

import pytest

from vllm_spac.decisions.guard.lengths import LengthChooser, halved
from vllm_spac.integration.stepping import draft_planning
from vllm_spac.integration.stepping.draft_planning import PlannedDrafts, attach


class Told:
    """In the guard's place: answers what it is given, and remembers what it is told."""

    ignored = 0

    def __init__(self, *lengths: int) -> None:
        self.lengths, self.asked, self.told = list(lengths), [], []

    def choose(self, requests: int) -> int:
        self.asked.append(requests)
        return self.lengths.pop(0)

    def observe(self, *step) -> None:
        self.told.append(step)


def plan(**rows: int):
    """A ``SchedulerOutput``: ``a=3`` are three rows of request a, two of them drafts; ``a=-3`` are a prompt's."""
    drafts = {name: [-1] * (count - 1) for name, count in rows.items() if count > 1}
    return SimpleNamespace(
        num_scheduled_tokens={name: abs(count) for name, count in rows.items()}, scheduled_spec_decode_tokens=drafts
    )


def result(**tokens: int):
    """A ``ModelRunnerOutput``: ``a=2`` are two tokens of request a."""
    return SimpleNamespace(
        req_id_to_index={name: index for index, name in enumerate(tokens)},
        sampled_token_ids=[[7] * count for count in tokens.values()],
    )


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_steps_that_overlap_take_the_time_between_their_ends() -> None:
    guard, clock = Told(), Clock()
    drafts = PlannedDrafts(guard, clock=clock)
    first, second, third = plan(a=1), plan(a=3), plan(a=3)
    drafts.begin_step(first)  # at 100
    clock.now = 101
    drafts.begin_step(second)  # while the first one runs
    clock.now = 104
    drafts.end_step(first, result(a=1))
    clock.now = 109
    drafts.end_step(second, result(a=2))
    clock.now = 150  # nobody asked for anything meanwhile
    drafts.begin_step(third)
    clock.now = 153
    drafts.end_step(third, result(a=3))
    assert guard.told == [(0, [1], 1, 4.0), (2, [2], 1, 5.0), (2, [3], 1, 3.0)]


def test_what_a_step_is_told_as() -> None:
    guard, clock = Told(), Clock()
    drafts = PlannedDrafts(guard, clock=clock)
    for step, said in [
        (plan(a=3, b=1, c=3), result(c=1, a=3, b=1)),  # by name, in whichever order
        (plan(a=3, b=-5), result(a=2, b=1)),  # a prompt's rows and its first token
        (plan(a=-4), result(a=0)),  # a piece of a prompt
        (plan(a=3, b=3), result(a=0, b=2)),  # one was aborted
        (plan(), result()),
    ]:
        drafts.begin_step(step)
        clock.now += 1
        drafts.end_step(step, said)
    assert [told[:3] for told in guard.told] == [(2, [3, 1, 1], 3), (2, [2], 2), (0, [], 1), (2, [2], 2), (0, [], 0)]


def test_steps_whose_drafts_vllm_leaves_out_are_not_the_guard_s() -> None:
    """Plans in the shape of 0.33's ``SchedulerOutput``, whose ``skip_drafts`` says that no drafts are made in a step.

    It lacks the drafter's time; the next has nothing to verify. Plans of 0.32 have no such attribute.
    """
    guard, clock = Told(), Clock()
    drafts = PlannedDrafts(guard, clock=clock)
    steps = [
        (3, False),
        (3, True),
        (1, False),
        (3, False),
        (3, True),
        (3, False),
        (1, None),
        (1, True),
        (1, True),
        (1, False),
    ]
    for rows, skips in steps:
        step = plan(a=rows)
        if skips is not None:
            step.skip_drafts = skips
        drafts.begin_step(step)
        clock.now += 1
        drafts.end_step(step, result(a=1))
    assert [told[0] for told in guard.told] == [2, 2, 2, 0], "of those that drafted, or verified what was drafted"
    assert guard.ignored == 6 and all(told[3] == 1 for told in guard.told)


def test_steps_out_of_order_are_a_bug_and_no_guess() -> None:
    drafts = PlannedDrafts(Told())
    drafts.begin_step(plan(a=1))
    with pytest.raises(AssertionError, match="order"):
        drafts.end_step(plan(a=1), result(a=1))


class Scheduler:
    """As vLLM's, for one request that generates for ever: how many drafts a step has was looked up a step before."""

    def __init__(self) -> None:
        self.dynamic_sd_lookup, self.next = None, 0

    def schedule(self):
        step = plan(a=1 + self.next)
        self.next = self.dynamic_sd_lookup[1]
        return step

    def update_from_output(self, step, said):
        return said


@pytest.mark.parametrize("ahead", [1, 2], ids=["one at a time", "async"])
@pytest.mark.parametrize(("accepted", "draft_cost", "best"), [(0.9, 0.1, 4), (0.3, 0.8, 0)], ids=["pays", "costs"])
def test_it_settles_where_tokens_come_fastest(ahead: int, accepted: float, draft_cost: float, best: int) -> None:
    rng, clock, scheduler, guard = random.Random(1), Clock(), Scheduler(), LengthChooser(4)
    attach(scheduler, PlannedDrafts(guard, clock=clock))
    running: deque = deque()
    for _ in range(3000):
        while len(running) < ahead:
            running.append(scheduler.schedule())
        step = running.popleft()
        drafts = sum(map(len, step.scheduled_spec_decode_tokens.values()))
        clock.now += (1 + draft_cost * drafts) * rng.uniform(0.95, 1.05)
        tokens = 1
        while tokens <= drafts and rng.random() < accepted:
            tokens += 1
        assert scheduler.update_from_output(step, said := result(a=tokens)) is said
    assert guard.steps[best] > 0.9 * guard.steps.total(), "a look at other lengths is all else that runs"


# -- graphs: vLLM's own candidates and dispatch ------------------------------------------------------------------------


def configured(requests: int, most: int, mode: str, asked=None):
    """What vLLM's graph manager reads of its configuration."""
    from vllm.config import CUDAGraphMode

    speculation = SimpleNamespace(
        num_speculative_tokens_per_batch_size=asked,
        uses_dynamic_speculative_decoding=lambda: bool(speculation.num_speculative_tokens_per_batch_size),
    )
    sizes = [1, 2, 4, *range(8, 257, 8)]
    return SimpleNamespace(
        instance_id=f"{requests} {most} {mode} {asked}",
        num_speculative_tokens=most,
        speculative_config=speculation,
        scheduler_config=SimpleNamespace(max_num_seqs=requests),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_size=1),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        compilation_config=SimpleNamespace(
            cudagraph_mode=CUDAGraphMode[mode], cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=256
        ),
    )


@pytest.fixture
def managers(monkeypatch):
    """vLLM's graph managers of engines with drafts, as if all graphs had been captured."""
    utils = pytest.importorskip("vllm.v1.worker.gpu.cudagraph_utils")
    monkeypatch.setattr(utils, "get_pp_group", lambda: SimpleNamespace(is_first_rank=True, is_last_rank=True))
    monkeypatch.setattr(utils, "is_breakable_cudagraph_enabled", lambda: False)
    monkeypatch.setattr(type(utils.current_platform), "get_global_graph_pool", lambda self: None, raising=False)

    def make(config):
        mode = config.compilation_config.cudagraph_mode
        manager = utils.CudaGraphManager(config, None, mode, decode_query_len=1 + config.num_speculative_tokens)
        manager._graphs_captured = True
        return manager

    return make


def offered(config, lengths=None) -> LengthChooser:
    guard = LengthChooser(config.num_speculative_tokens, lengths)
    try:
        draft_planning.install(config, guard)
    finally:
        draft_planning._waiting.clear()
    return guard


def lengths_run(guard: LengthChooser, seconds) -> set[int]:
    """The lengths that a guard runs in a while, where a step takes ``seconds`` (of its length)."""
    rng, ran = random.Random(0), set()
    for _ in range(6000):
        length = guard.choose(1)
        ran.add(length)
        guard.observe(length, [1 + sum(rng.random() < 0.5 for _ in range(length))], 1, seconds(length))
    return ran


@pytest.mark.parametrize("requests", [2, 3, 4, 8, 256])
@pytest.mark.parametrize("most", [1, 3, 5, 8])
def test_each_length_that_the_guard_chooses_has_a_full_graph(managers, requests: int, most: int, caplog) -> None:
    from vllm.config import CUDAGraphMode

    config = configured(requests, most, "FULL_AND_PIECEWISE")
    with caplog.at_level("INFO", "vllm.spac"):
        guard, manager = offered(config), managers(config)
    ran = lengths_run(guard, lambda length: 1 + 0.01 * length) | lengths_run(offered(config), lambda length: 1 + length)
    assert {0, most} <= ran and (requests <= len(halved(most)) or guard.lengths == halved(most))
    for length in ran:
        found = manager.dispatch(1, 1 + length, 1 + length, 0)
        assert found.cg_mode == CUDAGraphMode.FULL and found.uniform_token_count == 1 + length, length
    (said,) = {record.getMessage() for record in caplog.records if "guard" in record.getMessage()}
    assert "all have full CUDA graphs" in said and all(str(length) in said for length in ran)


@pytest.mark.parametrize("restricted", [False, True], ids=["chains", "trees"])
def test_one_request_at_a_time_has_graphs_with_all_drafts_and_with_none(managers, restricted: bool) -> None:
    """vLLM's schedule has a length for each batch size, and there is one."""
    config = configured(1, 4, "FULL_AND_PIECEWISE")
    guard, manager = offered(config, (0, 4) if restricted else None), managers(config)
    assert lengths_run(guard, lambda length: 1 + 0.01 * length) == {0, 4}
    for rows in (1, 5):
        found = manager.dispatch(1, rows, rows, 0)
        assert found.cg_mode.name == "FULL" and found.uniform_token_count == rows


def test_trees_have_graphs_of_whole_trees_and_of_none(managers) -> None:
    config = configured(8, 16, "FULL_DECODE_ONLY")
    guard, manager = offered(config, (0, 16)), managers(config)
    assert guard.lengths == [0, 16]
    for rows in (1, 17):
        found = manager.dispatch(3, 3 * rows, rows, 0)
        assert found.cg_mode.name == "FULL" and found.uniform_token_count == rows
    assert manager.dispatch(1, 9, 9, 0).cg_mode.name == "NONE"


@pytest.mark.parametrize(("asked", "lengths"), [([(1, 4, 2), (5, 8, 0)], {0, 2}), ([(1, 8, 3)], {0, 3})])
def test_a_schedule_of_the_user_s_own_says_which_lengths_have_graphs(asked, lengths, managers) -> None:
    """And steps without drafts have them, too."""
    config = configured(8, 4, "FULL_AND_PIECEWISE", asked)
    guard, manager = offered(config), managers(config)
    assert lengths_run(guard, lambda length: 1 + 0.01 * length) == lengths
    assert config.speculative_config.num_speculative_tokens_per_batch_size == asked, "it is as the user set it"
    for rows in (1 + length for length in lengths):
        assert manager.dispatch(2, 2 * rows, rows, 0).uniform_token_count == rows


def test_other_engines_have_the_graphs_of_their_schedule(managers) -> None:
    """The name that is wrapped is one for all engines of a process."""
    offered(configured(1, 4, "FULL_AND_PIECEWISE"))
    config = configured(8, 4, "FULL_AND_PIECEWISE", [(1, 8, 3)])
    assert managers(config).dispatch(1, 1, 1, 0).cg_mode.name == "PIECEWISE"


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL"])
def test_where_all_lengths_run_alike_none_is_left_out(mode: str, caplog) -> None:
    guard = offered(configured(8, 5, mode))
    assert not guard.restricted and "guard" not in caplog.text
