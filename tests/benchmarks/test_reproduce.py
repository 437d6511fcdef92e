"""Every result has a page with its command and numbers, and comes from code and traces in the tree."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import pages, pictures, reproduce
from vllm_spac.integration.hooks import device

# Sentences of README.md and of the guides, with the expressions of their numbers; see benchmarks/pages.py. Where a
# sentence moves it is found again, where it goes its line here goes.
LADDER = "{% set rows = result('scaled_rtx4090_toy_local').rows|selectattr('slots', 'eq', '25%')|list %}"
SOAK = "{% set soak = result('soak_toy') %}"
GPU = """{% set times, slots, over, faster = [[], [], []], [], [], [] %}{% for run in (4, 8, 11) %}{% set ms = {} %}
{% for row in result('gpu_h100').serving if row.run == run and row.speculation == "none" %}
{% do ms.update({row.name: row.decode|map(attribute='ms_per_token')|list}) %}{% endfor %}
{% for uva, ptr, by_slots in zip(ms['stock uva'], ms.ptr, ms.slots) %}
{% do times[loop.index0].append(ptr / uva) %}{% do slots.append(by_slots / uva) %}{% do over.append(by_slots / ptr) %}
{% do faster.append(uva / ptr) %}{% endfor %}{% endfor %}"""
SERVED = """{% set ms = {} %}{% for row in result('gpu_h100').serving if row.speculation == "none" %}
{% do ms.update({(row.name, row.run): row.decode|map(attribute='ms_per_token')|list}) %}{% endfor %}"""
PEERS = "{% set peers = result('peers_8gb_toy').rows[0].peers %}"
BATCHES = """{% set found = [] %}{% for one in result('stock_batches').dtypes.values() %}{% set rows = [] %}
{% for name, row in one.by_batch.items() if name != 'alone once more' %}{% do rows.append(row) %}{% endfor %}
{% do found.append(rows|sum(attribute='with_other_tokens') ~ ' of ' ~ rows|sum(attribute='requests')) %}{% endfor %}"""
HITS = """{% set flat, real = result('toy_policies').mean_hit_rates, result('real_policies').mean_hit_rates %}
{% set at = result('toy_policies').shares_percent.index(25) %}"""
MATMULS = "{% set found = result('moe_spec_matmuls').calculated %}"
RECALL = """{% set flat, real = result('toy_predictors').models.flat, result('real_predictors').models.real %}
{% set found = [] %}{% for name in ('gate', 'quasi_hidden') %}
{% do found.append('`' ~ name ~ '` ' ~ flat[name].recall_at_k|pct ~ ' / ' ~ real[name].recall_at_k|pct) %}
{% endfor %}"""
BUDGETS = """{% set sweep = result('real_6_quality') %}{% set points, saved = {}, [] %}
{% for budget in (24, 16) %}{% set point = point_of(sweep, 'selected', budget, none) %}
{% do points.update({budget: point.perplexity_change|pct(1, '+') ~ ' ± ' ~
 point.perplexity_change_error|pct ~ ' %'}) %}
{% do saved.append((1 - point.distinct/sweep.natural.distinct)|pct(0)) %}{% endfor %}"""
SCORES = "{% set flat, real = result('toy_moe_spac').spread, result('real_moe_spac').spread %}"
ACCOUNT = """{% set at = {} %}{% for row in result('drafts_account').rows if row.machine == 'rtx4090, int4, attained' %}
{% do at.update({(row.slots, row.cpu, row.drafter, row.budget): row.over_no_drafts|f}) %}{% endfor %}"""
OWN = """{% set own = {} %}{% for row in result('real_drafts').rows if row.drafter == 'self25' %}
{% do own.update({row.machine: row}) %}{% endfor %}"""
TABLES = """{% set flat, real, at = result('toy_tables'), result('real_tables'), 1 %}
{% macro over(of, name, table='table4', base='MoE-SpAc') %}
{{ (of[table][name][at].tpot_ms / of[table][base][at].tpot_ms)|f }}{% endmacro %}
{% macro mean(of, table) %}{% set found = [] %}
{% for name, cells in of[table].items() if 'CPU' not in name and 'SpAc' not in name %}
{% do found.append(cells[at].tpot_ms) %}{% endfor %}
{{ (found|sum / 6 / of[table]['MoE-SpAc'][at].tpot_ms)|f }}{% endmacro %}"""
STREAMS = """{% set streams = result('real_streams').rows %}
{% set link = streams|selectattr('share_percent', 'eq', 25)|rejectattr('machine', 'in', ['rtx4090 + CPU experts',
 'rtx4090-int4 + CPU experts'])|map(attribute='best.gain')|list %}"""
PROMPT_READS = """{% set gpu = result('gpu_h100').kernels %}{% set copy = gpu.copy_bytes_per_second.pinned %}
{% set read = (gpu.rows|selectattr('rows', 'eq', 64)|first).pinned_bytes_per_second %}
{% set found = result('real_prompt_reads') %}{% set below = found.rows|selectattr('percent', 'eq', 25.0)
|selectattr('each', 'lt', found.many_rows)|list %}"""
STAGES = """{% set found = result('stages') %}{% set at = {} %}{% for row in found.rows %}{% do at.update({
(row.lanes, row.requests): row.stages.tokens_per_s / row.one.tokens_per_s}) %}{% endfor %}"""
SENTENCES = (
    STAGES + "two RTX 3090s in stages emit {{ at[16, 1]|f(1) }} times the tokens/s of one for a request, and"
    " {{ at[16, 8]|f(1) }} times for eight ([stages](../../benchmarks/results/stages.md))",
    PROMPT_READS + "below {{ found.many_rows }} rows per expert an expert is read"
    " [{{ below[-1].reads_of_each|f(3) }} times](../../benchmarks/results/prompt_reads.md). So they copy nothing"
    " after the router: that would gain the {{ (1 - read / copy)|pct(0) }} % by which a copy is faster",
    MATMULS + "[{{ found[0].launches }} launches per layer become {{ found[1].launches }}]"
    "(../../../benchmarks/results/moe_spec_matmuls.md), {{ (found[0].step_ms - found[1].step_ms)|f(0) }} to"
    " {{ (found[3].step_ms - found[4].step_ms)|f(0) }} ms less per step",
    ACCOUNT
    + "a head brings {{ at[0.25, true, 'head, chosen', none] }} to {{ at[0.25, true, 'strong head, chosen', none] }}"
    " times the tokens/s of none with CPU experts, {{ at[0.25, false, 'head, chosen', none] }} to"
    " {{ at[0.25, false, 'strong head, chosen', none] }} without",
    OWN + "*Calculated*, that is {{ own['rtx4090-int4'].gain['4']|f }} times the tokens/s on an RTX 4090 with 4-bit"
    " experts and a quarter of the slots, and {{ own['rtx4090-int4 + CPU experts'].gain['4']|f }} times where",
    TABLES + "{{ mean(real, 'table2')|trim }} / {{ mean(flat, 'table2')|trim }} times the mean of six caches",
    TABLES + "{{ over(real, 'without SG-Prefetcher')|trim }} / {{ over(flat, 'without SG-Prefetcher')|trim }} times"
    " static slots",
    TABLES
    + "{{ over(real, 'reuse, CPU experts', 'table2')|trim }} / {{ over(flat, 'reuse, CPU experts', 'table2')|trim }}"
    " times `reuse` with `waterfill`",
    TABLES + "{{ over(real, 'hot misses are loaded on demand')|trim }} /"
    " {{ over(flat, 'hot misses are loaded on demand')|trim }} times as long",
    TABLES + "{{ mean(real, 'table3')|trim }} times the mean of six caches,"
    " {{ over(real, 'reuse, CPU experts', 'table3')|trim }} times `reuse` with `waterfill`",
    TABLES + "SpecUE {{ over(real, 'without SpecUE (K = 1)')|trim }},"
    " AdaBC {{ over(real, 'without AdaBC (boundaries 3, 1)')|trim }},"
    " HetWB {{ over(real, 'without HetWB (threshold 2)')|trim }},"
    " SG-Prefetcher {{ over(real, 'without SG-Prefetcher')|trim }},"
    " SG-Evictor {{ over(real, 'without SG-Evictor (lru)')|trim }}, SD {{ over(real, 'without drafts')|trim }}",
    TABLES + "K = 1, 2 and 8: {% for k in (1, 2, 8) %}{{ over(real, 'K = %d'|format(k), 'figure5', 'K = 4')|trim }}"
    "{{ ', ' if k == 1 else ' and ' if k == 2 else '' }}{% endfor %} of the time of K = 4",
    TABLES + "{% for tokens in (128, 256, 512) %}"
    "{% set same = ', %d tokens'|format(tokens) %}"
    "{{ over(real, 'reuse, CPU experts, drafts' ~ same, 'figure5_length', 'MoE-SpAc' ~ same)|trim }}"
    "{{ ', ' if tokens == 128 else ' and ' if tokens == 256 else '' }}{% endfor %}"
    " after 128, 256 and 512 tokens",
    TABLES + "{{ over(real, 'CPU experts, drafter in 8 % of the memory', 'figure6', 'CPU experts, no drafts')|trim }}"
    " times as long with a drafter",
    TABLES + "brings {{ real.table2['MoE-SpAc'][at].prefetches_per_step|f(0) }} experts per step, and"
    " {{ real.table2['MoE-SpAc'][at].prefetch_hits_per_step|f(0) }} are used",
    SCORES + "{{ flat.frequency.mean[0]|f(1) }} and {{ flat.frequency.mean[-1]|f(1) }} (flat),"
    " {{ real.frequency.mean[0]|f(1) }} and {{ real.frequency.mean[-1]|f(1) }} (carved model)",
    BUDGETS + "perplexity {{ points[24] }} and {{ points[16] }}, {{ saved[0] }} and {{ saved[1] }} % fewer bytes",
    RECALL + "flat toy / carved model: {{ found|join(', ') }} %",
    HITS + "`lru` {{ flat.lru[at]|pct }} and {{ real.lru[2]|pct }} %, `layer_lru` {{ flat.layer_lru[at]|pct }} and"
    " {{ real.layer_lru[2]|pct }} %, `reuse` {{ flat.reuse[at]|pct }} and {{ real.reuse[2]|pct }} %",
    HITS + "{{ flat.utility[at]|pct }} and {{ flat.reuse[at]|pct }} % (flat), {{ real.utility[2]|pct }} and"
    " {{ real.reuse[2]|pct }} % (carved model)",
    LADDER + "{% set row = rows|selectattr('rung', 'eq', 'cpu')|first %}"
    "pays most on a scaled machine, {{ row.speedup|f }} ({{ row.speedup_interval|span(2, ' – ') }}) times",
    "{% set row = result('paired_tree_step_toy').rows[0] %}a step of a tree of 16 takes {{ row.step_ratio|f }} times",
    "{% set eight = {} %}{% for row in result('agents').rows if row.agents == 8 and 'toy' in row.model %}"
    "{% do eight.update({(row.engine, row.memory): row.tokens_per_s}) %}{% endfor %}8 of them got"
    " {{ (eight['spac', none] / eight['llama.cpp', 'weights'])|f(1) }} times llama.cpp's tokens per second with as many"
    " bytes of weights in RAM, and {{ (eight['spac', none] / eight['llama.cpp', 'all'])|f }} times where its memory"
    " held all",
    PEERS + "llama.cpp on a CPU machine: {{ peers[1]|ratio }} times its speed with as many bytes of weights in RAM",
    "{% set four = result('peers_int4_toy').rows %}"
    "{{ four[1].peers[1]|ratio }} with 4 bits. Where llama.cpp's memory holds all of them, it has"
    " {{ four[0].peers[0].ratio|f(2) }} of that speed",
    SERVED + "| vLLM's own offloading (UVA) | {{ ms['stock uva', 11]|map('f')|join(' | ') }} |",
    SERVED + "| vllm_spac | {{ ms['ptr', 11]|map('f')|join(' | ') }} |",
    SERVED + "| vLLM with all experts on the GPU, in another run | {{ ms['stock', 4]|map('f')|join(' | ') }} |",
    SOAK + "{{ '{:,}'.format(soak.steps) }} steps in {{ (soak.seconds/60)|f(0) }} minutes",
    SOAK + "{{ '{:,}'.format(soak.requests.aborted) }} of them aborted",
    SOAK + "all {{ '{:,}'.format(soak.requests.compared) }} answers outside of budgets equal stock's",
    SOAK + "{{ (soak.trends.rss.growth/1048576)|f(1) }} MiB more in the later half",
    "emit {{ result('paired_workers_toy').rows[0].ratio|f(1) }} times the tokens/s of an engine that reads each expert",
    "[{{ result('paired_workers_toy').rows[0].ratio|f }} times as fast](../../../benchmarks/results/workers.md)",
    "costs {{ result('worker_faults_toy').rows|selectattr('fault', 'eq', 'kill')|map(attribute='lost_seconds')|median"
    "|f(1) }} s, and no token",
    "no faster there ({{ result('paired_workers_divided_toy').rows[0].ratio|f }})",
    BATCHES + "{{ found[0] }} in bf16 and {{ found[1] }} in float32 differed",
    "{% set methods = (result('real_acceptance').methods.values()|list)[1:] %}"
    "{{ methods|map(attribute='requests_equal_to_no_speculation')|span }} of {{ methods[0].requests }} answers",
    GPU
    + "pointers took {% for each in times %}{{ each|span(2) }}{{ ', ' if not loop.last }}{% endfor %} of the time of",
    "{% set rows = result('paired_recipe_toy').rows %}{{ rows[0].ratio|f }} and {{ rows[1].ratio|f }}"
    " times `layer_lru` on a CPU",
    "{% set x = {} %}{% for row in result('scaled_moe_spac_real').rows if row.slots == '25%' %}"
    "{% do x.update({row.rung: row.speedup|f}) %}"
    "{% endfor %}{{ x.moe_spac }} times `layer_lru`, `reuse` with `waterfill` {{ x.cpu }} times",
    "{% set times = result('scaled_two_buffers_real').rows|map(attribute='tpot_median')|list %}"
    "{{ (1 - times[3]/times[1])|pct(1) }} % less executed, {{ (1 - times[2]/times[1])|pct(1) }} % exact",
    "{% macro of(name) %}{{ result('paired_workers_' ~ name ~ '_toy').rows[0].ratio|f }}{% endmacro %}"
    "(`linear`), {{ of('linear') }} times as fast as without; with a quarter in slots {{ of('linear_slots') }}, and by"
    " `shadow` with drafts {{ of('shadow') }},",
    "{% set rows = result('moe_spec_matmuls').timed %}{% set found = [] %}{% for row in rows %}"
    "{% do found.append(row.batched.median / row.sequential.median) %}{% endfor %}"
    "batched takes {{ found|span(1) }} times as long",
    GPU + "Slots took {{ slots|span(1) }} times as long as it",
    GPU + "slots took {{ over|span(1) }} times as long as pointers",
    GPU + "{{ faster|span(1) }} times the speed of stock's offloaders",
    GPU + "has {{ faster|span(1) }} times the speed of stock's offloaders ([gpu](../../benchmarks/results/gpu.md))."
    " Where the host chooses in each layer, it took {{ over|span(1) }} times as long.",
    HITS + "with a quarter of the experts in slots, it hits {{ flat.lru[at]|pct }} and {{ real.lru[2]|pct }} %"
    " ([flat routing, carved model](../../benchmarks/results/policies.md)), an LRU for each layer"
    " {{ flat.layer_lru[at]|pct }} and {{ real.layer_lru[2]|pct }} %, `reuse` {{ flat.reuse[at]|pct }} and"
    " {{ real.reuse[2]|pct }} %",
    SERVED + "{% set eagle = result('gpu_h100').serving|selectattr('run', 'eq', 11)"
    "|selectattr('speculation', 'eq', 'eagle3')|first %}EAGLE-3 took"
    " {{ (eagle.decode[0].ms_per_token / ms['ptr', 11][0])|f(1) }} times as long as no drafts for one request, and"
    " {{ (eagle.decode[2].ms_per_token / ms['ptr', 11][2])|f(1) }} times for 16",
    "save at most {{ (result('toy_ceilings').rows|map(attribute='gain.rows')|max - 1)|pct }} % of a step",
    "Without a cache {{ result('toy_reuse').spread.needed_experts.mean[4]|f }} is enough with flat routing, and"
    " {{ result('real_reuse').spread.needed_experts.mean[4]|f }} on the carved model",
    STREAMS + "{{ link|min|f }} to {{ link|max|f }} times the tokens per second of shared steps",
    "was {{ result('reads_submitted').rows|map(attribute='ratio')|span(2) }}, with a gain for experts",
)


def prose(text: str) -> str:
    """The words of a document, whatever its lines are."""
    return " ".join(text.split())


@pytest.mark.parametrize("sentence", SENTENCES)
def test_numbers_of_sentences_are_those_of_the_results(sentence: str) -> None:
    found = [pages.ROOT / "README.md", *(pages.ROOT / "vllm_spac").rglob("*.md")]
    wanted = prose(pages.expression(sentence))
    assert any(wanted in prose(path.read_text(encoding="utf-8")) for path in found), f"no document says: {wanted}"


def test_the_readme_s_results_have_no_other_numbers() -> None:
    text = (pages.ROOT / "README.md").read_text(encoding="utf-8")
    parts = [("| ms per token", "## What it promises"), ("## Five papers", "## Where to read on")]
    shown = "".join(text.partition(begin)[2].partition(end)[0] for begin, end in parts)
    numbers = set(re.findall(r"\d+\.\d+", shown))
    assert len(numbers) > 9 and numbers <= set(re.findall(r"\d+\.\d+", " ".join(map(pages.expression, SENTENCES))))


def test_pages_are_rendered_from_the_results() -> None:
    """Otherwise: `python benchmarks/reproduce.py pages`."""
    assert list(pages.problems()) == []


def test_no_document_has_invisible_markers() -> None:
    folders = (pages.ROOT / name for name in ("benchmarks", "tests", "vllm_spac"))
    for path in (*pages.ROOT.glob("*.md"), *(path for folder in folders for path in folder.rglob("*.md"))):
        assert "<!--" not in path.read_text(encoding="utf-8"), path


def test_the_index_is_short_and_pictures_are_few() -> None:
    assert (pages.ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8").count("\n") <= 200
    there, drawn = {path.name for path in pages.RESULTS.glob("*.png")}, set(pictures.PICTURES)
    kept = {file for made in reproduce.FIGURES.values() if made.answered for file in made.files}
    assert drawn <= there and there - drawn <= kept and len(there) <= 12


SOURCE = """+++
title = "One"
files = ["toy_one.json"]
commands = ["python benchmarks/one.py"]
+++
{% set figure %}{{ result("toy_one").x|f(1) }} s{% endset %}
{% set verdict %}It is fast.{% endset %}
It takes {{ result("toy_one").x|f }} s.
"""


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One result with its page and the index."""
    for name, path in (("ROOT", tmp_path), ("RESULTS", tmp_path / "benchmarks" / "results")):
        monkeypatch.setattr(pages, name, path)
    monkeypatch.setattr(pages, "SOURCES", tmp_path / "pages")
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "one.md.jinja").write_text(SOURCE)
    (tmp_path / "pages" / "README.md.jinja").write_text('# Results\n\n{{ index("one") }}\n')
    pages.forget()
    written(tmp_path, 1.234)
    yield tmp_path
    pages.forget()


