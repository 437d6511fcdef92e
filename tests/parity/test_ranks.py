"""Several ranks and stages: stock's tokens of an engine of the same size, and each rank's own packed experts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import compare
import engines
import forked
import pytest
from compare import METHODS, TOY, copied
from engines import Run
from exactness import FLOAT32, assert_same_tokens, first_difference

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks spin while they wait: needs 2 CPUs")

OPTIONS = {"tensor_parallel_size": 2, **FLOAT32}
ONE_THREAD = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
TOP_K = {"qwen3_moe": 4, "deepseek_v2": 4, "gpt_oss": 2}


def run(model: Path, spac: dict | None, **options) -> Run:
    """One engine of two ranks, unless ``options`` say otherwise, in a process of its own."""
    return Run(**forked.answer(forked.run(compare.program(model, spac, **OPTIONS | options), ONE_THREAD)))


@pytest.fixture(scope="module")
def stock(checkpoint):
    """``stock(family, method)`` -> what two ranks say without the plugin; the family ``toy`` is the trained model."""
    said: dict[tuple[str, str | None], Run] = {}

    def get(family: str, method: str | None = None) -> Run:
        if (family, method) not in said:
            said[family, method] = run(model_of(family, checkpoint), None, **drafts_of(method))
        return said[family, method]

    return get


def model_of(family: str, checkpoint) -> Path:
    return TOY / "target" if family == "toy" else checkpoint(family)


def drafts_of(method: str | None) -> dict:
    """Answers are long enough that all requests of some step have drafts, also where those come from the text."""
    return {} if method is None else {"speculative_config": METHODS[method], "max_tokens": 64}


def check(found: Run, expected: Run) -> None:
    """Stock's tokens; both ranks did the same and said who they are.

    Reads ahead end when they do, on one rank before a layer needs them and on the other one after.
    """
    assert_same_tokens(found, expected)
    ranks = found.workers
    assert [(worker["rank"], worker["ranks"], worker["divided"]) for worker in ranks] == [
        (0, 2, "tensors"),
        (1, 2, "tensors"),
    ]
    timed = ("hits", "misses", "loads", "bytes") if not any(worker["prefetches"] for worker in ranks) else ()
    for name in ("slots", "waves", "steps", *timed):
        assert ranks[0][name] == ranks[1][name], name
    used = [worker["hits"] + worker["misses"] for worker in ranks]
    assert used[0] == used[1]
    assert any(ranks[0]["steps"].values()) and bool(ranks[0]["bytes"]) == (ranks[0]["loads"] > 0)
    assert found.total["hits"] == max(worker["hits"] for worker in ranks)
    assert found.total["slot_bytes"] == 2 * ranks[0]["slot_bytes"]


def test_same_tokens_as_stock_of_the_same_size(stock, checkpoint, tmp_path):
    """With shared experts and a dense first layer, whose sums meet with the experts'."""
    spac = {"slots": "25%", "store": "disk", "disk_dir": str(tmp_path)}
    found = run(checkpoint("deepseek_v2"), spac)
    check(found, stock("deepseek_v2"))
    assert found.total["misses"] > 0
    assert len({path.parent.parent for path in tmp_path.rglob("expert-*.safetensors")}) == 2, "a folder for each rank"


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "spac", "method"),
    [
        ("qwen3_moe", {"slots": 4, "store": "host"}, None),
        ("qwen3_moe", {"slots": "100%", "store": "disk"}, None),
        ("deepseek_v2", {"slots": 4, "store": "host"}, None),
        ("gpt_oss", {"slots": 2, "store": "disk"}, None),
        ("gpt_oss", {"slots": "60%", "store": "host"}, None),
        ("gpt_oss", {"slots": 2, "store": "disk"}, "ngram"),
        ("deepseek_v2", {"slots": "100%"}, None),
        ("toy", {"slots": "25%", "store": "disk"}, "ngram"),
        ("toy", {"slots": 8, "store": "disk"}, "eagle3"),
        ("toy", {"slots": "25%", "store": "host"}, "eagle3"),
        ("toy", {"slots": "100%", "store": "host"}, "eagle3"),
        ("toy", {"slots": "auto", "store": "disk", "host_memory": "6MiB"}, "eagle3"),
        ("toy", {"slots": "12%", "store": "disk", "host_memory": "6MiB"}, "eagle3"),
        ("toy", {"slots": "25%", "plane": "pointers"}, None),
        ("toy", {"slots": "12%", "plane": "pointers", "store": "disk", "host_memory": "6MiB"}, "ngram"),
    ],
    ids=str,
)
def test_same_tokens_whatever_the_ranks_hold(family, spac, method, stock, checkpoint, tmp_path):
    folder = {"disk_dir": str(tmp_path)} if spac.get("store") == "disk" else {}
    found = run(model_of(family, checkpoint), spac | folder, **drafts_of(method))
    check(found, stock(family, method))
    if spac["slots"] in ("100%", "auto"):
        assert found.total["misses"] == 0 < found.total["hits"]
    else:
        assert found.total["misses"] > 0
    if method is not None:
        assert found.total["steps"]["verify"] > 0 and "guard" not in found.stats


