"""Drafts that V2's runner cuts on the device: its batches as plain stand-ins with the fields that vLLM gives them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_spac.core import NO_EXPERT, RequestRows, RowKind, Step
from vllm_spac.decisions.guard import device_chooser
from vllm_spac.decisions.guard.chooser import Drafted
from vllm_spac.decisions.guard.cut_rule import along, pack
from vllm_spac.decisions.guard.device_chooser import LOOK, DeviceChooser, StepDrafts
from vllm_spac.execution.exchange import Exchange
from vllm_spac.integration.hooks import draft_cutting
from vllm_spac.integration.hooks.draft_cutting import DraftCutter, surest
from vllm_spac.integration.stepping.draft_planning import PlannedDrafts
from vllm_spac.integration.stepping.v2.tree_decoding_v2 import conditional
from vllm_spac.methods.trees.tensors import FILLER, TreeTensors
from vllm_spac.runtime import Runtime

MOST, WORDS, STATES = 3, 5, 6


class Lane:
    """Copies at once; the host knows of them when it is told."""

    arrived = True

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def record(self):
        return SimpleNamespace(done=lambda: self.arrived, wait=lambda: None)


class Speculator:
    """Drafts the likeliest token of what it is given; ``sure``: of each draft of each request."""

    def __init__(self, sure: Sequence[Sequence[float]]) -> None:
        self.sure = torch.tensor(sure)

    def compute_draft_logits(self, hidden_states: Tensor, spec_step_idx: int) -> Tensor:
        best = hidden_states[:, 0]
        others = ((1 - best) / (WORDS - 1))[:, None].expand(-1, WORDS - 1)
        return torch.cat([others, best[:, None]], 1).log()

    def sample_draft(self, hidden_states: Tensor, a, b, c, d, draft_step: Tensor, e, spec_step_idx: int = 0) -> Tensor:
        return self.compute_draft_logits(hidden_states, spec_step_idx).argmax(-1)

    def propose(self, input_batch, *args, dummy_run: bool = False) -> Tensor:
        drafts = []
        for number in range(MOST):
            step = torch.tensor(number)  # on the device
            drafts.append(self.sample_draft(self.sure[:, number : number + 1], None, None, None, None, step, None))
        return torch.stack(drafts, 1)


def batch(states: Sequence[int], drafts: Sequence[int], prompts: Sequence[int] = ()):
    """An ``InputBatch``: requests of the runner's ``states`` with so many drafts, and rows of prompts behind them."""
    rows = [1 + count for count in drafts] + list(prompts)
    logits = [1 + count for count in drafts] + [1] * len(prompts)
    starts, found = np.concatenate([[0], np.cumsum(rows)]), list(drafts) + [0] * len(prompts)
    return SimpleNamespace(
        req_ids=[f"r{state}" for state in states],
        num_reqs=len(rows),
        num_tokens=sum(rows),
        idx_mapping=torch.tensor(states, dtype=torch.int32),
        num_draft_tokens=sum(drafts),
        num_draft_tokens_per_req=np.array(found, dtype=np.int32),
        logits_indices=torch.cat([torch.arange(e - n, e) for e, n in zip(starts[1:], logits, strict=True)]),
        expanded_idx_mapping=torch.tensor(np.repeat(states, logits), dtype=torch.int32),
        expanded_local_pos=torch.cat([torch.arange(count) for count in logits]).int(),
    )


class Told(DeviceChooser):
    """Says what a test lets it say."""

    def __init__(self, gain: float, loss: float, most: int | None = None) -> None:
        super().__init__(MOST)
        self.costs, self.most, self.says, self.heard = (gain, loss), most, True, []

    def numbers(self, requests, drafts):
        most = np.array(drafts, dtype=np.float64) if self.most is None else np.full(len(drafts), float(self.most))
        return pack(self._odds.terms(requests, MOST), *self.costs, most) if self.says else None

    def end_step(self, *step) -> None:
        self.heard.append(step)


