"""Weights of a running engine: every request to change them is refused, and nothing is changed."""

from __future__ import annotations

import engines
import pytest

from vllm_spac.errors import UnsupportedError


def test_updates_are_refused_and_the_engine_goes_on(checkpoint, stock, tmp_path):
    other = str(checkpoint("olmoe"))
    kernel = {"weights_iterator": [], "is_checkpoint_format": False}
    ways = {
        "the worker": lambda llm: llm.collective_rpc("reload_weights"),
        "another checkpoint": lambda llm: llm.collective_rpc("reload_weights", kwargs={"weights_path": other}),
        "the kernel's format": lambda llm: llm.collective_rpc("reload_weights", kwargs=kernel),
        "the runner": lambda llm: llm.collective_rpc(lambda worker: worker.model_runner.reload_weights()),
        "the model": lambda llm: llm.apply_model(lambda model: model.load_weights(iter([]))),
    }
    expected = stock("qwen3_moe").tokens
    with engines.engine(checkpoint("qwen3_moe"), {"slots": "30%", "disk_dir": str(tmp_path)}) as llm:
        for name, way in ways.items():
            with pytest.raises(UnsupportedError, match="nothing was changed: restart it with the new checkpoint"):
                way(llm)
            assert engines.say(llm, max_tokens=4) == [tokens[:4] for tokens in expected], name
        with pytest.raises(UnsupportedError, match="would save what is in the slots"):
            llm.collective_rpc("save_sharded_state", kwargs={"path": str(tmp_path / "saved")})
        assert not (tmp_path / "saved").exists()


def test_an_engine_without_the_plugin_takes_updates(checkpoint):
    """In a process where an engine with it was hooked."""
    with engines.engine(checkpoint("qwen3_moe")) as llm:
        assert llm.collective_rpc("reload_weights") == [None]
