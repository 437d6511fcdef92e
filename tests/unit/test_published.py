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
    found = find_model(*sys.argv[1:])
    sizes = len(found.checkpoint().layer_bytes) if found.origin == "copy" else None
    print(json.dumps([found.origin, found.config["num_hidden_layers"], sizes, found.remark]))
except UnsupportedError as error:
    print(json.dumps(str(error)))
"""
INDEX = {"metadata": {"total_size": 3 << 30}, "weight_map": {}}
ANSWERS = {"/gated": 403, "/wrong-token": 401, "/broken": 500}  # by what a model's name ends with


class Hub(BaseHTTPRequestHandler):
    """A hub with one model in two revisions, and some that it does not give."""

    tokens: list[str | None] = []
    asked: list[str] = []
    files = {"config.json": CONFIG, "model.safetensors.index.json": INDEX}
    index_status = 200

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self._answer(whole=True)

    def _answer(self, whole: bool = False) -> None:
        self.tokens.append(self.headers.get("Authorization"))
        _, owner, name, _, revision, file = self.path.split("/")
        known = (owner, name) == ("some", "model")
        status, code = ANSWERS.get(f"/{name}", 404), "GatedRepo" if name == "gated" else "RepoNotFound"
        if known:
            there = file in self.files
            status, code = (200, "") if there and revision in ("main", "v1") else (404, "RevisionNotFound")
            if revision in ("main", "v1") and not there:
                code = "EntryNotFound"
            if there and file != "config.json" and self.index_status != 200:
                status = self.index_status
        content = self.files.get(file) if status == 200 else None
        if revision == "v1" and content is CONFIG:
            content = CONFIG | {"num_hidden_layers": 3}
        body = b"" if content is None else json.dumps(content).encode()
        self.send_response(status)
        if status == 200:
            self.send_header("ETag", f'"{abs(hash((file, revision))):016x}"')
            self.send_header("X-Repo-Commit", ("f" if revision == "main" else "e") * 40)
        elif status in (403, 404):
            self.send_header("X-Error-Code", code)
        elif status == 401:
            self.send_header("X-Error-Message", "Invalid credentials in Authorization header")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body if whole else b"")

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def told(model: str, home: Path, *revision: str, **variables: str) -> object:
    """What a process of its own finds: huggingface_hub reads its variables when it is imported."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    environment = kept | {"HF_HOME": str(home)} | variables
    done = subprocess.run(
        [sys.executable, "-c", TELL, model, *revision], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


CALCULATED = "sizes are calculated from config.json, without a checkpoint"


def test_a_config_is_downloaded_once_and_then_found_offline(hub: str, tmp_path: Path) -> None:
    """With the index of the weights, which says how large their files are."""
    Hub.tokens.clear()
    Hub.asked.clear()
    both = ["config.json", 2, None, f"{CALCULATED}; the files of its weights have 3.00 GiB, layers for drafts included"]
    for away in ({"HF_ENDPOINT": hub, "HF_TOKEN": "hf_mine"}, {"HF_ENDPOINT": hub}, {"HF_HUB_OFFLINE": "1"}):
        assert told("some/model", tmp_path, **away) == both
    assert "Bearer hf_mine" in Hub.tokens
    assert sorted(path.rpartition("/")[2] for path in Hub.asked if path.startswith("/some/")) == [
        "config.json",
        "model.safetensors.index.json",
    ]
    other = told("some/model", tmp_path / "other", HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in str(other) and "hf download some/model config.json" in str(other)


def test_a_revision_is_one_of_the_hub_s(hub: str, tmp_path: Path) -> None:
    found = told("some/model", tmp_path, "v1", HF_ENDPOINT=hub)
    assert isinstance(found, list) and found[1] == 3
    assert "some/model has no revision v2 on the hub" in str(told("some/model", tmp_path, "v2", HF_ENDPOINT=hub))
    assert "which --revision v1 is of" in str(told(str(tmp_path), tmp_path, "v1"))


def test_without_an_index_the_size_of_the_files_is_not_said(hub: str, tmp_path: Path, monkeypatch) -> None:
    """Of one file there is none; of a hub that breaks it is said, and where there is no hub any more."""
    monkeypatch.setattr(Hub, "index_status", 500)
    (_, _, _, remark) = told("some/model", tmp_path, HF_ENDPOINT=hub)  # type: ignore[misc]
    problem = f"how large the files of its weights are is not known, because {hub} answered 500 Internal Server Error"
    assert remark == f"{CALCULATED}; {problem}"
    (_, _, _, remark) = told("some/model", tmp_path, HF_HUB_OFFLINE="1")  # type: ignore[misc]
    assert remark.endswith("is not known, because HF_HUB_OFFLINE is set")
    monkeypatch.setattr(Hub, "files", {"config.json": CONFIG})
    assert told("some/model", tmp_path / "one", HF_ENDPOINT=hub) == ["config.json", 2, None, CALCULATED]


def test_a_quantisation_that_is_not_known_is_no_plan(hub: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(Hub, "files", Hub.files | {"hf_quant_config.json": {}})
    monkeypatch.setattr(Hub, "index_status", 500)
    said = str(told("some/model", tmp_path, HF_ENDPOINT=hub))
    assert f"and then {hub} answered 500" in said and "whether its experts are quantised is not known" in said


def test_what_the_hub_refuses_is_said_with_a_remedy(hub: str, tmp_path: Path) -> None:
    def said(model: str) -> str:
        return str(told(model, tmp_path, HF_ENDPOINT=hub, HF_TOKEN="hf_old"))

    assert "the hub has no model some/typo" in said("some/typo")
    assert "ask on its page, and set HF_TOKEN" in said("some/gated")
    unknown = said("some/wrong-token")
    assert f"{hub} answered 401 Unauthorized, as it does of a token that it does not know; set HF_TOKEN to" in unknown
    assert f"some/broken is not in the Hugging Face cache, and {hub} answered 500" in said("some/broken")


@pytest.mark.parametrize(("status", "words"), [(401, "Unauthorized"), (500, "Internal Server Error")])
def test_a_copy_is_taken_with_what_is_wrong_with_the_hub(hub, tmp_path, monkeypatch, status: int, words: str) -> None:
    monkeypatch.setitem(ANSWERS, "/Qwen3-30B-A3B", status)
    origin, layers, _, remark = told("Qwen/Qwen3-30B-A3B", tmp_path, HF_ENDPOINT=hub)  # type: ignore[misc]
    assert (origin, layers) == ("copy", 48)
    assert f"vllm_spac's own copy of its config.json, because {hub} answered {status} {words}" in remark
    refused = told("Qwen/Qwen3-30B-A3B", tmp_path, "v1", HF_ENDPOINT=hub)
    assert isinstance(refused, str) and f"answered {status}" in refused, "it is of no revision"


def test_where_no_hub_is_reached_the_copy_of_the_package_serves(tmp_path: Path) -> None:
    for away in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        origin, *layers, remark = told("Qwen/Qwen3-30B-A3B", tmp_path, **away)  # type: ignore[misc]
        assert (origin, layers) == ("copy", [48, 48])
        assert remark.endswith(("because HF_HUB_OFFLINE is set", "because http://127.0.0.1:9 was not reached"))
    assert "http://127.0.0.1:9 was not reached" in str(told("some/model", tmp_path, HF_ENDPOINT="http://127.0.0.1:9"))


def test_twelve_models_have_copies() -> None:
    assert len(published()) == 12 and all("architectures" in config for config in published().values())
    assert published()["casperhansen/mixtral-instruct-awq"]["quantization_config"]["quant_method"] == "awq"


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