def cutter(chooser: DeviceChooser | None, sure=((0.9, 0.9, 0.9),), trees=None, weighs: bool = False) -> DraftCutter:
    budget = SimpleNamespace(uncut="", weighs=True)
    rerouter = SimpleNamespace(cut_rows=None, cutting=False, reached=None)
    drafts = SimpleNamespace(missed=lambda: 10)
    runtime = SimpleNamespace(rerouter=rerouter, warms_up=False, drafts=drafts, budget=budget)
    runner = SimpleNamespace(
        device=torch.device("cpu"),
        max_num_reqs=STATES,
        num_speculative_steps=MOST,
        input_buffers=SimpleNamespace(input_ids=torch.zeros(32)),
        speculator=Speculator(sure),
        req_states=SimpleNamespace(draft_tokens=torch.arange(STATES * MOST).view(STATES, MOST)),
        rejection_sampler=lambda logits, batch, draft_logits, invalid: invalid,
    )
    made = DraftCutter(runner, chooser, runtime, trees, weighs)
    made._exchange = Exchange(torch.device("cpu"), Lane())
    return made


def plan():
    return SimpleNamespace(finished_req_ids=set())


def cut_rows(made: DraftCutter) -> list[int]:
    return made._runtime.rerouter.cut_rows.flatten().nonzero().flatten().tolist()


# -- in the runner -------------------------------------------------------------------------------------------


def test_requests_keep_their_probabilities_wherever_they_move() -> None:
    made = cutter(Told(1.0, 1.0), [[0.9, 0.9, 0.3], [0.95, 0.4, 0.9]])
    made.propose(batch([4, 2], [0, 0]))
    found = made._chances.clone()
    assert found[4].tolist() == pytest.approx([0.9, 0.9, 0.3]) and found[2].tolist() == pytest.approx([0.95, 0.4, 0.9])
    made._runner.speculator.sure = torch.ones(2, 3) / 2
    made.propose(batch([4, 2], [0, 0]), dummy_run=True)
    assert made._chances[4, 0] == found[4, 0], "made-up requests have no drafts"
    made.begin(plan(), batch([2, 4], [3, 3]))
    # r2: .95 pays (> .5), .95 * .4 does not; r4: .9, .81 pay, .81 * .3 does not
    assert cut_rows(made) == [2, 3, 7]


def test_rows_are_those_of_drafts_also_beside_prompts() -> None:
    made = cutter(Told(1.0, 1.0, most=1), [[0.9] * 3] * 3)
    made.propose(batch([0, 1, 3], [0, 0, 0]))
    made.begin(plan(), given := batch([3, 0, 1, 5], [3, 0, 2], [7]))
    assert cut_rows(made) == [2, 3, 7], "one draft of each is kept; prompts and last tokens always are"
    assert made._runtime.rerouter.cutting
    invalid = made._runner.rejection_sampler(None, given)
    assert invalid.tolist() == [False, False, True, True, False, False, False, True, False]
    assert given.logits_indices[invalid].tolist() == cut_rows(made), "what is not computed is not accepted"


def test_what_a_grammar_excludes_stays_excluded() -> None:
    made = cutter(Told(1.0, 1.0, most=2))
    made.propose(batch([0], [0]))
    made.begin(plan(), given := batch([0], [3]))
    excluded = torch.tensor([False, True, False, False])
    assert made._runner.rejection_sampler(None, given, None, excluded).tolist() == [False, True, False, True]


def test_nothing_stays_cut_in_the_next_step() -> None:
    """A CUDA graph reads the same memory."""
    chooser = Told(1.0, 1.0, most=0)
    made = cutter(chooser)
    made.propose(batch([0], [0]))
    address = made._runtime.rerouter.cut_rows.data_ptr()
    for then in (batch([0], [0]), batch([0], [3])):
        chooser.says = True
        made.begin(plan(), given := batch([0], [3]))
        assert cut_rows(made) == [1, 2, 3]
        made._runner.rejection_sampler(None, given)
        chooser.says = False
        made.begin(plan(), then)
        assert cut_rows(made) == [] and not made._runtime.rerouter.cutting and made.cut_of(then) is None
    assert made._runtime.rerouter.cut_rows.data_ptr() == address


