"""flashlib's admission kernel against the model of it in ``benchmarks/replay/executions.py``.

flashlib is no dependency; ``pip install --no-deps flashlib==0.4.0`` lets this run. Triton reads TRITON_INTERPRET when
it is imported, so it runs in a process of its own: ``TRITON_INTERPRET=1 python tests/kernels/test_admission.py``.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS, EXPERTS = 3, 16
CALLS = 40


@pytest.mark.skipif(
    importlib.util.find_spec("flashlib") is None,
    reason="flashlib is not installed; pip install --no-deps flashlib==0.4.0 compares its kernel with our model of it",
)
def test_the_model_decides_as_the_kernel():
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)


def compare(strategy: str, slots: int, rows: int, seed: int) -> int:
    """Random routing of layers in turns; every decision and all state must be equal. Returns the copies."""
    import torch
    from flashlib.kernels.slot_cache import lru_ensure

    sys.path.insert(0, str(ROOT / "benchmarks" / "replay"))
    from admission import DeviceLRU

    rng, model, copied = np.random.default_rng(seed), DeviceLRU(LAYERS * EXPERTS, slots), 0
    state = {
        "slot_of_id": torch.full((LAYERS * EXPERTS,), -1, dtype=torch.int32),
        "id_of_slot": torch.full((slots,), -1, dtype=torch.int32),
        "lru_usage": torch.zeros(slots, dtype=torch.int64),
        "lru_step": torch.zeros((), dtype=torch.int64),
    }
    for call in range(CALLS):
        first = call % LAYERS * EXPERTS
        popular = rng.zipf(1.3, size=(rows, 2)) % EXPERTS
        query = torch.from_numpy(popular.astype(np.int32).ravel())
        if len(np.unique(query)) > slots:
            continue
        length = min(len(query), slots)
        said = {"out_indices": torch.full_like(query, -9), "num_copy": torch.zeros((), dtype=torch.int64)}
        said |= {name: torch.full((length,), -9, dtype=torch.int32) for name in ("src_indices", "dst_indices")}
        lru_ensure(query, **state, **said, id_base=first, strategy=strategy)
        missing, victims = model.ensure(query.numpy() + first)
        count = int(said["num_copy"])
        assert count == len(missing)
        assert (said["src_indices"][:count].numpy() + first == missing).all()
        assert (said["dst_indices"][:count].numpy() == victims).all()
        assert (said["out_indices"].numpy() == model.slot_of[query.numpy() + first]).all()
        assert (state["slot_of_id"].numpy() == model.slot_of).all()
        assert (state["id_of_slot"].numpy() == model.id_of).all()
        assert (state["lru_usage"].numpy() == model.used).all()
        copied += count
    return copied


if __name__ == "__main__":
    cases = [(slots, rows) for slots in (2, 8, 13, 40, 48) for rows in (1, 4, 9)]
    for kind in ("seq", "insert"):
        copies = sum(compare(kind, *case, seed) for seed, case in enumerate(cases))
        print(f"{kind}: {len(cases)} caches, up to {CALLS} calls each, {copies} copies: all decisions are equal")