def test_what_ran_where_is_what_results_name(shelf: Path) -> None:
    """A release that is accepted and has no result has a row without pages, on each platform that has any."""
    results = shelf / "benchmarks" / "results"
    for version, machine, key in (
        ("0.32.1+cpu", {"cpu": "a"}, ("0.32", "V1", "CPU")),
        ("0.99.0", {"gpu": "NVIDIA B1, 9 MiB"}, ("0.99", "V2", "NVIDIA B1")),
        ("0.99.0", {}, ("0.99", "V2", "CUDA path, emulated")),
    ):
        (results / "toy_one.json").write_text(json.dumps({"versions": {"vllm": version}, "machine": machine}))
        pages.forget()
        found = pages.ran()
        assert [where for where, done in found.items() if done] == [key] and found[key] == {"one": "One"}
        assert {(version, *key[1:]) for version in device.TESTED} <= set(found)


def test_architectures_that_were_served_are_counted_where_they_ran(shelf: Path) -> None:
    upstream = shelf / "tests" / "upstream"
    upstream.mkdir(parents=True)
    rows = {"A": {"verdict": "served", "detail": ""}, "B": {"verdict": "refused", "detail": "served"}}
    (upstream / "families.json").write_text(json.dumps({"vllm": "0.98.1", "rows": rows}))
    emulated = {"A": "served exactly: x", "B": "served exactly, and y", "C": "not emulated: served"}
    (upstream / "families_emulated.json").write_text(json.dumps({"vllm": "0.99.0", "rows": emulated}))
    assert pages.architectures() == {("0.98", "V1", "CPU"): 1, ("0.99", "V2", "CUDA path, emulated"): 2}