def test_another_batch_is_never_sampled_as_if_nothing_was_cut() -> None:
    made = cutter(Told(1.0, 1.0, most=0))
    made.propose(batch([0], [0]))
    made.begin(plan(), batch([0], [3]))
    with pytest.raises(AssertionError):
        made._runner.rejection_sampler(None, batch([0], [3]))


class Launched(TorchDispatchMode):
    """Notes each operation on tensors by its name and dtypes, as a kernel is chosen by them."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: set[tuple] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        tensors = [each for each in (*args, found) if isinstance(each, Tensor)]
        self.kernels.add((str(func), *(each.dtype for each in tensors)))
        return found


@pytest.mark.parametrize("tree", [False, True])
def test_no_launch_is_a_served_step_s_first_one(tree: bool) -> None:
    trees = SimpleNamespace(drafter=SimpleNamespace(chances=None)) if tree else None
    if trees is not None:
        parents = torch.tensor([[-1, 0, 0, 1]]).repeat(STATES, 1)
        trees.trees = lambda batch: TreeTensors.of(parents, 2).take(batch.idx_mapping)
    made = cutter(chooser := Told(1.0, 1.0, most=1), trees=trees, weighs=True)
    made._runtime.warms_up = True
    with Launched() as warm:
        made.begin(plan(), batch([0, 3], [3, 3]))
    assert cut_rows(made) == [] and made.cut_of(batch([0, 3], [3, 3])) is None and not made._runtime.rerouter.cutting
    made._runtime.warms_up = False
    with Launched() as served:
        made.begin(step := plan(), batch([0, 3], [3, 3]))
    assert cut_rows(made), "the step cuts"
    made.end_step(step, {"r0": [1], "r3": [1]}, 0.25)
    with Launched() as again:
        made.begin(plan(), batch([0, 3], [3, 3]))
    assert chooser.heard
    assert served.kernels | again.kernels <= warm.kernels


def test_the_sampler_is_vllm_s_otherwise() -> None:
    made = cutter(Told(1.0, 1.0))
    made._runner.rejection_sampler._plain = SimpleNamespace(enable_adaptive_verification=False)
    assert made._runner.rejection_sampler.enable_adaptive_verification is False


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_surest(dtype: torch.dtype) -> None:
    """-inf: tokens that a head does not draft."""
    logits = torch.tensor([[1.0, 3.0, -torch.inf, 2.0], [0.0, 0.0, 0.0, 0.0]]).to(dtype)
    assert torch.allclose(
        surest(logits), logits.float().softmax(-1).amax(-1), rtol=0.02 if dtype != torch.float32 else 1e-6
    )


def reached(made: DraftCutter, rows: int) -> list[float]:
    return made._runtime.rerouter.reached[:rows].tolist()


def test_rows_are_reached_with_all_that_is_before_them() -> None:
    """Also where nothing is cut; rows of prompts are certain, and so are drafts that the drafter said nothing about."""
    made = cutter(None, ((0.8, 0.5, 0.5), (0.4, 0.9, 0.5)), weighs=True)
    assert made._runtime.rerouter.cut_rows is None, "nothing is ever cut"
    made.propose(batch([4, 2], [0, 0]))
    made.begin(step := plan(), batch([2, 4, 0, 5], [2, 3, 1], prompts=[3]))
    assert made._runtime.rerouter.weighed and draft_cutting.CUT not in vars(step)
    assert reached(made, 12) == pytest.approx([1, 0.4, 0.36, 1, 0.8, 0.4, 0.2, 1, 1, 1, 1, 1])
    made.begin(plan(), batch([2], [0]))
    assert not made._runtime.rerouter.weighed, "without drafts all rows are certain"
    made.begin(plan(), batch([2], [1]))
    assert reached(made, 4) == pytest.approx([1, 0.4, 1, 1]), "nothing is left of another step"
    made._runtime.budget.weighs = False
    made.begin(plan(), batch([2], [1]))
    assert not made._runtime.rerouter.weighed


def test_nodes_are_reached_along_their_own_path() -> None:
    parents = torch.tensor([[-1, 0, 0, 1, 3, FILLER]]).repeat(STATES, 1)
    trees = SimpleNamespace(drafter=SimpleNamespace(chances=None))
    trees.trees = lambda batch: TreeTensors.of(parents[:, : MOST + 1], 3).take(batch.idx_mapping)
    made = cutter(None, trees=trees, weighs=True)
    trees.drafter.chances(torch.tensor([1]), torch.tensor([[0.8, 0.5, 0.25]]))
    made.begin(plan(), batch([1], [3]))
    assert reached(made, 5) == pytest.approx([1, 0.8, 0.5, 0.2, 1])
    chances = torch.tensor([[0.8, 0.5, 0.25, 0.5, 0.9]])
    found = along(chances, parents[:1, 1:], 3)
    assert found.flatten().tolist() == pytest.approx([0.8, 0.5, 0.2, 0.1, 0])


def test_a_tree_keeps_its_first_nodes() -> None:
    """Two branches: the second is worth its experts, though the first one's end is not."""
    parents = torch.tensor([[-1, 0, 0, 1]]).repeat(STATES, 1)
    trees = SimpleNamespace(drafter=SimpleNamespace(chances=None))
    trees.trees = lambda batch: TreeTensors.of(parents, 2).take(batch.idx_mapping)
    made = cutter(Told(1.0, 0.5), trees=trees)
    trees.drafter.chances(torch.tensor([1]), torch.tensor([[0.8, 0.5, 0.1]]))
    made.begin(step := plan(), batch([1], [3]))
    assert cut_rows(made) == [3]
    found = vars(step)[draft_cutting.CUT].arrived(10)
    assert found.drafts["r1"].parents == [0, 0, 1] and found.kept == {"r1": 2}


