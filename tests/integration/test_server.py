"""`vllm serve --plugin spac` as a user runs it: OpenAI client, many requests at once, metrics, a dying worker.

Which requests share a step depends on when they arrive, and on the guard: hence float32, see ``parity/exactness.py``.
"""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from pathlib import Path

import engines
import forked
import psutil
import pytest
from exactness import first_difference
from vllm_server import MAX_TOKENS, PATIENCE, PROMPTS, TARGET, Server

pytestmark = pytest.mark.timeout(2 * 600)  # a server starts in the first test

STOCK = """
import json, sys
sys.path.insert(0, sys.argv[1])
import engines
from vllm import SamplingParams
model, prompts, max_tokens, options = json.loads(sys.argv[2])
with engines.engine(model, skip_tokenizer_init=False, **options) as llm:
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens), use_tqdm=False)
    print(json.dumps([output.outputs[0].text for output in outputs]))
"""


@pytest.fixture(scope="module")
def answers() -> list[str]:
    """What stock vLLM says, without a server; ``soak/`` compares with one."""
    options = {"max_model_len": 512, "max_num_seqs": 16, "max_num_batched_tokens": 2048, "dtype": "float32"}
    given = json.dumps([str(TARGET), PROMPTS, MAX_TOKENS, options])
    return forked.answer(forked.run(["-c", STOCK, Path(engines.__file__).parent, given]))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spac")
    ngram = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}'
    flags = ["--plugin", "spac", "--spac-slots", "25%", "--spac-disk-dir", str(folder), "--spac-http", "control"]
    flags += ["--speculative-config", ngram, "--spac-guard", "off"]  # drafts in every step, whatever they take
    server = Server(folder, *flags)
    try:
        yield server.wait()
    finally:
        server.stop()


def test_sixteen_requests_at_once_get_stock_answers(server, answers):
    assert len(set(answers)) > 8
    assert first_difference(server.complete_all(), answers) is None


def test_the_log_says_what_was_chosen(server):
    lines = [line for line in server.log.read_text().splitlines() if "spac: mode=" in line]
    assert len(lines) == 1
    assert re.search(
        r"mode=exact, slots=96 of 384 experts \(25\.0%.*store=disk .*(direct|buffered).*policy=reuse", lines[0]
    )
    assert "Packing experts" in server.log.read_text()
    assert server.log.read_text().count("spac: prompts wait between their chunks") == 1, "some experts have no slot"


def test_stats_and_metrics_agree(server):
    server.complete("import os\n")
    stats = json.loads(server.get("/spac/stats"))["workers"][0]
    names = ("hits", "misses", "loads", "waves")
    assert all(stats[name] > 0 for name in names)
    lines = {f'vllm:spac_{name}_total{{worker="0"}} {float(stats[name])}' for name in names}
    metrics = server.metrics_where(lambda metrics: lines <= set(metrics.splitlines()))
    assert re.search(r'^vllm:spac_steps_total\{kind="verify",worker="0"\} [1-9]', metrics, re.M)
    assert stats["bytes"]["disk"] == stats["loads"] * stats["expert_bytes"]
    assert stats["resident"] <= stats["slots"] == 96


def test_the_budget_changes_while_serving(server, answers):
    def change(body: str, **more: str) -> dict:
        headers = {"Content-Type": "application/json"} | more
        request = urllib.request.Request(f"{server.url}/spac/budget", body.encode(), headers, method="POST")
        return json.loads(urllib.request.urlopen(request, timeout=PATIENCE).read())

    changed = change('{"budget": 8, "when": "decode"}')
    assert changed["workers"][0]["budget"] == 8 and changed["mode"].startswith("lossy (budget 8, selected")
    assert server.complete_all() != answers
    dropped = re.compile(r'^vllm:spac_budget_dropped_weight_total{worker="0"} [1-9]', re.M)
    metrics = server.metrics_where(dropped.search)
    assert re.search(r'^vllm:spac_lossy{worker="0"} 1.0$', metrics, re.M)
    for body, text in (
        ('{"budget": 7}', "every token 8 experts"),
        ('{"budgets": 9}', "known: budget"),
        ('{"budget": 8, "votes": "path"}', "ngram gives no probabilities"),
        ("8", "mapping"),
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            change(body)
        assert refused.value.code == 400 and text in refused.value.read().decode()
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    for headers, code in ((form, 415), ({"Origin": "http://evil.test"}, 403), ({"Origin": "null"}, 403)):
        with pytest.raises(urllib.error.HTTPError) as refused:
            change("{}", **headers)
        assert refused.value.code == code and "spac: " in refused.value.read().decode()
    assert json.loads(server.get("/spac/stats"))["workers"][0]["mode"] == "lossy", "a refused change changes nothing"
    change("{}", Origin=server.url)
    assert first_difference(server.complete_all(), answers) is None
    assert "mode=lossy (budget 8" in server.log.read_text()


def test_a_dead_worker_takes_the_server_down(server):
    """Last: the server is gone afterwards."""
    workers = [p for p in psutil.Process(server.process.pid).children(recursive=True) if "Worker" in p.name()]
    if not workers:
        pid = re.search(r"VllmWorker-0 pid=(\d+)|\(Worker pid=(\d+)\)", server.log.read_text())
        workers = [psutil.Process(int(next(filter(None, pid.groups()))))]
    workers[0].kill()
    assert server.process.wait(PATIENCE) != 0 or "died" in server.log.read_text()
    assert re.search(r"[Ww]orker.*(died|terminated|dead|exit)|EngineDeadError", server.log.read_text())


def test_prompts_do_not_wait_where_all_experts_fit(tmp_path):
    """Which its workers alone know, in their own processes; with the default of slots."""
    server = Server(tmp_path, "--plugin", "spac", "--spac-disk-dir", str(tmp_path))
    try:
        server.wait().complete(PROMPTS[0])
        log = server.log.read_text()
    finally:
        server.stop()
    assert "slots=384 of 384 experts" in log and "prompts wait" not in log
