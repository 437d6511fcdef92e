"""Several agents: their requests are the recorded ones bit by bit, their loop is closed, their measures are right."""

from __future__ import annotations

import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.agents import recorded, run, served, shared_steps
from benchmarks.agents.recorded import AGENTS, Recording
from benchmarks.common import TOY, PlanError
from benchmarks.papers.drafts_account import Machine
from benchmarks.peers import llama
from benchmarks.serving import engine
from benchmarks.shapes import routing
from benchmarks.shapes.shape import Shape
from vllm_spac.recording.trace_file import TraceFacts

MODEL = TOY / "models" / "target"
SMALL = Recording.read(1 / 32, 1 / 4)


def test_requests_are_the_recorded_ones_bit_by_bit() -> None:
    """All prompts, lengths and schemas of 16 agents, as the toy's tokenizer reads them, whatever the tree's texts."""
    assert SMALL.describe(MODEL) == {
        "scale": 1 / 32,
        "answer_scale": 1 / 4,
        "context": 961,
        "xxh3_64": "478d58b44db60a35",
    }


def test_a_turn_goes_on_from_the_one_before() -> None:
    """Prompts grow by an answer and a result; agents share the prefix and nothing after it, and runs share nothing."""
    prefix = SMALL.prefix_of(MODEL, 3)
    asked = SMALL.agents(MODEL, AGENTS, 3)
    for turns in asked:
        for before, after in pairwise(turns):
            assert after.ids[: len(before.ids)] == before.ids
            assert len(after.ids) > len(before.ids) + before.tokens
        assert turns[0].ids[: len(prefix)] == prefix
        assert len(turns[-1].ids) + turns[-1].tokens == SMALL.context
    firsts = [tuple(turns[0].ids[len(prefix) : len(prefix) + 16]) for turns in asked]
    assert len(set(firsts)) == AGENTS
    assert prefix[:16] != SMALL.prefix_of(MODEL, 4)[:16], "a prefix cache would find the run before"


def test_agents_do_the_same_work_in_another_order() -> None:
    sizes = [[(request.tokens, request.schema is not None) for request in turns] for turns in SMALL.agents(MODEL, 4, 0)]
    assert len({tuple(each) for each in sizes}) == 4
    assert len({tuple(sorted(each)) for each in sizes}) == 1
    assert Counter(structured for _, structured in sizes[0]) == {True: 2, False: 2}


def test_a_shape_without_a_tokenizer_follows_streams(tmp_path: Path) -> None:
    """The prefix follows one stream, and each agent's own tokens another; no answer has a schema."""
    folder = Shape.parse("shape:tiny@layers=2").write()
    turns = SMALL.agents(folder, 2, 0)
    prefix = len(SMALL.prefix_of(folder, 0))
    for agent, (first, *_) in enumerate(turns):
        assert {token % routing.STREAMS for token in first.ids[:prefix]} == {0}
        assert {token % routing.STREAMS for token in first.ids[prefix:]} == {1 + agent}
        assert first.schema is None


@pytest.mark.parametrize(("scale", "answers"), [(0, 1), (1, -1)])
def test_scales_are_positive(scale: float, answers: float) -> None:
    with pytest.raises(PlanError, match="positive"):
        Recording.read(scale, answers)


@pytest.mark.parametrize("agents", [0, AGENTS + 1])
def test_only_recorded_agents_are_asked(agents: int) -> None:
    with pytest.raises(PlanError, match="recorded"):
        SMALL.agents(MODEL, agents, 0)


def answer(agent: int, turn: int, asked: float, *times: float, tokens: list[int] | None = None) -> served.Served:
    said = list(range(len(times))) if tokens is None else tokens
    return {"agent": agent, "turn": turn, "asked": asked, "times": list(times), "tokens": said}


def test_measures_are_those_of_the_timestamps() -> None:
    """Two agents: 0.5 and 2 s to the first token; 1 and 0.25 s per token; a gap of 1.5 s; 9 tokens in 10 s."""
    found = served.measures(
        [
            answer(0, 0, 10.0, 10.5, 11.0, 12.5),
            answer(1, 0, 11.0, 13.0, 13.25, 13.5, 13.75, 14.0),
            answer(0, 1, 19.0, 20.0),
        ]
    )
    assert found["tokens"] == 9 and found["seconds"] == 10 and found["tokens_per_s"] == pytest.approx(0.9)
    assert (found["ttft_p50"], found["ttft_p95"]) == (1.0, 2.0)
    assert (found["tpot_p50"], found["tpot_p95"]) == (0.25, 1.0)
    assert found["longest_gap"] == 1.5, "the wait between two turns is no gap"
    seldom = [answer(0, 0, 0.0, *range(1, 40)), answer(0, 1, 50.0, 51.0, 58.0)]
    assert served.measures(seldom)["longest_gap"] == 7.0