def test_what_is_no_node_is_no_draft() -> None:
    """The best path of a tree, filled up."""
    parents = torch.tensor([[-1, 0, FILLER, FILLER]]).repeat(STATES, 1)
    trees = SimpleNamespace(drafter=SimpleNamespace(chances=None))
    trees.trees = lambda batch: TreeTensors.of(parents, 2).take(batch.idx_mapping)
    made = cutter(Told(1.0, 0.5), trees=trees)
    trees.drafter.chances(torch.tensor([1]), torch.tensor([[0.8, 0.99, 0.99]]))
    made.begin(step := plan(), batch([1], [3]))
    assert cut_rows(made) == [2, 3]
    assert len(vars(step)[draft_cutting.CUT].arrived(10).drafts["r1"].tokens) == 1


def test_probabilities_of_nodes_given_their_parents() -> None:
    joint = torch.tensor([[0.8, 0.1, 0.4, 0.2]]).log()
    given = conditional(joint, torch.tensor([[-1, 0, 0, 1, 3]]))
    assert given.flatten().tolist() == pytest.approx([0.8, 0.1, 0.5, 0.5])


# -- what the host hears -------------------------------------------------------------------------------------


def test_the_host_hears_of_a_step_when_it_has_ended() -> None:
    chooser = Told(1.0, 1.0, most=1)
    made = cutter(chooser, [[0.9, 0.8, 0.7]] * 2)
    made.propose(batch([2, 0], [0, 0]))
    made.begin(step := plan(), batch([2, 0, 4], [3, 2], [6]))
    made._runtime.drafts.missed = lambda: 17
    made.end_step(step, {"r2": [6, 9], "r0": [5]}, 0.25)
    ((drafts, said, requests, seconds),) = chooser.heard
    assert drafts.drafts["r2"].tokens == [6, 7, 8] and drafts.drafts["r0"].tokens == [0, 1]
    assert drafts.drafts["r2"].chances == pytest.approx([0.9, 0.8, 0.7])
    assert drafts.kept == {"r2": 1, "r0": 1} and drafts.misses == 7
    assert (said["r2"], requests, seconds) == ([6, 9], 3, 0.25)


