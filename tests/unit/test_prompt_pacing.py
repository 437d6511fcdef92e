"""vLLM's own scheduler with steps that leave prompts out: who waits how long, in steps of a clock that counts rows."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model_configs import qwen3_moe

from vllm_spac.config.config import SpacConfig
from vllm_spac.integration.hooks import patches
from vllm_spac.integration.stepping import prompt_pacing
from vllm_spac.integration.stepping.prompt_pacing import PromptPacer

CHUNK, SEATS, BLOCK = 64, 8, 16
STREAMS, LONG = 4, 8 * CHUNK
MODEL = qwen3_moe(
    hidden_size=64,
    intermediate_size=64,
    moe_intermediate_size=32,
    num_attention_heads=2,
    num_key_value_heads=1,
    num_experts=8,
    num_experts_per_tok=2,
    vocab_size=128,
    max_position_embeddings=4096,
    dtype="float32",
)


class Served:
    """A scheduler whose steps take a second, and one with a chunk ``long`` seconds."""

    def __init__(self, config: Any, kind: type, ahead: int, paced: bool, long: float = 40.0) -> None:
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
        blocks = KVCacheConfig(num_blocks=4096, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["0"], spec)])
        self.scheduler = kind(config, blocks, StructuredOutputManager(config), BLOCK)
        self.now, self.kinds = 0.0, []  # of each step, c with a chunk, d without
        self.tokens: dict[str, list[float]] = {}  # when each was sampled
        self._left: dict[str, int] = {}  # tokens of prompts that were not computed
        self._ahead, self._long, self._running = ahead, long, deque()
        self._pacer = PromptPacer(self.scheduler, lambda: self.now) if paced else None

    def ask(self, name: str, prompt: int, tokens: int) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        self.tokens[name], self._left[name] = [], prompt
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        self.scheduler.add_request(Request(name, [1] * prompt, sampling, None))

    def step(self) -> None:
        plan = self.scheduler.schedule(self._pacer is not None and self._pacer.leaves_out())
        self._running.append(plan)
        if plan.num_scheduled_tokens:
            self.kinds.append("c" if any(rows > 1 for rows in plan.num_scheduled_tokens.values()) else "d")
        while len(self._running) >= self._ahead:
            self._end()

    def _end(self) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        plan = self._running.popleft()
        rows = plan.num_scheduled_tokens
        self.now += self._long if any(count > 1 for count in rows.values()) else bool(rows)
        said: list[list[int]] = []
        for name, count in rows.items():
            self._left[name] -= count
            said.append([] if self._left[name] > 0 or name not in self.scheduler.requests else [7])
            self.tokens[name] += [self.now] * len(said[-1])
        places = {name: index for index, name in enumerate(rows)}
        self.scheduler.update_from_output(plan, ModelRunnerOutput(list(rows), places, said))

    def run(self) -> None:
        for _ in range(5000):
            if not self.scheduler.has_unfinished_requests():
                return
            self.step()
        raise AssertionError("a request starves")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    folder: Path = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(MODEL))
    found = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        max_model_len=2048,
        max_num_batched_tokens=CHUNK,
        max_num_seqs=SEATS,
        enable_prefix_caching=False,
        block_size=BLOCK,
    ).create_engine_config()
    found.cache_config.num_gpu_blocks = 4096
    return found


def kinds() -> list[tuple[str, int]]:
    return [("Scheduler", 1), ("AsyncScheduler", 2)]


@pytest.fixture(params=kinds(), ids=lambda item: item[0])
def served(request, config):
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    name, ahead = request.param
    return lambda paced=True, **given: Served(
        config, {"Scheduler": Scheduler, "AsyncScheduler": AsyncScheduler}[name], ahead, paced, **given
    )


def mixed(found: Served) -> Served:
    """Four streams, and once they run two long prompts at once, which no step can hold together."""
    for number in range(STREAMS):
        found.ask(f"stream {number}", 4, 400)
    for _ in range(20):
        found.step()
    found.kinds.clear()
    for number in range(2):
        found.ask(f"long {number}", LONG, 4)
    found.run()
    return found


def test_steps_that_only_decode_run_between_chunks_of_two_long_prompts(served) -> None:
    found, stock = mixed(served()), mixed(served(paced=False))
    chunks = [run for run in "".join(found.kinds).split("d") if run]
    assert max(map(len, "".join(stock.kinds).split("d"))) >= 2 * LONG // CHUNK, "stock's run of chunks"
    assert max(map(len, chunks)) == 1, "a chunk, then steps that only decode"
    first, last = "".join(found.kinds).index("c"), "".join(found.kinds).rindex("c")
    between = found.kinds[first:last].count("d") / found.kinds[first:last].count("c")
    assert 11 <= between <= 14, "(40 / 4 - 1) / (1 - 1/4)"


def test_long_prompts_wait_a_third_longer_at_most(served) -> None:
    found, stock = mixed(served()), mixed(served(paced=False))
    for name in ("long 0", "long 1"):
        began = 20.0
        assert found.tokens[name][0] - began <= 1.4 * (stock.tokens[name][0] - began)
    assert {name: len(times) for name, times in found.tokens.items()} == {
        name: len(times) for name, times in stock.tokens.items()
    }


def test_short_prompts_do_not_wait(served) -> None:
    found = served(long=3.0)
    for number in range(STREAMS):
        found.ask(f"stream {number}", 4, 60)
    for number in range(30):
        found.ask(f"short {number}", CHUNK // 2, 3)
    found.run()
    stock = served(paced=False, long=3.0)
    for number in range(STREAMS):
        stock.ask(f"stream {number}", 4, 60)
    for number in range(30):
        stock.ask(f"short {number}", CHUNK // 2, 3)
    stock.run()
    assert len(found.kinds) <= len(stock.kinds) + 2


def test_only_servers_whose_experts_do_not_all_fit_are_paced(monkeypatch) -> None:
    from vllm.usage.usage_lib import UsageContext

    monkeypatch.setattr(patches, "install", lambda target, make: None)
    for slots, usage, expected in [
        ("25%", UsageContext.OPENAI_API_SERVER, True),
        ("auto", UsageContext.ENGINE_CONTEXT, True),
        ("100%", UsageContext.OPENAI_API_SERVER, False),
        ("25%", UsageContext.LLM_CLASS, False),
        ("25%", None, False),
    ]:
        made = SimpleNamespace(scheduler_config=SimpleNamespace())
        prompt_pacing.request(made, SpacConfig.parse({"slots": slots}), usage)
        assert hasattr(made.scheduler_config, prompt_pacing._PACED) is expected, (slots, usage)


def test_an_engine_core_asks_where_it_was_requested_and_vllms_own_answer_stands(config) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    found = Served(config, Scheduler, 1, paced=False)
    core = SimpleNamespace(scheduler=found.scheduler, vllm_config=config, collective_rpc=lambda method: [True, False])
    asks = prompt_pacing._throttling(lambda core: core.answer)
    for core.answer in (True, False):
        assert asks(core) is core.answer and prompt_pacing._PACER not in vars(core), "nobody requested it"
    settings = SimpleNamespace(**{prompt_pacing._PACED: True})
    core.vllm_config = SimpleNamespace(scheduler_config=settings, additional_config={"spac": {}})
    assert asks(core) is False and isinstance(vars(core)[prompt_pacing._PACER], PromptPacer)
    core.answer = True
    assert asks(core) is True


def test_prompts_do_not_wait_where_each_worker_has_all_its_experts(config, caplog) -> None:
    """Which the arguments do not say with slots=auto: its workers, in their own processes, count them."""
    from vllm.v1.core.sched.scheduler import Scheduler

    asks, asked = prompt_pacing._throttling(lambda core: False), []
    settings = SimpleNamespace(**{prompt_pacing._PACED: True})

    def core(*answers: bool) -> SimpleNamespace:
        found = Served(config, Scheduler, 1, paced=False)
        made = SimpleNamespace(scheduler_config=settings, additional_config={"spac": {}})
        rpc = lambda method: asked.append(method) or list(answers)  # noqa: E731
        return SimpleNamespace(scheduler=found.scheduler, vllm_config=made, collective_rpc=rpc)

    whole, one = core(True, True), core(True, False)
    for _ in range(3):
        assert asks(whole) is False
    assert vars(whole)[prompt_pacing._PACER] is None and asked == ["spac_holds_all"]
    assert "prompts wait" not in caplog.text
    asks(one)
    assert isinstance(vars(one)[prompt_pacing._PACER], PromptPacer) and "prompts wait" in caplog.text


def test_vllms_scheduler_has_what_is_read_and_set(config) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    found = Served(config, Scheduler, 1, paced=False).scheduler
    assert found.prefill_capacity_bound is False
    found.prefill_capacity_bound = True
    assert patches.is_off(patches.THROTTLE) is False
