"""Drafts that return with their step are not asked for again; others are, as stock vLLM does."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.worker.gpu_worker import Worker

from vllm_spac.integration.hooks import patches
from vllm_spac.integration.stepping.v1 import draft_handover

ASKED = DraftTokenIds(["asked"], [[7]])


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in (
        (Worker, "sample_tokens"),
        (MultiprocExecutor, "sample_tokens"),
        (MultiprocExecutor, "take_draft_token_ids"),
    ):
        monkeypatch.setattr(owner, name, vars(owner)[name])  # back to the present one afterwards
    draft_handover.install_in_worker()
    draft_handover.install_in_engine_core()
    assert patches.is_wrapped(f"{patches.EXECUTOR}.take_draft_token_ids")


def worker(monkeypatch: pytest.MonkeyPatch, drafts: DraftTokenIds | None, speculates: bool = True) -> Worker:
    """A worker of a managed model whose runner has proposed ``drafts``."""
    made = object.__new__(Worker)
    made.vllm_config = SimpleNamespace(
        speculative_config=object() if speculates else None, scheduler_config=SimpleNamespace(async_scheduling=False)
    )
    made.model_runner = SimpleNamespace(
        sample_tokens=lambda grammar: ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0}),
        take_draft_token_ids=lambda: drafts,
    )
    monkeypatch.setattr(draft_handover, "managed_experts", lambda runner: object())
    return made


def executor(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> tuple[MultiprocExecutor, list[str]]:
    """An executor whose calls reach ``worker`` through pickle, and the names of these calls."""
    made, calls = object.__new__(MultiprocExecutor), []
    made.output_rank, made.kv_output_aggregator, made.ec_output_aggregator = 0, None, None

    def call(method: str, *_, args: tuple = (), **__):
        calls.append(method)
        if method == "take_draft_token_ids":
            return ASKED
        return pickle.loads(pickle.dumps(worker.sample_tokens(*args)))

    monkeypatch.setattr(made, "collective_rpc", call, raising=False)
    return made, calls


@pytest.mark.parametrize("drafts", [None, DraftTokenIds(["a"], [[]]), DraftTokenIds(["a"], [[1, 2]])])
def test_drafts_come_with_their_step(installed, monkeypatch, drafts) -> None:
    made, calls = executor(worker(monkeypatch, drafts), monkeypatch)
    for _ in range(2):
        made.sample_tokens(None)
        assert made.take_draft_token_ids() == drafts
    assert calls == ["sample_tokens"] * 2


def test_they_are_handed_over_once(installed, monkeypatch) -> None:
    """A step that samples nothing leaves nothing behind, so the worker is asked."""
    made, calls = executor(worker(monkeypatch, None), monkeypatch)
    made.sample_tokens(None)
    assert made.take_draft_token_ids() is None
    assert made.take_draft_token_ids() is ASKED
    assert calls == ["sample_tokens", "take_draft_token_ids"]


def test_without_a_drafter_nothing_is_enclosed(installed, monkeypatch) -> None:
    made, calls = executor(worker(monkeypatch, None, speculates=False), monkeypatch)
    made.sample_tokens(None)
    assert made.take_draft_token_ids() is ASKED
    assert calls == ["sample_tokens", "take_draft_token_ids"]
