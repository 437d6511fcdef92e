"""Runs one engine on every kind of request that draft trees must serve: `tree_runs.py JSON` prints what it said.

An engine per process, since vLLM's CPU build does not survive a second one with speculative decoding.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import engines
import forked

TOY = Path(__file__).parents[2] / "benchmarks" / "toy" / "models"
EAGLE3 = {"method": "eagle3", "model": str(TOY / "eagle3")}
STOPS = 30  # distinct tokens of the prompts that end a request, by frequency: so that some request ends early
SEEDED_TOKENS = 384  # of all seeded requests of a kind: prompts of 166 tokens, and 32 each for six answers
SETTINGS = {"dtype": "float32", "max_num_batched_tokens": 256, "max_num_seqs": 8, "block_size": 32}
SETTINGS["num_gpu_blocks_override"] = None  # scratch takes more blocks than other tests have
WITH_TOKENIZER = ("structured",)  # kinds of requests that need skip_tokenizer_init=False


def prompts() -> list[list[int]]:
    """Sixteen pieces of text like what the toy was trained on, from one token to several chunks of prefill."""
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(TOY / "target" / "tokenizer.json")).encode(Path(json.__file__).read_text()).ids
    return [ids[61 * i : 61 * i + length] for i, length in enumerate((1, 5, 31, 32, 33, 64, 90, 150) * 2)]


def requests() -> dict[str, list[tuple[list[int], dict]]]:
    """Prompts and sampling parameters by kind. Seeded prompts fit into one forward: stock fails at others on a CPU.

    Structured output of any 40 characters: drafts are valid, and a mask depends on how many came before its row.
    """
    texts, few = prompts(), 2 if engines.V2 else 6  # Triton's interpreter takes a second for a row that is sampled
    common = sorted(set(sum(texts, [])), key=lambda token: -sum(texts, []).count(token))[:STOPS]
    sampled, limits = {"temperature": 1.0, "max_tokens": 32}, {"temperature": 0.7, "top_p": 0.9, "top_k": 40}
    stopping = {"max_tokens": 32, "stop_token_ids": common}
    return {
        "greedy": [(text, {"max_tokens": 32, "logprobs": 2 if i % 2 else None}) for i, text in enumerate(texts)],
        "to the end": [(texts[7], {"max_tokens": 200})],
        "seeds": [(text, sampled | {"seed": i}) for i, text in enumerate(texts[:few])],
        "seeds and limits": [(text, sampled | limits | {"seed": i}) for i, text in enumerate(texts[:few])],
        "penalties": [
            (texts[2], {"max_tokens": 32, "repetition_penalty": 1.2}),
            (texts[3], {"max_tokens": 32, "presence_penalty": 0.7, "frequency_penalty": 0.4}),
            (texts[4], {"max_tokens": 32}),
        ],
        "stops": [(text, stopping | {"min_tokens": i}) for i, text in enumerate(texts)],
        "allowed": [(texts[5], {"max_tokens": 32, "allowed_token_ids": common}), (texts[6], {"max_tokens": 32})],
        "structured": [
            (texts[1], {"max_tokens": 32, "structured_outputs": {"regex": "[0-9a-f]{24}"}}),
            (texts[2], {"max_tokens": 32}),
            (texts[3], {"max_tokens": 32, "structured_outputs": {"choice": ["yes", "no", "perhaps"]}}),
            (texts[4], {"max_tokens": 32, "structured_outputs": {"json": {"type": "array", "maxItems": 4}}}),
            *((text, {"max_tokens": 48, "structured_outputs": {"regex": "[ -~\\n]{40}"}}) for text in texts[4:10]),
            (texts[6], {"max_tokens": 32}),
        ],
    }


def said(llm: Any, asked: list[tuple[list[int], dict]]) -> list[dict]:
    """Tokens of each request, and their log-probabilities if it asked for them."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    parameters = []
    for _, given in asked:
        ends = "stop_token_ids" in given or "structured_outputs" in given
        more = {name: StructuredOutputsParams(**given[name]) for name in given if name == "structured_outputs"}
        plain = {"temperature": 0, "ignore_eos": not ends, "detokenize": False}
        parameters.append(SamplingParams(**plain | given | more))
    inputs = [{"prompt_token_ids": prompt} for prompt, _ in asked]
    answers = []
    for output in llm.generate(inputs, parameters, use_tqdm=False):
        answer = output.outputs[0]
        logprobs = [
            sorted((token, found.logprob) for token, found in position.items()) for position in answer.logprobs or ()
        ]
        answers.append({"tokens": list(answer.token_ids), "logprobs": logprobs})
    return answers