def test_nobody_waits_for_what_has_not_arrived() -> None:
    chooser = Told(1.0, 1.0)
    made = cutter(chooser)
    made.propose(batch([0], [0]))
    made.begin(step := plan(), batch([0], [3]))
    made._exchange._lane.arrived = False
    made.end_step(step, {"r0": [1]}, 0.25)
    made.end_step(plan(), {"r0": [1]}, 0.25)
    assert not chooser.heard
    late = vars(step)[draft_cutting.CUT].sent
    made.begin(again := plan(), batch([0], [3]))
    assert vars(again)[draft_cutting.CUT].sent.buffer is not late.buffer, "it may still be written"
    made._exchange._lane.arrived = True
    made.begin(last := plan(), batch([0], [3]))
    assert vars(last)[draft_cutting.CUT].sent.buffer is late.buffer, "no other memory is pinned for it"


def test_experts_that_the_next_step_misses_are_its_own() -> None:
    made = cutter(chooser := Told(1.0, 1.0))
    made.propose(batch([0], [0]))
    made.begin(first := plan(), batch([0], [3]))
    made._runtime.drafts.missed = lambda: 12
    made.begin(second := plan(), batch([0], [3]))
    made._runtime.drafts.missed = lambda: 30
    made.end_step(first, {"r0": [1]}, 0.25)
    made.end_step(second, {"r0": [1]}, 0.25)
    assert [step[0].misses for step in chooser.heard] == [2, 18]


def test_what_the_scheduler_tells() -> None:
    told = []
    drafts = PlannedDrafts(None, clock=iter(range(100)).__next__, ended=lambda *step: told.append(step))
    step = SimpleNamespace(num_scheduled_tokens={"a": 3, "b": 5}, scheduled_spec_decode_tokens={"a": [-1, -1]})
    drafts.begin_step(step)
    drafts.end_step(step, SimpleNamespace(req_id_to_index={"b": 0, "a": 1}, sampled_token_ids=[[4], [7, 8]]))
    assert told == [(step, {"a": [7, 8]}, 1)], "b is in its prompt"
    step.skip_drafts = True
    drafts.begin_step(step)
    drafts.end_step(step, SimpleNamespace(req_id_to_index={"b": 0, "a": 1}, sampled_token_ids=[[4], [9]]))
    assert told[1:] == [(step, {"a": [9]}, 0.0)], "what it verified is known, and not what that took"


# -- what it learns ------------------------------------------------------------------------------------------


def steps(chooser: DeviceChooser, count: int, seconds, right: float = 0.0, sure: float = 0.5) -> None:
    """Steps of one request with three drafts each, as the numbers cut them."""
    for number in range(count):
        packed = chooser.numbers(["a"], [3])
        keep = 3 if packed is None else int(packed[-1]) if packed[1] >= packed[2] else 0
        good = number % 10 < 10 * right
        drafts = {"a": Drafted([1, 2, 3], [sure] * 3)}
        said = {"a": [1, 2, 3, 4][: 1 + keep] if good else [9]}
        chooser.end_step(StepDrafts(drafts, {"a": keep}, 2 * keep), said, 1, seconds(keep))


def test_what_costs_nothing_is_not_cut_but_to_see_that() -> None:
    chooser = DeviceChooser(3)
    steps(chooser, 400, lambda keep: 1.0)
    cut = [chooser.numbers(["a"], [3]) for _ in range(LOOK)]
    assert sum(numbers is not None and numbers[1] < numbers[2] for numbers in cut) == 0


def test_what_costs_much_and_is_never_right_is_cut() -> None:
    chooser = DeviceChooser(3)
    steps(chooser, 400, lambda keep: 1.0 + 0.5 * keep)
    _, gain, loss, *_ = chooser.numbers(["a"], [3])
    assert loss > 0.2 and 0 < gain <= 1.1
    slope, places, _ = chooser._odds.terms(["a"], 3)
    assert places[0] < -1, "it was found out, too"
    assert chooser.facts()["cut_drafts"] > 0 and chooser.facts()["drafts"] == 1200


def test_half_are_cut_now_and_then_while_their_cost_is_unknown() -> None:
    chooser = DeviceChooser(3)
    chooser.end_step(StepDrafts({"a": Drafted([1, 2, 3], [0.5] * 3)}, {"a": 3}, 6), {"a": [9]}, 1, 1.0)
    found = []
    for _ in range(2 * LOOK):
        packed = chooser.numbers(["a"], [3])
        found.append(3 if packed is None else int(packed[-1]))
        chooser._steps += 1
    assert found.count(1) == 2, "steps that have them"


