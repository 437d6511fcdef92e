"""The sentence that a process of an engine leaves to the command that started it."""

import os
import subprocess
import sys

import pytest

from vllm_spac.errors import StoreError
from vllm_spac.integration import last_words

CHILD = """
from vllm_spac.errors import StoreError
from vllm_spac.integration import last_words
last_words.expect()
with last_words.told():
    raise StoreError("the disk is full")
"""


@pytest.fixture
def command(monkeypatch):
    """This process waits for its children's sentences, as `vllm serve` does."""
    monkeypatch.setenv(last_words.FILE, "")
    monkeypatch.delenv(last_words.FILE)  # with setenv before, what expect() writes there is taken back
    monkeypatch.setattr(last_words, "_owner", None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    last_words.expect()
    return os.environ[last_words.FILE]


def test_an_engine_in_the_commands_own_process_raises(command):
    with pytest.raises(StoreError, match="full"), last_words.told():
        raise StoreError("the disk is full")
    assert os.path.getsize(command) == 0


def test_a_child_leaves_its_sentence_and_no_trace(command, capsys):
    ended = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (1, "")
    sys.excepthook(RuntimeError, RuntimeError("Engine core initialization failed"), None)
    assert capsys.readouterr().err == "vllm: error: the disk is full\n"