def refusals(llm: Any) -> dict[str, str]:
    """What an engine with drafts says to parameters that vLLM does not serve with any; empty if it serves them."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    found = {}
    for name, value in {"min_p": 0.1, "logit_bias": {7: 2.0}}.items():
        try:
            llm.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(**{name: value}), use_tqdm=False)
        except VLLMValidationError as error:
            found[name] = str(error)
    return found


def runner_of(llm: Any) -> Any:
    """The model runner of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def poison(runner: Any) -> None:
    """Fills scratch and each request's slots behind its accepted tokens, before each step, with what must not be read.

    Keys are NaN: whoever attends to one has no answer. Values are large but finite, because vLLM's kernel for CPUs sets
    the scores of masked slots but still multiplies their values, by zero, up to the end of a block.
    """
    import torch

    trees, begin = runner._spac_trees, runner._spac_trees.begin
    layers, value = runner.compilation_config.static_forward_context, 1e4

    def unaccepted(size: int) -> torch.Tensor:
        """Slots behind the requests' accepted tokens; those of a prompt that goes on are written in the step."""
        batch, slots = runner.input_batch, []
        table, blocks = batch.block_table[0].get_device_tensor(batch.num_reqs), batch.block_table[0].num_blocks_per_row
        for index in range(batch.num_reqs):
            places = torch.arange(int(batch.num_computed_tokens_cpu[index]), int(blocks[index]) * size)
            slots.append(table[index, places // size].long() * size + places % size)
        return torch.cat(slots)

    def begun(scheduled: Any) -> None:
        trees.scattered = None  # else the hook of the KV cache takes this for rows of a tree
        slots = unaccepted(trees._block_size)
        for name, cache in zip(trees._layers, trees.caches(), strict=True):
            blocks, heads, size, _ = cache.shape
            keys, values = cache.view(blocks, heads, size * 2, -1).chunk(2, dim=2)  # as in vLLM's do_kv_cache_update
            keys[1 : trees.scratch.count + 1], values[1 : trees.scratch.count + 1] = torch.nan, value
            key = torch.full((len(slots), heads, layers[name].impl.head_size), torch.nan, dtype=cache.dtype)
            layers[name].impl.do_kv_cache_update(layers[name], key, torch.full_like(key, value), cache, slots)
        begin(scheduled)

    trees.begin = begun


def cure(runner: Any) -> None:
    """Ends what ``poison`` began."""
    vars(runner._spac_trees).pop("begin", None)
    for cache in runner._spac_trees.caches():
        cache.nan_to_num_()


def allow_any_share() -> None:
    """Lets scratch take most of the KV cache, so that a few requests exhaust the rest."""
    from vllm_spac.methods.trees import tree_room

    tree_room.MOST_SHARE = 1.0


def count_preemptions(llm: Any) -> list[str]:
    """A list that receives the requests that are preempted from now on."""
    scheduler, preempted = llm.llm_engine.engine_core.engine_core.scheduler, []
    preempt = scheduler._preempt_request

    def counted(request: Any, *given: Any, **named: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(request, *given, **named)

    scheduler._preempt_request = counted
    return preempted


def cut(llm: Any) -> None:
    """Takes away the last drafts of a tree before they are scheduled, another number at each step."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    update, count = scheduler.update_draft_token_ids, iter(range(10**9))

    def updated(drafts: Any) -> None:
        drafts.draft_token_ids = [ids[: len(ids) - next(count) % 7] for ids in drafts.draft_token_ids]
        update(drafts)

    scheduler.update_draft_token_ids = updated


def without_compaction(runner: Any) -> None:
    import torch

    from vllm_spac.methods.trees.tensors import BlockCopies, StepTrees

    nothing = torch.empty(0, dtype=torch.long)
    StepTrees.after_walk = lambda self, last, block_size: BlockCopies(nothing, nothing)


def without_positions(runner: Any) -> None:
    from vllm_spac.methods.trees.tensors import StepTrees

    StepTrees.positions = property(lambda self: self.linear)


def main(asked: dict) -> dict:
    import vllm_spac

    if "small cache" in asked["tricks"]:
        allow_any_share()
    with engines.engine(str(TOY / "target"), asked["spac"], **SETTINGS | asked["options"]) as llm:
        preempted = count_preemptions(llm)
        if "poison" in asked["tricks"]:
            poison(runner_of(llm))
        if "cut" in asked["tricks"]:
            cut(llm)
        answers = {kind: said(llm, given) for kind, given in requests().items() if kind in asked["kinds"]}
        for name, trick in (("without compaction", without_compaction), ("without positions", without_positions)):
            if name in asked["tricks"]:
                if "poison" in asked["tricks"]:
                    cure(runner_of(llm))  # attending to NaN, they would have no answers to compare
                trick(runner_of(llm))
                answers[name] = said(llm, requests()["greedy"])
        stats = vllm_spac.stats(llm)["workers"][0] if asked["spac"] is not None else {}
        refused = refusals(llm) if "refusals" in asked["tricks"] else {}
        return {"answers": answers, "stats": stats, "preempted": len(preempted), "refused": refused}


def run(spac: dict | None, kinds: tuple[str, ...] = (), tricks: tuple[str, ...] = (), **options: Any) -> dict:
    """What an engine of its own says: answers by kind, and the plugin's statistics."""
    every = tuple(kind for kind in requests() if kind not in WITH_TOKENIZER)
    asked = {"spac": spac, "kinds": kinds or every, "tricks": tricks, "options": options}
    return forked.answer(forked.run([__file__, json.dumps(asked)], timeout=1500))


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