# Trees need blocks and rows of their own; a copy of the model is the drafter whose routing a shadow reads.
TREE = {"tree": 16, "guard": "off"}, {"speculative_config": {"method": "eagle3", "model": str(TOY / "eagle3")}}
COPY = {"method": "draft_model", "model": copied(TOY / "target"), "num_speculative_tokens": 4}
EXPERTS = {"enable_expert_parallel": True}


@pytest.mark.full
@pytest.mark.parametrize(
    ("spac", "options"),
    [
        TREE,
        (TREE[0] | {"cpu_experts": "waterfill", "store": "host"}, TREE[1]),
        (TREE[0] | {"cpu_experts": "waterfill", "store": "host"}, TREE[1] | EXPERTS),
        ({"cpu_experts": 2, "store": "host"}, EXPERTS),
        ({"prefetch": "shadow"}, {"speculative_config": COPY}),
    ],
    ids=["tree", "tree, CPU experts", "tree, CPU experts, divided", "CPU experts, divided", "shadow"],
)
def test_what_goes_with_several_ranks(spac, options):
    """Each rank drafts and decides by itself, from what all of them have."""
    room = {"max_num_batched_tokens": 256, "max_num_seqs": 2, "block_size": 32, "max_tokens": 64}
    room |= {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 256 << 20}
    found = run(TOY / "target", {"slots": "25%"} | spac, **room, **options)
    assert_same_tokens(found, run(TOY / "target", None, **room))
    for worker in found.workers:
        assert worker["misses"] > 0 and ("prefetch" not in spac or worker["prefetch_hits"] > 0)
        assert ("cpu_experts" in spac) == (worker["cpu_experts"] > 0)


@pytest.mark.full
def test_engines_of_other_sizes_and_swapped_folders(stock, checkpoint, tmp_path):
    """One folder of packed experts for engines of one and two ranks: each finds its own and repairs what is not."""
    spac = {"slots": "30%", "store": "disk", "disk_dir": str(tmp_path)}
    model, one = checkpoint("qwen3_moe"), {"tensor_parallel_size": 1}
    alone = run(model, None, **one)
    check(run(model, spac), stock("qwen3_moe"))
    halves = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert_same_tokens(run(model, spac, **one), alone)
    packed = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("expert-*.safetensors")}
    assert len(packed) == 3 * 64
    check(run(model, spac), stock("qwen3_moe"))
    assert packed == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("expert-*.safetensors")}
    first, second = halves
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
    check(run(model, spac), stock("qwen3_moe"))
    assert len(list(tmp_path.rglob("*.corrupt"))) == 2 * 64, "every file of another rank is refused, then packed again"


SCORED = """
import json, sys
sys.path.insert(0, sys.argv[1])
import engines
if __name__ == "__main__":
    from vllm import SamplingParams
    import vllm_spac
    model, spac, options = json.loads(sys.argv[2])
    with engines.engine(model, spac, **options) as llm:
        asked = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=20)
        outputs = llm.generate([{"prompt_token_ids": p} for p in engines.PROMPTS], asked, use_tqdm=False)
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        scores = [[{t: s.logprob for t, s in at.items()} for at in o.outputs[0].logprobs] for o in outputs]
        print(json.dumps([answers, scores, [] if spac is None else vllm_spac.stats(llm)["workers"]]))
"""


def scored(model: Path, spac: dict | None, **options):
    """(tokens, log-probabilities of the best 20 by token, statistics of the workers)."""
    given = json.dumps([str(model), spac, {**FLOAT32, "max_logprobs": 20, **options}])
    return forked.answer(forked.run(["-c", SCORED, Path(__file__).parent, given], ONE_THREAD))


@pytest.fixture(scope="module")
def alone():
    """What one rank of stock says of the trained model."""
    return scored(TOY / "target", None)