def test_percentiles_are_values() -> None:
    values = [float(each) for each in range(100, 0, -1)]
    assert served.percentile(values, 0.5) == 50 and served.percentile(values, 0.95) == 95
    assert served.percentile([3.0], 0.5) == served.percentile([3.0], 0.95) == 3


def test_answers_are_compared_by_agent_and_turn() -> None:
    ours = [answer(0, 0, 0, 1, tokens=[1]), answer(1, 0, 0, 1, tokens=[2])]
    theirs = [answer(1, 0, 0, 1, tokens=[2]), answer(0, 0, 0, 1, tokens=[7])]
    assert served.equal(ours, theirs) == 0.5


class SteppedEngine:
    """Gives each request one token a step, and up to two requests run at once."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[int]]] = []
        self.left: dict[str, list[int]] = {}

    def add_request(self, name: str, prompt: dict, sampling) -> None:
        self.asked.append((name, prompt["prompt_token_ids"]))
        self.left[name] = [0, sampling.max_tokens]
        assert (sampling.structured_outputs is None) == sampling.ignore_eos

    def step(self) -> list[SimpleNamespace]:
        outputs = []
        for name in list(self.left)[:2]:
            self.left[name][0] += 1
            done, most = self.left[name]
            if done == most:
                del self.left[name]
            said = SimpleNamespace(token_ids=list(range(done)))
            outputs.append(SimpleNamespace(request_id=name, outputs=[said], finished=done == most))
        return outputs


def test_each_agent_asks_again_when_it_has_its_answer() -> None:
    """Of three agents two run: the third is first served when one has no more to ask, and every answer is whole."""
    llm = SimpleNamespace(llm_engine=SteppedEngine(), generate=lambda *given, **more: [])
    schema = {"type": "object"}
    asked = [
        [recorded.Request([agent, turn], 2 + turn, schema if turn else None).line for turn in (0, 1)]
        for agent in (0, 1, 2)
    ]
    job = {"seed": 0, "spac": None, "speculative": None}
    found = engine.together(llm, job, asked, [1])["served"]
    assert [ids for _, ids in llm.llm_engine.asked] == [[0, 0], [1, 0], [2, 0], [0, 1], [1, 1], [2, 1]]
    assert [(each["agent"], each["turn"], len(each["tokens"])) for each in found][:2] == [(0, 0, 2), (1, 0, 2)]
    assert sorted((each["agent"], each["turn"], len(each["times"])) for each in found) == [
        (agent, turn, 2 + turn) for agent in (0, 1, 2) for turn in (0, 1)
    ]
    assert all(each["asked"] <= each["times"][0] <= each["times"][-1] for each in found)


class Completion(BaseHTTPRequestHandler):
    """Streams three tokens in two events, the last of them without any."""

    asked: list[dict] = []

    def do_POST(self) -> None:
        self.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()
        for event in ({"tokens": [5]}, {"tokens": [6, 7]}, {"tokens": [], "stop": True}):
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    def log_message(self, *given) -> None:
        pass


def test_llama_streams_each_agent_in_its_slot() -> None:
    server = HTTPServer(("127.0.0.1", 0), Completion)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        asked = [[{"ids": [agent, turn], "tokens": 3, "schema": None} for turn in (0, 1)] for agent in (0, 1)]
        asked[1][1]["schema"] = {"type": "object"}
        address = f"http://127.0.0.1:{server.server_port}"
        found = llama.together(address, {"agents": asked, "first": [9]})["served"]
    finally:
        server.shutdown()
        server.server_close()
    assert [(each["agent"], each["turn"], each["tokens"]) for each in found] == [
        (agent, turn, [5, 6, 7]) for agent in (0, 1) for turn in (0, 1)
    ]
    assert all(len(each["times"]) == 3 and each["times"][1] == each["times"][2] for each in found)
    first, own = Completion.asked[:2], Completion.asked[2:]
    assert sorted(each["id_slot"] for each in first) == [0, 1] and {tuple(each["prompt"]) for each in first} == {(9,)}
    assert all(each["id_slot"] == each["prompt"][0] and each["cache_prompt"] and each["stream"] for each in own)
    assert [each["prompt"] for each in own if "json_schema" in each] == [[1, 1]]
    assert all(each["ignore_eos"] == ("json_schema" not in each) for each in own)


def test_rows_are_medians_of_their_rounds() -> None:
    stock, spac = (
        run.Participant(name, SimpleNamespace(pid=0), slots) for name, slots in (("stock", None), ("spac", "25%"))
    )

    def reply(seconds: float, token: int, read: int) -> dict:
        return {"served": [answer(0, 0, 0.0, seconds, 2 * seconds, tokens=[1, token])], "read_bytes": read}

    answers = [
        [reply(1, 5, 0), reply(2, 5, 100)],
        [reply(1, 5, 0), reply(3, 5, 300)],
        [reply(1, 5, 0), reply(4, 6, 200)],
        [reply(1, 5, 0), reply(9, 5, 900)],
    ]
    rows = list(run.rows_of("toy", [stock, spac], [1, 1, 1, 2], answers))
    assert [(row["engine"], row["agents"]) for row in rows] == [("stock", 1), ("stock", 2), ("spac", 1), ("spac", 2)]
    assert set(run.MEASURES) <= set(rows[0]) and rows[0]["as_stock"] is None
    assert rows[2]["tokens_per_s"] == pytest.approx(1 / 3) and rows[2]["bytes_per_token"] == 100
    assert rows[2]["as_stock"] == pytest.approx(2 / 3) and rows[3]["as_stock"] == 1
    assert rows[2]["longest_gap"] == 3 and rows[2]["slots"] == "25%"


# -- simulated ------------------------------------------------------------------------------------------------

FACTS = TraceFacts(2, 8, 2, 1 << 20, "made up")
MACHINE = Machine("rtx4090", "bf16", True)


def texts(requests: int, tokens: int, seed: int = 0) -> list[np.ndarray]:
    drawn = np.random.default_rng(seed)
    return [drawn.random((tokens, 2, 8)).argsort(axis=2)[:, :, :2].astype(np.uint8) for _ in range(requests)]


@pytest.mark.parametrize("schedule", [shared_steps.turns(5, 7, 2, 3), shared_steps.overlapping(texts(5, 7), 8, 2, 4)])
def test_a_schedule_has_each_token_once_and_in_order(schedule) -> None:
    known = texts(5, 7)
    trace = shared_steps.composed(schedule, known, FACTS)
    assert Counter(each for step in schedule for each in step) == dict.fromkeys(range(5), 7)
    assert max(map(len, schedule)) <= 3 and all(len(set(step)) == len(step) for step in schedule)
    at = [0] * 5
    for number, step in enumerate(schedule):
        for layer in range(2):
            record = 2 * number + layer
            rows = trace.ids[trace.record_start[record] : trace.record_start[record + 1]]
            assert (rows == np.stack([known[each][at[each], layer] for each in step])).all()
        for each in step:
            at[each] += 1


def test_overlap_puts_like_requests_together() -> None:
    """Of four requests two always select the same experts: they are in the same steps."""
    same, other = ([np.full((6, 2, 2), 0, np.uint8) + np.array([a, a + 1], np.uint8)] for a in (0, 4))
    schedule = shared_steps.overlapping([*same, *other, *same, *other], 8, 2, 4)
    assert {tuple(step) for step in schedule} == {(0, 2), (1, 3)}


def test_no_request_waits_for_more_steps_than_its_gap() -> None:
    schedule = shared_steps.overlapping(texts(8, 20), 8, 2, 5)
    for each in range(8):
        ran = [-1, *(number for number, step in enumerate(schedule) if each in step)]
        assert max(later - earlier for earlier, later in pairwise(ran)) <= 5


def test_a_gap_begins_with_a_token() -> None:
    assert shared_steps.longest_gap([[0, 1], [0], [0], [1]], [1.0, 2.0, 4.0, 4.5]) == 3.5
    assert shared_steps.longest_gap([[0], [0], [1]], [1.0, 2.0, 4.0]) == 4, "nor may a request wait to begin"


@pytest.mark.parametrize("way", shared_steps.WAYS)
def test_nothing_is_faster_than_the_ceiling(way: str) -> None:
    known = texts(4, 30)
    trace = shared_steps.composed(shared_steps.turns(4, 30, 4, 1), known, FACTS)
    _, ends = shared_steps.replay(trace, MACHINE, 0.5, way)
    assert len(ends) == 30 and ends == sorted(ends)
    assert shared_steps.ceiling(trace, MACHINE, 0.5, "CPU" in way) < ends[-1]
    resident = shared_steps.ceiling(trace, MACHINE, 1.0, False)
    costs = MACHINE.costs(2)
    at_most = 30 * (costs.other + 2 * 8 * float(costs.fast.seconds(MACHINE.expert_bytes, 4)))
    assert 30 * costs.other < resident <= at_most


def test_recorded_streams_are_whole_requests() -> None:
    found = shared_steps.streams(shared_steps.TRACE)
    assert len(found) >= max(shared_steps.AGENTS)
    assert {text.shape for text in found} == {(104, 30, 8)}
    assert all(len(set(text[5, 7].tolist())) == 8 for text in found)
