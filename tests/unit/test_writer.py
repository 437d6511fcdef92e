"""Routing traces: written traces are read back, damaged ones are refused, and a kill leaves the old file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from vllm_spac.core import RequestRows, RowKind, Step
from vllm_spac.errors import ConfigError
from vllm_spac.recording import trace_writer
from vllm_spac.recording.trace_file import FORMAT, PADDING, ROW_KINDS, Trace, TraceFacts
from vllm_spac.recording.trace_writer import TraceWriter, check_target
from vllm_spac.tools.traces.synthetic import decoded, synthetic_trace
from vllm_spac.tools.traces.trace_statistics import accepted_by_depth, draft_depths
from vllm_spac.tools.traces.trace_text import Text

FACTS = TraceFacts(layers=3, experts=8, top_k=2, expert_bytes=100, model="toy")
STEPS, ROWS = ("step_kind", "step_rows", "step_tokens"), ("row_kind", "row_back", "row_accepted")
COLUMNS = (*STEPS, *ROWS, "record_step", "record_layer", "ids", "weights")


def decode(rows: int = 1) -> Step:
    return Step(tuple(RequestRows(row, row + 1, RowKind.DECODE) for row in range(rows)))


def chosen(rows: int, seed: int = 0, facts: TraceFacts = FACTS) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((rows, facts.experts)), axis=1)[:, : facts.top_k]
    return ids, rng.random((rows, facts.top_k), dtype=np.float32)


def observe(writer: TraceWriter, layer: int, ids: np.ndarray, weights: np.ndarray) -> None:
    writer.observe([layer], ids[None], weights[None])


def same(a: Trace, b: Trace) -> bool:
    return a.facts == b.facts and all(
        np.array_equal(getattr(a, name), getattr(b, name)) and getattr(a, name).dtype == getattr(b, name).dtype
        for name in COLUMNS
    )


def test_a_run_by_hand(tmp_path: Path) -> None:
    """A prompt of 3 beside a request that verifies 2 drafts; then a dummy run; then plain decode with padding."""
    writer = TraceWriter(tmp_path / "a.trace", FACTS)
    first = Step((RequestRows(0, 3, RowKind.PREFILL), RequestRows(3, 6, RowKind.VERIFY, drafts=2)))
    ids, weights = chosen(6)
    observe(writer, 0, ids, weights)  # before any step
    writer.begin_step(first)
    for layer in range(3):
        observe(writer, layer, (ids + layer) % 8, weights)
    writer.end_step([0, 2])
    writer.begin_step(Step())
    observe(writer, 1, ids, weights)
    writer.end_step()
    writer.begin_step(decode(2))
    observe(writer, 2, ids, weights)  # rows 2 to 5 are padding
    writer.end_step()
    trace = Trace.load(writer.finish())

    assert trace.facts == FACTS and trace.steps == 2 and trace.records == 4
    assert trace.step_kind.tolist() == [3, 1] and trace.step_tokens.tolist() == [2, 2]
    assert trace.step_rows.tolist() == [6, 2]
    assert [ROW_KINDS[kind] for kind in trace.row_kind] == ["prefill"] * 3 + ["verify"] + ["draft"] * 2 + ["decode"] * 2
    assert trace.row_back.tolist() == [0] * 4 + [1, 1] + [0] * 2
    assert trace.row_accepted.tolist() == [1] * 5 + [0] + [1] * 2
    assert trace.record_step.tolist() == [0, 0, 0, 1] and trace.record_layer.tolist() == [0, 1, 2, 2]
    assert trace.ids.tolist() == np.concatenate([ids, (ids + 1) % 8, (ids + 2) % 8, ids[:2]]).tolist()
    assert np.array_equal(trace.weights[:6], weights.astype(np.float16))
    assert trace.counted().tolist() == ([False] * 3 + [True] * 3) * 3 + [True] * 2

    both, plain = trace.step_counts()
    for layer in range(3):
        expected = np.bincount((ids[3:] + layer).ravel() % 8, minlength=8)
        assert both[layer * 8 : layer * 8 + 8].tolist() == expected.tolist()
    assert plain[:16].tolist() == [-1] * 16, "layers 0 and 1 did not run"
    assert plain[16:].tolist() == np.bincount(ids[:2].ravel(), minlength=8).tolist()


def written(path: Path, request: RequestRows, *end: list) -> Trace:
    """The trace of one step of one request."""
    writer = TraceWriter(path, FACTS)
    writer.begin_step(Step((request,)))
    observe(writer, 0, *chosen(request.stop))
    writer.end_step(*end)
    return Trace.load(writer.finish())


def test_the_end_of_a_prompt(tmp_path: Path) -> None:
    trace = written(tmp_path / "t", RequestRows(0, 40, RowKind.PREFILL), [1])
    found = trace.prompt_rows(0)
    assert found is not None and found.shape == (32, FACTS.total)
    for row, ids in zip(found, chosen(40)[0][8:], strict=True):
        assert np.flatnonzero(row).tolist() == sorted(ids)
    assert written(tmp_path / "u", RequestRows(0, 40, RowKind.VERIFY, drafts=39)).prompt_rows(0) is None


def test_a_tree_by_hand(tmp_path: Path) -> None:
    """Drafts 0 and 1 follow the row before them, 2 and 4 follow 0, 3 follows 1; 1 and 3 are accepted."""
    tree = RequestRows(0, 6, RowKind.VERIFY, drafts=5, parents=(0, 0, 1, 2, 1))
    trace = written(tmp_path / "t", tree, [3], [[1, 3]])
    assert trace.row_back.tolist() == [0, 1, 2, 2, 2, 4]
    assert trace.row_accepted.tolist() == [1, 0, 1, 0, 1, 0]
    assert draft_depths(trace).tolist() == [0, 1, 1, 2, 2, 2]
    assert accepted_by_depth(trace) == [(2, 1), (3, 1)]


def test_drafts_of_which_the_number_of_tokens_is_not_known(tmp_path: Path) -> None:
    trace = written(tmp_path / "t", RequestRows(0, 3, RowKind.VERIFY, drafts=2))
    assert trace.row_accepted.tolist() == [1, 2, 2] and accepted_by_depth(trace) == []
    assert trace.step_tokens.tolist() == [0]


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3), st.booleans()), max_size=12), st.integers(1, 200))
@settings(max_examples=examples(40), deadline=None)
def test_what_is_written_is_read_back(tmp_path_factory, runs, flush) -> None:
    """Whatever the sizes of steps and buffers; steps that were not ended leave nothing."""
    path = tmp_path_factory.mktemp("trace") / "t"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_writer, "_FLUSH_BYTES", flush)
        writer, expected, layers = TraceWriter(path, FACTS), [], []
        for number, (rows, count, ends) in enumerate(runs):
            ids, weights = chosen(rows, number)
            writer.begin_step(decode(rows))
            for layer in range(count):
                observe(writer, layer, ids, weights)
            if ends:
                writer.end_step()
                expected += [ids] * count
                layers += range(count)
        trace = Trace.load(writer.finish())
    assert trace.steps == sum(ends for *_, ends in runs)
    assert trace.record_layer.tolist() == layers
    assert trace.ids.tolist() == [row for ids in expected for row in ids.tolist()]


def test_saving_goes_on_and_finishing_leaves_one_file(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t", FACTS)
    for number in range(3):
        writer.begin_step(decode())
        observe(writer, 0, *chosen(1, number))
        writer.end_step()
        assert Trace.load(writer.save()).steps == number + 1
        assert [path.name for path in tmp_path.iterdir()] == ["t"]
    assert Trace.load(writer.finish()).steps == 3
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_failing_in_mid_save_leaves_what_was_there(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "t").write_text("precious")
    writer = TraceWriter(tmp_path / "t", FACTS)
    writer.begin_step(decode())
    observe(writer, 0, *chosen(1))
    writer.end_step()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vllm_spac.recording.trace_file.shutil.copyfileobj", full)
    with pytest.raises(ConfigError, match="No space left"):
        writer.finish()
    assert [path.read_text() for path in tmp_path.iterdir()] == ["precious"]


def record(writer: TraceWriter, seed: int = 0) -> None:
    writer.begin_step(decode())
    observe(writer, 0, *chosen(1, seed))
    writer.end_step()


def test_a_run_that_recorded_nothing_leaves_what_was_there(tmp_path: Path) -> None:
    saved = synthetic_trace(layers=2, experts=8, top_k=2, steps=5)
    saved.save(tmp_path / "t")
    writer = TraceWriter(tmp_path / "t", FACTS)
    writer.begin_step(Step())
    writer.end_step()
    writer.save()
    assert same(Trace.load(writer.finish()), saved)


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "t").symlink_to(tmp_path / "real" / "t")
    writer = TraceWriter(tmp_path / "t", FACTS)
    record(writer)
    writer.finish()
    assert (tmp_path / "t").is_symlink() and Trace.load(tmp_path / "real" / "t").steps == 1


# --- what a recording may replace ------------------------------------------------------------------------------------


def test_a_trace_may_be_replaced_and_what_it_is_is_known(tmp_path: Path) -> None:
    assert check_target(tmp_path / "t") is None
    synthetic_trace(layers=2, experts=8, top_k=2, steps=5).save(tmp_path / "t")
    assert check_target(tmp_path / "t").experts == 8
    (tmp_path / "link").symlink_to(tmp_path / "t")
    assert check_target(tmp_path / "link").experts == 8
    (tmp_path / "empty").touch()
    assert check_target(tmp_path / "empty") is None, "nothing is lost"


@pytest.mark.parametrize("content", [b"precious", b"\x00" * 4096, b"\xff" * 4096, b"\x02" + b"\x00" * 7 + b"{}"])
def test_no_other_file_is_replaced(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(ConfigError, match="no trace; remove it first, or name another"):
        check_target(tmp_path / "t")
    assert (tmp_path / "t").read_bytes() == content


@pytest.mark.parametrize("target", ["/dev/null", "/dev", "/proc/x", "/no/such/folder/t"])
def test_what_is_never_replaced(tmp_path: Path, target: str) -> None:
    (tmp_path / "t").symlink_to(target)
    for path in (target, tmp_path / "t"):
        with pytest.raises(ConfigError, match="cannot be written.*name another file"):
            check_target(path)


def test_memory_is_bounded(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t", FACTS)
    ids, weights = chosen(1000)
    for _ in range(300):
        writer.begin_step(decode(1000))
        for layer in range(3):
            observe(writer, layer, ids, weights)
        writer.end_step()
        assert sum(len(part) for step in writer._recorded for part in (*step.ids, *step.weights)) < 1 << 20
    assert Trace.load(writer.finish()).records == 900


def test_many_experts(tmp_path: Path) -> None:
    facts = TraceFacts(layers=1, experts=300, top_k=2)
    writer = TraceWriter(tmp_path / "t", facts)
    writer.begin_step(decode())
    writer.observe([0], np.array([[[299, 7]]]), np.ones((1, 1, 2)))
    writer.end_step()
    trace = Trace.load(writer.finish())
    assert trace.ids.tolist() == [[299, 7]] and trace.ids.dtype == np.uint16


def test_misuse_is_an_error(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t", FACTS)
    writer.begin_step(decode(2))
    ids, weights = chosen(2)
    for arguments in ((0, ids[:1], weights[:1]), (3, ids, weights), (0, ids[:, :1], weights), (0, ids, weights[:1])):
        with pytest.raises(AssertionError):
            observe(writer, *arguments)
    writer.cancel()


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    synthetic_trace(layers=2, experts=8, top_k=2, steps=5, drafts=1).save(tmp_path / "t")
    return tmp_path / "t"


def test_files_that_are_no_traces(tmp_path: Path, saved: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "text").write_text("hello, this is no safetensors file")
    (tmp_path / "cut").write_bytes(saved.read_bytes()[:-1])
    save_file({"ids": np.zeros((1, 2), np.uint8)}, tmp_path / "foreign")
    for name in ("missing", "empty", "text", "cut", "foreign", ""):
        with pytest.raises(ConfigError, match="trace"):
            Trace.load(tmp_path / name)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda c, m: m.update(format="spac-trace-3"),
        lambda c, m: m.update(format="spac-trace-1"),
        lambda c, m: c.pop("row_back"),
        lambda c, m: c.update(row_back=c["row_back"][:-1]),
        lambda c, m: c.update(row_back=np.zeros_like(c["row_back"])),
        lambda c, m: c.update(row_back=2 * c["row_back"]),
        lambda c, m: c.update(row_back=np.ones_like(c["row_back"])),
        lambda c, m: c.update(row_accepted=np.zeros_like(c["row_accepted"])),
        lambda c, m: c.update(row_accepted=c["row_accepted"] + np.uint8(2)),
        lambda c, m: m.pop("experts"),
        lambda c, m: m.update(layers="many"),
        lambda c, m: m.update(layers="1"),
        lambda c, m: m.update(experts="7"),
        lambda c, m: m.update(top_k="3"),
        lambda c, m: m.update(layers="0"),
        lambda c, m: c.pop("record_step"),
        lambda c, m: c.update(extra=np.zeros(1)),
        lambda c, m: c.update(ids=c["ids"][:-1]),
        lambda c, m: c.update(ids=c["ids"].astype(np.uint16)),
        lambda c, m: c.update(weights=c["weights"][:-1]),
        lambda c, m: c.update(row_kind=c["row_kind"][:-1]),
        lambda c, m: c.update(row_kind=c["row_kind"] + np.uint8(PADDING)),
        lambda c, m: c.update(step_kind=c["step_kind"] + np.uint8(4)),
        lambda c, m: c.update(step_tokens=c["step_tokens"][:-1]),
        lambda c, m: c.update(record_step=c["record_step"][::-1].copy()),
        lambda c, m: c.update(record_step=c["record_step"] + np.uint32(1)),
        lambda c, m: c.update(record_layer=c["record_layer"][:-1]),
    ],
)
def test_contradictions_are_refused(saved: Path, spoil) -> None:
    columns = load_file(saved)
    header = saved.read_bytes()
    metadata = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])["__metadata__"]
    assert metadata["format"] == FORMAT
    save_file(columns, saved, metadata)
    Trace.load(saved)  # rewriting alone spoils nothing
    spoil(columns, metadata)
    save_file(columns, saved, metadata)
    with pytest.raises(ConfigError):
        Trace.load(saved)


def test_accepted_drafts_form_a_path(tmp_path: Path) -> None:
    tree = {"drafts": 3, "parents": (0, 0, 1)}
    for number, path in enumerate(([2], [0, 1], [1, 2])):
        with pytest.raises(ConfigError, match="an accepted draft follows|two accepted drafts"):
            written(tmp_path / str(number), RequestRows(0, 4, RowKind.VERIFY, **tree), [len(path) + 1], [path])


def test_traces_of_chains_are_read_and_stay_what_they_are(tmp_path: Path) -> None:
    """As written before drafts could be trees."""
    trace = synthetic_trace(layers=2, experts=8, top_k=2, steps=5, drafts=2)
    chains = dataclasses.replace(trace, row_back=None, row_accepted=None)
    chains.save(tmp_path / "t")
    found = Trace.load(tmp_path / "t")
    assert set(load_file(tmp_path / "t")) == set(COLUMNS) - {"row_back", "row_accepted"}
    assert found.row_back is None and draft_depths(found).tolist() == draft_depths(trace).tolist() == [0, 1, 2] * 5
    assert Text.of(found).ids.tolist() == Text.of(trace).ids.tolist()


# --- synthetic traces ------------------------------------------------------------------------------------------------


def test_requests_decode_together_and_continue_where_their_steps_ended() -> None:
    """Token t of request r is routed to expert 8 r + t in both layers."""
    facts = TraceFacts(layers=2, experts=16, top_k=1)
    tokens = np.arange(16, dtype=np.uint8).reshape(2, 8, 1, 1).repeat(2, axis=2)
    trace = decoded(facts, tokens, None, np.array([[0, 2, 0], [1, 0, 1]]), drafts=2)
    steps = [[0, 1, 2, 8, 9, 10], [1, 2, 3, 10, 11, 12], [4, 5, 6, 11, 12, 13]]
    assert trace.ids.reshape(3, 2, 6).tolist() == [[step, step] for step in steps]
    assert trace.row_kind.reshape(3, 2, 3).tolist() == [[[2, 3, 3]] * 2] * 3
    assert trace.step_tokens.tolist() == [3, 4, 3]