@pytest.mark.full
@pytest.mark.parametrize(
    "spac",
    [
        {"slots": "25%", "store": "disk"},
        {"slots": "100%", "store": "disk"},
        {"slots": "25%", "plane": "table"},
        {"slots": "25%", "plane": "pointers"},
        {"slots": "100%", "plane": "pointers"},
    ],
    ids=str,
)
def test_divided_experts_give_the_logits_of_one_rank(spac, alone, tmp_path):
    """Against one rank of stock: stock vLLM's CPU kernel has no expert parallelism."""
    folder = {} if spac.get("plane") == "pointers" else {"disk_dir": str(tmp_path)}
    tokens, scores, _ = alone
    found, ours, ranks = scored(TOY / "target", spac | folder, tensor_parallel_size=2, enable_expert_parallel=True)
    assert first_difference(found, tokens) is None
    for answer, expected in zip(ours, scores, strict=True):
        for at, there in zip(answer, expected, strict=True):
            assert at.keys() & there.keys() and all(abs(at[t] - there[t]) < 1e-4 for t in at.keys() & there.keys())
    assert [worker["experts"] for worker in ranks] == [6 * 32] * 2
    if spac["slots"] == "25%":
        assert ranks[0]["hits"] != ranks[1]["hits"], "both counted the same: whose experts are they?"
        assert all(worker["misses"] > 0 and worker["loads"] > 0 for worker in ranks)
        assert len(list(tmp_path.rglob("expert-*.safetensors"))) == (6 * 64 if folder else 0)


# Stock's V1 runner runs two stages on a CPU if it compiles, for which the cheapest way is enough; V2's always does.
COMPILED = {} if engines.V2 else {"enforce_eager": False, "compilation_config": {"backend": "eager"}}
STAGES = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2, **COMPILED}


@pytest.fixture(scope="module")
def alone_for_stages(checkpoint):
    """``alone_for_stages(family)`` -> what one rank of stock says; its two stages say the same."""
    said: dict[str, Run] = {}

    def get(family: str) -> Run:
        if family not in said:
            said[family] = run(model_of(family, checkpoint), None, tensor_parallel_size=1)
        return said[family]

    return get


def check_stages(found: Run, expected: Run) -> None:
    """Stock's tokens; each stage has its own layers, of which all ran in each step."""
    assert_same_tokens(found, expected)
    first, last = (worker for worker in found.workers if worker["rank"] % (len(found.workers) // 2) == 0)
    assert (first["stage"], last["stage"]) == (0, 1) and first["divided"] == last["divided"]
    assert first["steps"] == last["steps"] == found.total["steps"] and any(first["steps"].values())
    assert min(first["misses"], last["misses"]) > 0
    for name in ("layers", "experts", "slots", "hits", "misses", "waves"):
        assert found.total[name] == first[name] + last[name], name


@pytest.mark.rest
@pytest.mark.v2
def test_stages_say_what_one_says(alone_for_stages, tmp_path):
    """With a budget of all experts, which each stage counts by its own routers."""
    spac = {"slots": "25%", "store": "disk", "disk_dir": str(tmp_path), "budget": 64}
    found = run(TOY / "target", spac, **STAGES)
    check_stages(found, alone_for_stages("toy"))
    assert [worker["layers"] for worker in found.workers] == [3, 3] and found.workers[0]["divided"] == "layers"
    packed = [len(list(path.glob("**/expert-*.safetensors"))) for path in tmp_path.iterdir() if path.is_dir()]
    assert packed == [3 * 64, 3 * 64], "a folder for each stage"


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "spac", "options"),
    [
        ("toy", {"slots": "25%", "store": "host"}, {"tensor_parallel_size": 2}),
        ("toy", {"slots": "12%", "store": "disk", "host_memory": "6MiB"}, {}),
        ("toy", {"slots": "25%", "store": "host", "prefetch": "gate", "cpu_experts": "waterfill"}, {}),
        ("toy", {"slots": "25%", "plane": "pointers"}, {}),
        ("toy", {"slots": "12%", "plane": "pointers", "store": "disk", "host_memory": "6MiB"}, {}),
        ("gpt_oss", {"slots": 2, "store": "disk"}, {}),
        ("deepseek_v2", {"slots": 4, "store": "host"}, {}),
    ],
    ids=str,
)
def test_what_goes_with_stages(family, spac, options, alone_for_stages, checkpoint, tmp_path):
    folder = {"disk_dir": str(tmp_path)} if spac.get("store") == "disk" else {}
    check_stages(
        found := run(model_of(family, checkpoint), spac | folder, **STAGES | options), alone_for_stages(family)
    )
    assert all(("prefetch" in spac) == (worker["prefetches"] > 0) for worker in found.workers)


