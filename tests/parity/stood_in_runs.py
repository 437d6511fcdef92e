"""Writes a tiny model of ``tests/upstream`` with stand-ins, or serves it: `stood_in_runs.py JSON` prints an answer.

Attention, residual streams and routers' kernels that a CPU has not are replaced (``stand_ins``); the layer of experts
is vLLM's and ours. On request steps are replayed from emulated full CUDA graphs (``full_graphs``).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import engines
import forked

sys.path.insert(0, str(Path(__file__).parents[1] / "upstream"))
import stand_ins
import tiny_models

SETTINGS = {"dtype": "float32", "max_num_batched_tokens": 64, "max_num_seqs": 4, "block_size": 32}
SETTINGS |= {"num_gpu_blocks_override": None, "enable_prefix_caching": False}


def main(asked: dict) -> dict:
    import vllm_spac

    assert stand_ins.install(asked["architecture"])
    model = Path(asked["folder"])
    if asked["spac"] == "write":
        return tiny_models.write(asked["architecture"], model)
    counts = {}
    if asked["graphs"]:
        import full_graphs

        full_graphs.install()
        asked["options"] |= full_graphs.options()
    with engines.engine(str(model), asked["spac"], **SETTINGS | asked["options"]) as llm:
        said = engines.say(llm, engines.PROMPTS[:4], asked["tokens"])
        stats = vllm_spac.stats(llm)["workers"][0] if asked["spac"] is not None else {}
    if asked["graphs"]:
        counts = {"captures": full_graphs.CudaGraph.captures, "replays": full_graphs.CudaGraph.replays}
    return {"said": said, "stats": stats, **counts}


def run(
    architecture: str, folder: Path, spac: Any, graphs: bool = False, tokens: int = 8, **options: Any
) -> dict[str, Any]:
    """What an engine of its own says; ``spac``: None for stock, "write" to write the model into ``folder``."""
    asked = {"architecture": architecture, "folder": str(folder), "spac": spac, "graphs": graphs, "tokens": tokens}
    return forked.answer(forked.run([__file__, json.dumps(asked | {"options": options})], timeout=1500))


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