def test_the_requests_of_a_large_batch_take_turns_in_teaching(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    monkeypatch.setattr(device_chooser, "observe_answer", lambda odds, request, drafts, said: heard.append(request))
    chooser, names = DeviceChooser(3), [f"r{number}" for number in range(2 * device_chooser.TAUGHT + 1)]
    drafts, kept = {name: Drafted([1], [0.5]) for name in names}, dict.fromkeys(names, 1)
    for _ in range(3):
        chooser.end_step(StepDrafts(drafts, kept, 0), dict.fromkeys(names, [9]), len(names), 1.0)
    assert sorted(heard) == sorted(names), "each in one of three steps"


def test_requests_that_ended_are_not_remembered_though_a_step_was_launched_with_them() -> None:
    """Async scheduling: step n + 1 has been launched with a request before its end in step n is known."""
    chooser = DeviceChooser(3)
    for number in range(50):
        name = f"r{number}"
        chooser.remove([])
        chooser.remove([name])  # the step after its last one begins, and then that one ends
        chooser.end_step(StepDrafts({name: Drafted([1], [0.5])}, {name: 1}, 0), {name: [9]}, 1, 1.0)
        assert chooser.facts()["remembered"] == 1
    chooser.remove([])
    assert chooser.facts() == {"drafts": 50, "cut_drafts": 0, "remembered": 0}


def test_a_step_with_a_prompt_teaches_what_was_right_and_not_what_it_cost() -> None:
    chooser = DeviceChooser(3)
    for _ in range(50):
        chooser.end_step(StepDrafts({"a": Drafted([1], [0.5])}, {"a": 1}, 6), {"a": [9]}, 2, 1.0)
    assert chooser.numbers(["a"], [1]) is None and chooser._odds.chance("a", 0, 0.5) < 0.2


# -- in the layers -------------------------------------------------------------------------------------------


class Idle:
    """A budget that changes nothing."""

    active = captured = weighs = False
    uncut = ""

    def begin_step(self, step: Step, cut: Tensor | None = None, reached: Tensor | None = None) -> Step:
        self.cut, self.reached = cut, reached
        return step

    def end_step(self) -> None: ...

    def compile(self, *layer) -> None: ...

    def capture(self, layer, logits, weights, ids, hidden):
        return weights, ids


def test_a_cut_row_is_routed_to_no_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime([], Idle())
    hidden, logits = torch.zeros(4, 2), torch.zeros(4, 6)
    weights, ids = torch.ones(4, 2), torch.tensor([[0, 1], [2, 3], [4, 5], [1, 2]], dtype=torch.int32)
    assert runtime.rerouter.route(0, hidden, logits, weights, ids)[1] is ids, "nothing cuts any"
    runtime.rerouter.cut_rows = torch.zeros(9, 1, dtype=torch.bool)
    runtime.rerouter.cut_rows[2] = True
    runtime.begin_step(Step((RequestRows(0, 4, RowKind.VERIFY, 3),)))
    assert runtime.rerouter.route(0, hidden, logits, weights, ids)[1] is ids, "a step that cuts none launches nothing"
    runtime.rerouter.cutting = True
    expected = [[0, 1], [2, 3], [NO_EXPERT] * 2, [1, 2]]
    found = runtime.rerouter.route(0, hidden, logits, weights, ids)
    assert found[1].tolist() == expected and found[1].dtype == ids.dtype and found[0] is weights
    runtime.end_forward()
    assert not runtime.rerouter.cutting and runtime.budget.cut is None
    runtime.rerouter.cutting = True
    runtime.begin_step(Step((RequestRows(0, 4, RowKind.VERIFY, 3),)))
    assert runtime.budget.cut is runtime.rerouter.cut_rows, "a budget hears of them"
    runtime.end_forward()
    monkeypatch.setattr("vllm_spac.execution.rerouting.capturing", lambda tensor: True)
    assert runtime.rerouter.route(0, hidden, logits, weights, ids)[1].tolist() == expected, "a graph holds it"
