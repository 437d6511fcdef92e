"""Models by their names: what huggingface_hub gets from a hub, the package's copies, and what is no checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from vllm_spac.errors import UnsupportedError
from vllm_spac.storage.checkpoint.published import find_model, published

CONFIG = published()["Qwen/Qwen3-30B-A3B"] | {"num_hidden_layers": 2}
TELL = """
import json, sys
from vllm_spac.errors import UnsupportedError
from vllm_spac.storage.checkpoint.published import find_model
try:
    found = find_model(sys.argv[1])
    print(json.dumps([found.origin, found.config["num_hidden_layers"], len(found.checkpoint().layer_bytes)]))
except UnsupportedError as error:
    print(json.dumps(str(error)))
"""


class Hub(BaseHTTPRequestHandler):
    """A hub with one model and one that is gated."""

    tokens: list[str | None] = []

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer(json.dumps(CONFIG).encode())

    def _answer(self, body: bytes = b"") -> None:
        self.tokens.append(self.headers.get("Authorization"))
        there = self.path == "/some/model/resolve/main/config.json"
        gated = self.path.startswith("/some/gated/")
        self.send_response(200 if there else 403 if gated else 404)
        if there:
            self.send_header("ETag", '"0123456789abcdef"')
            self.send_header("X-Repo-Commit", "f" * 40)
        else:
            missing = "EntryNotFound" if self.path.startswith("/some/model/") else "RepoNotFound"
            self.send_header("X-Error-Code", "GatedRepo" if gated else missing)
        self.send_header("Content-Length", str(len(json.dumps(CONFIG)) if there else 0))
        self.end_headers()
        self.wfile.write(body if there else b"")

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def told(model: str, home: Path, **variables: str) -> object:
    """What a process of its own finds: huggingface_hub reads its variables when it is imported."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    environment = kept | {"HF_HOME": str(home)} | variables
    done = subprocess.run([sys.executable, "-c", TELL, model], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_config_is_downloaded_once_and_then_found_offline(hub: str, tmp_path: Path) -> None:
    Hub.tokens.clear()
    assert told("some/model", tmp_path, HF_ENDPOINT=hub, HF_TOKEN="hf_mine") == ["config.json", 2, 2]
    assert "Bearer hf_mine" in Hub.tokens
    assert told("some/model", tmp_path, HF_HUB_OFFLINE="1") == ["config.json", 2, 2]
    other = told("some/model", tmp_path / "other", HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in str(other) and "hf download some/model config.json" in str(other)


def test_what_the_hub_refuses_is_said_with_a_remedy(hub: str, tmp_path: Path) -> None:
    assert "the hub has no model some/typo" in str(told("some/typo", tmp_path, HF_ENDPOINT=hub))
    assert "ask on its page, and set HF_TOKEN" in str(told("some/gated", tmp_path, HF_ENDPOINT=hub))


def test_where_no_hub_is_reached_the_copy_of_the_package_serves(tmp_path: Path) -> None:
    for away in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        assert told("Qwen/Qwen3-30B-A3B", tmp_path, **away) == ["copy", 48, 48]
    assert "http://127.0.0.1:9 was not reached" in str(told("some/model", tmp_path, HF_ENDPOINT="http://127.0.0.1:9"))


def test_eleven_models_have_copies() -> None:
    assert len(published()) == 11 and all("architectures" in config for config in published().values())
    assert published()["casperhansen/mixtral-instruct-awq"]["quantization_config"]["quant_method"] == "awq"


@pytest.mark.parametrize("name", ["./nonexist", "/nope", "../x/y", "nonexist"])
def test_a_missing_folder_is_named_as_one(name: str) -> None:
    with pytest.raises(UnsupportedError, match="is not a folder on this machine") as caught:
        find_model(name)
    assert "hf download" not in str(caught.value)


def test_what_is_no_checkpoint_is_named_as_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="is a folder without config.json; .*name a folder with config.json"):
        find_model(str(tmp_path))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + bytes(64))
    for name, says in (
        (file, "model.gguf is a GGUF file, which is"),
        (tmp_path, "is a folder of GGUF files, which are"),
    ):
        with pytest.raises(UnsupportedError, match=f"{says} not read; name a folder with config.json"):
            find_model(str(name))