def written(folder: Path, seconds: float) -> None:
    (folder / "benchmarks" / "results" / "toy_one.json").write_text(json.dumps({"x": seconds}))
    pages.forget()


def test_a_page_and_its_line_of_the_index(shelf: Path) -> None:
    assert len(list(pages.problems())) == 2
    assert pages.update() == ["benchmarks/results/one.md", "benchmarks/README.md"] and pages.update() == []
    page = (shelf / "benchmarks" / "results" / "one.md").read_text()
    assert page.startswith("# One\n\n> It is fast.\n\nIt takes 1.23 s.\n") and "python benchmarks/one.py" in page
    row = "| [One](results/one.md) | 1.2 s | It is fast. |"
    assert row in (shelf / "benchmarks" / "README.md").read_text().splitlines()
    assert list(pages.problems()) == []


def test_a_page_of_another_measurement(shelf: Path) -> None:
    pages.update()
    written(shelf, 2.5)
    of_page, of_index = pages.problems()
    assert "'It takes 1.23 s.' should be 'It takes 2.50 s.'" in of_page and of_index.startswith(
        "benchmarks/README.md: "
    )


def test_a_page_without_a_source_or_a_line_of_the_index(shelf: Path) -> None:
    (shelf / "pages" / "README.md.jinja").write_text("# Results\n")
    (shelf / "benchmarks" / "results" / "two.md").write_text("# Two\n")
    pages.forget(), pages.update()
    assert list(pages.problems()) == ["two.md: has no source", "one: not in the index"]


