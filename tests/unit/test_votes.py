"""Votes of rows, and the probabilities that they are made of."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.config import CUDAGraphMode

from vllm_spac.core import RequestRows, RowKind, Step, weights_of
from vllm_spac.decisions.guard.chooser import Chooser
from vllm_spac.decisions.guard.draft_states import PADDING, DraftProbabilities
from vllm_spac.integration.hooks import drafts
from vllm_spac.integration.stepping.v1 import runner_v1
from vllm_spac.methods.moe_spec.rankings import weighted
from vllm_spac.methods.moe_spec.settings import STEPS, unknown, vote, voted

PROMPT, CERTAIN = RequestRows(0, 3, RowKind.PREFILL), RequestRows(3, 4, RowKind.DECODE)
KNOWN = RequestRows(4, 7, RowKind.VERIFY, 2, (1.0, 0.25, 0.0))
NOT_KNOWN = RequestRows(7, 9, RowKind.VERIFY, 1)
STEP = Step((PROMPT, CERTAIN, KNOWN, NOT_KNOWN))
chances = st.floats(0, 1)


@given(chance=chances, alpha=chances)
def test_a_vote_is_a_multiple_of_the_step_and_never_none(chance: float, alpha: float) -> None:
    found = vote(chance, alpha)
    assert 1 / STEPS <= found <= 1 and (found * STEPS).is_integer()
    assert abs(found - chance**alpha) <= 0.5 / STEPS or found == 1 / STEPS
    assert vote(chance, 0.0) == 1.0 == vote(1.0, alpha) == vote(1.0000002, alpha)


def test_a_step_of_votes() -> None:
    found = voted(STEP, 0.5)
    assert [request.weights for request in found.requests] == [None, None, (1.0, 0.5, 1 / STEPS), None]
    assert (
        voted(STEP, 0.0)
        == voted(STEP, None)
        == Step((*STEP.requests[:2], RequestRows(4, 7, RowKind.VERIFY, 2), NOT_KNOWN))
    )
    assert voted(Step((PROMPT,)), 0.5) == Step((PROMPT,))
    assert (unknown(STEP), unknown(Step((PROMPT, CERTAIN, KNOWN)))) == (1, 0)


def test_weights_of_rows() -> None:
    assert weights_of(STEP.requests) == [1, 1, 1, 1, 1, 0.25, 0, 1, 1]
    assert STEP.generating_weights == [1, 1, 0.25, 0, 1, 1] and Step((PROMPT, NOT_KNOWN)).generating_weights is None
    assert weights_of(()) is None
    assert KNOWN.windows(2) == [
        RequestRows(4, 6, RowKind.VERIFY, 0, (1.0, 0.25)),
        RequestRows(6, 7, RowKind.VERIFY, 0, (0.0,)),
    ]
    with pytest.raises(AssertionError, match="a weight for each row"):
        RequestRows(0, 2, RowKind.VERIFY, 1, (1.0,))


@given(seed=st.integers(0, 2**32), rows=st.integers(1, 64), alpha=chances, order=st.randoms(use_true_random=False))
@settings(max_examples=examples(100), deadline=None)
def test_products_are_exact_and_their_order_does_not_matter(seed: int, rows: int, alpha: float, order) -> None:
    """Of float32 scores within a factor of 2**17 / rows of one another."""
    generator = torch.Generator().manual_seed(seed)
    scores = 2 ** (-11 * torch.rand(rows, 4, generator=generator))
    votes = torch.tensor([vote(float(p), alpha) for p in torch.rand(rows, generator=generator)], dtype=torch.float64)
    found = weighted(scores, votes)
    for score, count, product in zip(scores[:, 0].tolist(), votes.tolist(), found[:, 0].tolist(), strict=True):
        ours, theirs = (a.as_integer_ratio() for a in (product, score))
        assert ours[0] * theirs[1] * STEPS == theirs[0] * int(count * STEPS) * ours[1], "no bit is lost"
    other = torch.tensor(order.sample(range(rows), rows))
    assert torch.equal(found.sum(0), found[other].sum(0))
    assert found.sum(0).tolist() == [math.fsum(column) for column in found.T.tolist()]


# --- probabilities ----------------------------------------------------------------------------------------------------


@pytest.fixture
def known() -> DraftProbabilities:
    made = DraftProbabilities()
    made.save(["a", "b"], [[7, 8, 9], [4, 5, 6]], [[0.5, 0.5, 0.25], [1.0, math.nan, 0.5]])
    return made


@pytest.mark.parametrize(
    ("request_id", "tokens", "rows", "weights"),
    [
        ("a", [7, 8, 9], 4, (1, 0.5, 0.25, 0.0625)),
        ("a", [7, 8], 3, (1, 0.5, 0.25)),
        ("a", [7], 3, (1, 1, 0.5)),
        ("a", [7, PADDING, PADDING], 4, (1, 0.5, 0, 0)),
        ("c", [PADDING, PADDING], 3, (1, 0, 0)),
        ("a", [], 1, None),
        ("a", [7, 9], 3, None),
        ("a", [7, 8, 9, 10], 5, None),
        ("b", [4], 2, (1, 1)),
        ("b", [4, 5], 3, None),
        ("c", [7], 2, None),
    ],
    ids=["all", "cut", "rows", "padded", "padding", "none", "others", "more", "finite", "not a number", "new"],
)
def test_weights_are_products_of_the_drafts_that_are_verified(known, request_id, tokens, rows, weights) -> None:
    assert known.weights(request_id, tokens, rows) == weights


def test_drafts_are_kept_until_they_are_made_again_or_the_request_ends(known) -> None:
    known.save(["a"], [[1]], [[0.5]])
    assert known.weights("a", [7], 2) is None and known.weights("a", [1], 2) == (1, 0.5)
    assert known.weights("b", [4], 2) == (1, 1), "it did not run in that step"
    known.remove(["b", "never seen"])
    assert known.weights("b", [4], 2) is None


class Drafter:
    """Drafts greedily by a table of logits, one forward per token, as vLLM's drafters do."""

    def __init__(self, logits: list[torch.Tensor], sampled: torch.Tensor | None = None) -> None:
        self._logits, self._sampled = logits, sampled
        self.input_ids = torch.zeros(2, dtype=torch.int32)
        self.model = Model()

    def propose(self) -> torch.Tensor:
        drafts = []
        for logits in self._logits:
            computed = self.model.compute_logits(logits)
            drafts.append(computed.argmax(-1))
            computed.div_(100)  # as if by a temperature
        return torch.stack(drafts, 1)

    def take_last_draft_probs(self) -> torch.Tensor | None:
        return self._sampled


