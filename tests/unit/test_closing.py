"""What is dropped without being closed: closed once, never where the garbage collector happens to run."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading

import pytest

from vllm_spac.system.threads import Closer


class Owner:
    """Closes what ``close`` closes."""

    def __init__(self, close):
        self.close = Closer(self, close)


def test_a_call_closes_here_and_once():
    threads = []
    owner = Owner(lambda: threads.append(threading.current_thread()))
    owner.close()
    owner.close()
    del owner
    gc.collect()
    assert threads == [threading.current_thread()]


def test_an_error_reaches_the_caller():
    def close():
        raise OSError("disk")

    owner = Owner(close)
    with pytest.raises(OSError, match="disk"):
        owner.close()


def test_dropped_while_a_lock_is_held_that_closing_takes():
    lock, closed = threading.Lock(), threading.Event()

    def close():
        if lock.acquire(timeout=300):
            closed.set()

    owner = Owner(close)
    with lock:  # as `threading` holds one of its own when the collector runs in it
        del owner
        gc.collect()
        assert not closed.is_set()
    assert closed.wait(600)


def test_an_error_is_logged_and_the_next_is_closed(caplog):
    closed = threading.Event()

    def fail():
        raise OSError("disk is gone")

    first, second = Owner(fail), Owner(closed.set)
    del first
    del second
    gc.collect()
    assert closed.wait(600)
    assert "disk is gone" in caplog.text


EXIT = """
    import atexit, sys, weakref
    if "late" in sys.argv:
        # Before the import below, so `weakref` runs its finalizers at exit after that module's own wait.
        class Object: pass
        other = Object()
        weakref.finalize(other, lambda: None)
    from vllm_spac.system.threads import Closer
    class Owner:
        pass
    def close(name):
        print("closed", name, flush=True)
    kept, dropped = Owner(), Owner()
    kept.close = Closer(kept, lambda: close("kept"))
    dropped.close = Closer(dropped, lambda: close("dropped"))
    del dropped
    if "fork" in sys.argv:
        import os
        if os.fork():
            os.wait()
            kept.close()
            sys.exit()
        child = Owner()
        child.close = Closer(child, lambda: close("child's"))
        del child
"""


@pytest.mark.parametrize("when", ["early", "late"])
def test_everything_is_closed_at_exit(when):
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(EXIT), when], capture_output=True, text=True, timeout=600, check=True
    )
    assert sorted(run.stdout.splitlines()) == ["closed dropped", "closed kept"], run.stderr


def test_a_fork_closes_what_it_made():
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(EXIT), "fork"], capture_output=True, text=True, timeout=600, check=True
    )
    assert "closed child's" in run.stdout, run.stderr