def test_a_number_that_a_result_lacks_is_an_error(shelf: Path) -> None:
    with pytest.raises(pages.jinja2.UndefinedError):
        pages.expression('{{ result("toy_one").y|f }}')


@pytest.mark.parametrize(
    ("values", "text"), [([1.0, 3.0, 2.0], "1.0 to 3.0"), ([2.04, 1.96], "2.0"), (iter([1]), "1.0")]
)
def test_spans(values: object, text: str) -> None:
    assert pages._span(values, 1) == text


def test_every_result_has_a_page_and_every_page_its_results() -> None:
    assert list(reproduce.unnamed()) == []


def test_results_are_of_what_is_in_the_tree_or_say_that_they_are_not() -> None:
    assert list(reproduce.of_something_else(history=False)) == []


@pytest.mark.full  # who rebases commits that results name sees it here, and is not kept from landing them
def test_commits_are_in_the_history_or_said_not_to_be() -> None:
    why = reproduce.unknown_history()
    if why:
        pytest.skip(f"commits cannot be looked up: {why}")
    assert list(reproduce.of_something_else(history=True)) == []


def test_traces_are_as_they_were_recorded() -> None:
    recorded = json.loads((reproduce.TRACES / "traces.json").read_text())
    assert set(recorded["traces"]) == {path.name for path in reproduce.TRACES.glob("*.trace")}
    for name, facts in recorded["traces"].items():
        assert reproduce.sha256(reproduce.TRACES / name) == facts["sha256"], name
    assert recorded["provenance"]["command"] == "python benchmarks/replay/record.py"


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One figure with one result, in another checkout."""
    (tmp_path / "results").mkdir()
    (tmp_path / "README.md").write_text("see `toy_one.json`")
    figure = reproduce.Made("a table", ("toy_one.json",), ("python benchmarks/one.py",))
    monkeypatch.setattr(reproduce, "FIGURES", {"one": figure})
    monkeypatch.setattr(pictures, "PICTURES", {})
    monkeypatch.setattr(pages, "update", lambda: [])
    for name, path in (("ROOT", tmp_path), ("RESULTS", tmp_path / "results"), ("TRACES", tmp_path / "traces")):
        monkeypatch.setattr(reproduce, name, path)
    write(tmp_path, {})
    return tmp_path


def write(folder: Path, changes: dict, name: str = "toy_one.json", **content) -> None:
    origin = {"command": "python benchmarks/one.py", "git": {"commit": "c0ffee", "dirty": False}}
    origin |= {"versions": {"python": "3"}, "machine": {"cores": 2}, "date": "today"} | changes
    (folder / "results" / name).write_text(json.dumps({"provenance": origin, **content}))


def problems() -> list[str]:
    return [*reproduce.unnamed(), *reproduce.of_something_else(history=not reproduce.unknown_history())]


def test_nothing_is_wrong_elsewhere(elsewhere: Path) -> None:
    assert problems() == []
    assert reproduce.unknown_history() == "this is no git checkout"


def test_a_file_without_a_page(elsewhere: Path) -> None:
    (elsewhere / "results" / "more.png").touch()
    (elsewhere / "results" / "toy_one.json").unlink()
    (elsewhere / "README.md").write_text("`benchmarks/results/toy_other.json`, ![](x/toy_one.png)")
    assert [problem.partition(":")[0] for problem in problems()] == [
        "more.png",
        "toy_one.json",
        "toy_one.png",
        "toy_other.json",
    ]


def test_a_file_of_two_pages(elsewhere: Path) -> None:
    reproduce.FIGURES["two"] = reproduce.FIGURES["one"]
    assert problems() == ["toy_one.json: two pages have it"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"git": None, "date": ""}, "its provenance has no git, date"),
        ({"command": "python benchmarks/one.py --quick"}, "was made by python benchmarks/one.py --quick"),
    ],
)
def test_a_result_of_another_command(elsewhere: Path, changes: dict, problem: str) -> None:
    write(elsewhere, changes)
    assert problems() == [f"toy_one.json: {problem}"]


def test_a_result_of_another_trace(elsewhere: Path) -> None:
    (elsewhere / "traces").mkdir()
    (elsewhere / "traces" / "a.trace").write_bytes(b"routing")
    same = reproduce.sha256(elsewhere / "traces" / "a.trace")
    write(elsewhere, {}, traces={"a": {"sha256": same}})
    assert problems() == []
    write(elsewhere, {}, traces={"a": {"sha256": "0"}, "b": {"sha256": same}})
    assert problems() == [f"toy_one.json: is of another {name}.trace than those below traces" for name in "ab"]
    reproduce.FIGURES["one"] = replace(reproduce.FIGURES["one"], answered="c0ffee")
    assert problems() == [], "its commit has its traces"


def test_a_result_of_a_trace_in_a_folder(elsewhere: Path) -> None:
    """Traces of several models have the same names."""
    for folder in ("traces", "traces/local"):
        (elsewhere / folder).mkdir()
        (elsewhere / folder / "a.trace").write_bytes(folder.encode())
    write(elsewhere, {}, traces={"a": {"sha256": reproduce.sha256(elsewhere / "traces" / "local" / "a.trace")}})
    assert problems() == []


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=x", "-c", "user.email=x", "-c", "init.defaultBranch=main")
    done = reproduce.subprocess.run(["git", *who, "-C", str(folder), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_commits_that_are_not_in_the_history(elsewhere: Path) -> None:
    git(elsewhere, "init")
    for branch in ("main", "other"):
        git(elsewhere, "checkout", "-b", branch) if branch == "other" else None
        git(elsewhere, "commit", "--allow-empty", "-m", branch)
    gone = git(elsewhere, "rev-parse", "HEAD")
    git(elsewhere, "checkout", "main")
    here = git(elsewhere, "rev-parse", "HEAD")
    write(elsewhere, {"git": {"commit": here}}, sessions=[{"git": {"commit": here}}])
    assert problems() == []
    for commit in (gone, "c0ffee"):
        write(elsewhere, {"git": {"commit": here}}, sessions=[{"git": {"commit": commit}}])
        assert problems() == [f"toy_one.json: {commit} is not in the history of this checkout"]
    reproduce.FIGURES["one"] = replace(reproduce.FIGURES["one"], stale="of another time")
    assert problems() == []
    write(elsewhere, {"git": {"commit": here}})
    assert problems() == ["one: its results are of what is in the tree, it is not stale"]


def test_a_shallow_checkout_is_not_judged(elsewhere: Path, tmp_path: Path) -> None:
    git(elsewhere, "init")
    for number in range(2):
        git(elsewhere, "commit", "--allow-empty", "-m", str(number))
    (elsewhere / ".git" / "shallow").write_text(git(elsewhere, "rev-parse", "HEAD") + "\n")
    assert reproduce.unknown_history() == "this checkout is shallow" and problems() == []
    reproduce.FIGURES["one"] = replace(reproduce.FIGURES["one"], stale="of another time")
    assert problems() == [], "its commit may be lost"


def test_commands() -> None:
    runner = CliRunner()
    listed = runner.invoke(reproduce.app, ["list"])
    assert listed.exit_code == 0 and all(name in listed.output for name in reproduce.FIGURES)
    for name in ("nothing", "v2"):
        refused = runner.invoke(reproduce.app, ["run", name], env={"COLUMNS": "300"})
        assert refused.exit_code == 2 and "no command makes" in refused.output


@pytest.mark.parametrize(
    ("command", "made"),
    [
        ("python x.py .cache/toy/mid --eagle3 .cache/toy/mid-eagle3", ["inflate.py benchmarks/toy/models/target"]),
        ("python x.py .cache/toy/local-mid", ["stored.py local", "inflate.py benchmarks/toy/models/local/target"]),
        ("python benchmarks/toy/texts.py", []),
        ("python x.py .cache/real/target", ["real/build.py", "fit/texts.py", "fit/chats.py"]),
        ("python x.py benchmarks/traces/local", []),
    ],
)
def test_models_that_a_result_needs_are_made_first(elsewhere: Path, command: str, made: list[str]) -> None:
    found = list(reproduce.prepared(reproduce.Made("a table", commands=(command,))))
    assert len(found) == len(made) and all(text in one for one, text in zip(found, made, strict=True)), found
    for one in found[:1]:
        folder = "benchmarks/toy/models/local" if "local" in one else ".cache/toy/mid"
        folder = ".cache/real/target" if "real" in one else folder
        (elsewhere / folder).mkdir(parents=True)
        assert list(reproduce.prepared(reproduce.Made("a table", commands=(command,)))) == found[1:]


@pytest.mark.parametrize(("options", "made"), [([], "b"), (["--timed"], "ac")])
def test_making_all_again(elsewhere: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], made: str) -> None:
    """In order, with the minutes that are left, and rendered at the end; what has no result is left out."""
    (elsewhere / "s.py").write_text("import sys\nopen('said', 'a').write(sys.argv[1])\n")
    figures = {
        letter: reproduce.Made("a table", (f"{letter}.json",), (f"python s.py {letter}",), timed=letter != "b")
        for letter in "abc"
    } | {"d": reproduce.Made("printed", (), ("python s.py d",), timed=bool(options))}
    monkeypatch.setattr(reproduce, "FIGURES", figures)
    monkeypatch.setattr(pages, "update", lambda: ["a.md"])
    done = CliRunner().invoke(reproduce.app, ["results", *options], env={"COLUMNS": "200"})
    assert done.exit_code == 0 and "rendered: a.md" in done.output, done.output
    assert (elsewhere / "said").read_text() == made
    assert f"1 of {len(made)}: {made[0]}, about 10 of the {10 * len(made)} minutes left" in done.output


def test_running_a_figure(elsewhere: Path) -> None:
    """From the root, with this Python; it stops at the first command that fails."""
    script = elsewhere / "s.py"
    script.write_text("import os, sys\nopen('said', 'a').write(sys.argv[1])\nsys.exit(sys.argv[1] == 'b')\n")
    commands = tuple(f"python s.py {letter}" for letter in "abc")
    reproduce.FIGURES["one"] = replace(reproduce.FIGURES["one"], commands=commands)
    assert CliRunner().invoke(reproduce.app, ["run", "one"]).exit_code == 1
    assert (elsewhere / "said").read_text() == "ab"


def test_running_a_figure_whose_script_has_left_the_tree(elsewhere: Path) -> None:
    """In a checkout of the commit that has it, with what that commit installs; its files come here."""
    (elsewhere / "benchmarks" / "results").mkdir(parents=True)
    (elsewhere / "benchmarks" / "results" / "toy_one.json").touch()
    (elsewhere / "benchmarks" / "reproduce.py").write_text("open('benchmarks/results/toy_one.json', 'w').write('old')")
    (elsewhere / "Makefile").write_text(f"setup:\n\tmkdir -p .venv/bin; ln -sf {sys.executable} .venv/bin/python\n")
    git(elsewhere, "init")
    git(elsewhere, "add", ".")
    git(elsewhere, "commit", "-m", "has it")
    made = replace(reproduce.FIGURES["one"], answered=git(elsewhere, "rev-parse", "HEAD"))
    git(elsewhere, "rm", "-q", "benchmarks/reproduce.py")
    git(elsewhere, "commit", "-m", "has it no longer")
    reproduce.FIGURES["one"] = made
    for _ in range(2):
        done = CliRunner().invoke(reproduce.app, ["run", "one"])
        assert done.exit_code == 0, done.output
        assert (elsewhere / "results" / "toy_one.json").read_text() == "old"
    reproduce.FIGURES["one"] = replace(made, answered="0" * 40)
    assert CliRunner().invoke(reproduce.app, ["run", "one"]).exit_code not in (0, 2)
