"""The sentence that a process of an engine leaves to the command that started it."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_spac.errors import StoreError
from vllm_spac.recording import last_words

CHILD = """
from vllm_spac.errors import StoreError
from vllm_spac.recording import last_words
last_words.install()
with last_words.ending():
    raise StoreError("the disk is full")
"""


@pytest.fixture
def command(monkeypatch):
    """This process waits for its children's sentences, as `vllm serve` does."""
    monkeypatch.setenv(last_words.FILE, "")
    monkeypatch.delenv(last_words.FILE)  # with setenv before, what expect() writes there is taken back
    monkeypatch.setattr(last_words, "_owner", None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    factory = logging.getLogRecordFactory()
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    last_words.install()
    yield os.environ[last_words.FILE]
    logging.setLogRecordFactory(factory)


def test_an_engine_in_the_commands_own_process_raises(command):
    with pytest.raises(StoreError, match="full"), last_words.ending():
        raise StoreError("the disk is full")
    assert os.path.getsize(command) == 0


def test_a_child_leaves_its_sentence_and_no_trace(command, capsys):
    ended = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (1, "")
    last_words._end(Path(command), os.getpid())
    assert capsys.readouterr().err == "vllm: error: the disk is full\n"
    assert not os.path.exists(command)


def test_a_log_has_the_trace_again_once_nobody_waits(command, caplog, monkeypatch):
    def fails():
        try:
            raise StoreError("the disk is full")
        except StoreError:
            logging.getLogger("vllm.spac").exception("EngineCore failed.")

    fails()
    monkeypatch.delenv(last_words.FILE)
    fails()
    first, second = caplog.records
    assert first.exc_info is None and first.getMessage() == "EngineCore failed: the disk is full"
    assert second.exc_info is not None and second.getMessage() == "EngineCore failed."