class Model(torch.nn.Module):
    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states.clone()


def test_greedy_drafts_have_the_softmax_of_their_logits() -> None:
    logits = list(torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16))
    logits[0][0, 3] = -torch.inf  # a token that this draft model does not have
    drafter = Drafter(logits)
    kept = runner_v1.DraftLogits(drafter)
    with runner_v1.observed(drafter, [kept.add]):
        drafts = drafter.propose()
    expected = torch.stack(
        [each.float().softmax(-1).gather(1, drafts[:, i, None])[:, 0] for i, each in enumerate(logits)], 1
    )
    torch.testing.assert_close(kept.of(drafts), expected, rtol=1e-6, atol=0)
    assert "compute_logits" not in vars(drafter.model), "the model is as before"
    assert kept.of(drafts[:, :2]) is None and kept.of(drafts[:1]) is None, "other drafts than these"
    assert runner_v1.DraftLogits(drafter).of(drafts[:, :0]) is None, "nothing was drafted"
    drafter.propose()
    assert len(kept.best) == 3


def test_sampled_drafts_have_the_probabilities_that_they_were_drawn_with() -> None:
    logits = list(torch.randn(2, 3, 5))
    sampled = torch.randn(3, 2, 5).softmax(-1)
    drafter = Drafter(logits, sampled)
    kept = runner_v1.DraftLogits(drafter)
    with runner_v1.observed(drafter, [kept.add]):
        drafter.propose()
    drafts = torch.randint(0, 5, (3, 2))
    expected = [[sampled[i, j, drafts[i, j]].item() for j in range(2)] for i in range(3)]
    assert kept.of(drafts).tolist() == expected


class Runner(SimpleNamespace):
    """V1's runner, with a batch of two requests that swap places."""

    speculative_config = SimpleNamespace(
        method="eagle3", parallel_drafting=False, use_local_argmax_reduction=False, use_heterogeneous_vocab=False
    )

    def propose(self, scheduled: SimpleNamespace, sampled: list[list[int]]) -> torch.Tensor:
        return self.drafter.propose()