@pytest.mark.full
def test_stages_of_unequal_size(alone_for_stages, tmp_path, monkeypatch):
    """Slots, and the memory that they divide, are by the layers of each."""
    monkeypatch.setitem(ONE_THREAD, "VLLM_PP_LAYER_PARTITION", "4,2")
    spac = {"slots": "10%", "store": "disk", "disk_dir": str(tmp_path), "host_memory": "6MiB"}
    found = run(TOY / "target", spac, **STAGES)
    check_stages(found, alone_for_stages("toy"))
    first, last = found.workers
    assert (first["layers"], last["layers"]) == (4, 2) and first["slots"] > last["slots"]
    held = [sum(worker["host_bytes"].values()) / worker["expert_bytes"] for worker in found.workers]
    assert held == [42, 21], "two thirds of 6 MiB and one third, in experts"


KILLED = """
import json, os, signal, sys
sys.path.insert(0, sys.argv[1])
import engines
if __name__ == "__main__":
    model, rank, options = json.loads(sys.argv[2])
    with engines.engine(model, {"slots": "25%"}, **options) as llm:
        core = llm.llm_engine.engine_core.engine_core
        pids = [worker.proc.pid for worker in core.model_executor.workers]
        print("PIDS", json.dumps(pids), flush=True)
        plan, planned = core.scheduler.schedule, []
        def killing(*arguments, **options):
            planned.append(0)
            if len(planned) == 8:  # those of other stages are under way
                os.kill(pids[rank], signal.SIGKILL)
            return plan(*arguments, **options)
        core.scheduler.schedule = killing
        engines.say(llm, max_tokens=64)
        print("SURVIVED")
"""


@pytest.mark.full
@pytest.mark.parametrize(("rank", "options"), [(0, STAGES), (1, STAGES), (0, EXPERTS), (1, EXPERTS)])
def test_a_killed_rank_ends_the_engine(rank, options):
    given = json.dumps([str(TOY / "target"), rank, OPTIONS | options])
    done = forked.run(["-c", KILLED, Path(__file__).parent, given], ONE_THREAD, timeout=240)
    said = done.stdout + done.stderr
    assert done.returncode != 0 and "SURVIVED" not in said
    pids = json.loads(done.stdout.partition("PIDS ")[2].splitlines()[0])
    assert len(pids) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in pids)


BREAKING = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import engines
if __name__ == "__main__":
    model, folder, rank, spac, options = json.loads(sys.argv[2])
    spac |= {"slots": "25%", "store": "disk", "disk_dir": folder}
    with engines.engine(model, spac, **options) as llm:
        engines.say(llm, max_tokens=2)
        names = llm.collective_rpc(lambda worker: worker._spac_experts().runtime.executions[0].store.folder.name)
        for path in (Path(folder) / names[rank]).rglob("expert-*.safetensors"):
            data = bytearray(path.read_bytes())
            data[5000] ^= 1
            path.write_bytes(data)
        engines.say(llm, [[5, 9, 13]], max_tokens=1)  # one step, and too short for borrowed slots
        print("SURVIVED")
"""


@pytest.mark.full
@pytest.mark.parametrize("spac", [{}, {"plane": "pointers", "host_memory": "256KiB"}], ids=["host", "pointers"])
@pytest.mark.parametrize(("rank", "heard", "options"), [(0, 0, {}), (1, 0, {}), (0, 1, STAGES), (1, 1, STAGES)])
def test_a_failed_read_of_one_rank_ends_the_engine(rank, heard, options, spac, checkpoint, tmp_path):
    """At once, with its reason in the log; the other rank does not wait for vLLM's timeout of 300 s.

    Over pointers all ranks end the step, and the one that is heard must not give away its token.
    """
    given = json.dumps([str(checkpoint("qwen3_moe")), str(tmp_path), rank, spac, OPTIONS | options])
    changes = ONE_THREAD | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # a function for collective_rpc
    done = forked.run(["-c", BREAKING, Path(__file__).parent, given], changes, timeout=240)
    said = done.stdout + done.stderr
    assert done.returncode != 0 and "SURVIVED" not in said
    assert "is not what was packed (checksum or header differ)" in said
    if spac:
        assert "another rank cannot read its experts any more" in said or rank == heard
    else:
        assert (f"(rank {rank} of 2); its process ends, and the engine with it" in said) is (rank != heard)