@pytest.mark.parametrize("weighs", [True, False])
def test_a_v1_step_has_the_weights_of_its_drafts(weighs: bool) -> None:
    budget = SimpleNamespace(weighs=weighs)
    drafts = SimpleNamespace(length=lambda: 2, in_prompt=False, chooser=Chooser(4))
    runtime = SimpleNamespace(budget=budget, drafts=drafts, recorder=SimpleNamespace(timeline=None))
    runtime.end_drafts, runtime.observes_drafts = lambda drafts, seconds, forwards: None, False
    experts = SimpleNamespace(runtime=runtime, drafted=DraftProbabilities())
    logits = torch.tensor([[[4.0, 0, 0], [0, 2, 0]], [[0, 0, 1], [1.5, 0, 0]], [[1, 0, 0], [1, 0, 0]]])
    runner = Runner(_spac_experts=experts, drafter=Drafter(list(logits)))
    runner.input_batch = SimpleNamespace(req_ids=["a", "b"], sampling_metadata=SimpleNamespace(all_greedy=False))
    plan = SimpleNamespace(num_spec_tokens_to_schedule=3)
    drafts = runner_v1._proposing(Runner.propose)(runner, plan, [[5], [6]])
    assert drafts == [[0, 2], [1, 0]], "as long as the guard allows"
    runner.input_batch = SimpleNamespace(
        req_ids=["b", "a", "c"], num_computed_tokens_cpu=[9, 9, 0], num_prompt_tokens=[5, 5, 5]
    )
    scheduled = SimpleNamespace(
        num_scheduled_tokens={"a": 2, "b": 3, "c": 5},
        scheduled_spec_decode_tokens={"a": [0], "b": [1, 0]},
        finished_req_ids=set(),
    )
    first, second, _ = logits.softmax(-1).amax(-1).tolist()  # forwards of requests a and b
    step = runner_v1._step(runner, scheduled)
    assert [(r.start, r.stop, r.drafts, str(r.kind)) for r in step.requests] == [
        (0, 3, 2, "verify"), (3, 5, 1, "verify"), (5, 10, 0, "prefill")
    ]  # fmt: skip
    if weighs:
        assert step.requests[0].weights == pytest.approx((1, first[1], first[1] * second[1]))
        assert step.requests[1].weights == pytest.approx((1, first[0])) and step.requests[2].weights is None
    else:
        assert all(request.weights is None for request in step.requests)
        assert experts.drafted.weights("a", [0], 2) is None, "nothing was computed"


# --- where they are known ---------------------------------------------------------------------------------------------


def engine(
    asynchronous: bool = False, v2: bool = False, ranks: int = 1, graphs: str = "PIECEWISE", **speculation
) -> SimpleNamespace:
    known = {"method": "eagle3", "parallel_drafting": False}
    known |= {"use_local_argmax_reduction": False, "use_heterogeneous_vocab": False}
    return SimpleNamespace(
        speculative_config=SimpleNamespace(**known | speculation),
        scheduler_config=SimpleNamespace(async_scheduling=asynchronous),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode[graphs]),
        use_v2_model_runner=v2,
    )


@pytest.mark.parametrize("method", ["eagle", "eagle3", "draft_model"])
def test_chains_of_a_draft_model_can_be_weighted(method: str) -> None:
    for v2 in (False, True):
        assert drafts.unweighted(engine(method=method, v2=v2, asynchronous=v2)) is None
    assert drafts.unweighted(SimpleNamespace(speculative_config=None)) is None, "every row is certain"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        *(
            ({"method": name}, f"{name} gives no probabilities.*EAGLE-3")
            for name in ("ngram", "suffix", "medusa", "mtp")
        ),
        ({"parallel_drafting": True}, r"parallel drafting \(eagle3\)"),
        ({"use_local_argmax_reduction": True}, "use_local_argmax_reduction.*drop use_local"),
        ({"use_heterogeneous_vocab": True, "method": "draft_model"}, "use_heterogeneous_vocab.*drop use_het"),
        ({"v2": True, "ranks": 2}, "not tried with several ranks"),
        ({"v2": True, "graphs": "FULL_AND_PIECEWISE"}, "an H100 .* stood still; add --enforce-eager"),
        ({"v2": True, "method": "dspark"}, "dspark gives no probabilities"),
        ({"v2": True, "enable_adaptive_verification": True}, "vLLM cuts drafts itself"),
        ({"asynchronous": True}, "--no-async-scheduling"),
    ],
    ids=str,
)
def test_why_other_drafts_cannot(given: dict, says: str) -> None:
    reason = drafts.unweighted(engine(**given))
    assert reason is not None and re.search(says, str(reason)), reason
