"""Stops or ends one thread of this process while it works, which no signal can: by a debugger in a process of its own.

The debugger gives the thread a breakpoint of the processor, so that it stops right where a function begins, and no
other thread does. For x86 on Linux, where processes may trace their parents.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_SEIZE, _INTERRUPT, _CONT, _DETACH, _GETREGS, _SETREGS, _POKEUSER = 0x4206, 0x4207, 7, 17, 12, 13, 6
_DEBUG_REGISTERS = 848  # where ``struct user`` has them
_EXIT = 60  # the system call by which one thread ends
_RDI, _RSI, _ORIG_RAX, _RIP = 14, 13, 15, 16  # of the 27 registers of ``user_regs_struct``
_WALL = 0x40000000


def named(name: str, count: int = 0) -> list[int]:
    """Numbers of this process's threads of that name, once there are so many: a new one has another for a while."""
    found: list[int] = []
    while not found or len(found) < count:
        found = []
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended
                if (task / "comm").read_text().strip() == name:
                    found.append(int(task.name))
        if not count:
            break
        time.sleep(0.001)
    return sorted(found)


@contextlib.contextmanager
def stopped_in(thread: int, function: int, seconds: float = 60.0) -> Iterator[subprocess.Popen[str]]:
    """The thread stands where the function at this address begins; it goes on when the block ends.

    ``end`` makes it end instead. Skips the test where a system lets nobody trace.
    """
    if platform.machine() != "x86_64" or sys.platform != "linux":
        pytest.skip("one thread is stopped by the debugging registers of x86")
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1 % 2**64), 0, 0, 0)  # Yama: whoever may trace this
    leave = ctypes.cast(ctypes.CDLL(None).syscall, ctypes.c_void_p).value
    command = [sys.executable, __file__, *map(str, (thread, function, leave, seconds))]
    tracer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert tracer.stdin is not None and tracer.stdout is not None
    try:
        said = tracer.stdout.readline().strip()
        if said.startswith("refused"):
            pytest.skip(f"no thread can be traced here ({said})")
        assert said == "stopped", said or "the debugger failed"
        yield tracer
    finally:
        with contextlib.suppress(BrokenPipeError):
            tracer.stdin.close()
        tracer.wait()
        tracer.stdout.close()


def end(tracer: subprocess.Popen[str]) -> None:
    """Ends the stopped thread, and nothing else of its process."""
    assert tracer.stdin is not None and tracer.stdout is not None
    tracer.stdin.write("end\n")
    tracer.stdin.flush()
    assert tracer.stdout.readline().strip() == "ended"


def _trace(thread: int, function: int, leave: int, seconds: float) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long

    def call(request: int, address: int = 0, data: int = 0) -> None:
        if libc.ptrace(request, thread, address, data) != 0:
            print(f"refused: request {request:#x}, {os.strerror(ctypes.get_errno())}", flush=True)
            sys.exit(1)

    def interrupt() -> None:
        call(_INTERRUPT)
        os.waitpid(thread, _WALL)

    def break_at(address: int) -> None:
        call(_POKEUSER, _DEBUG_REGISTERS, address)
        call(_POKEUSER, _DEBUG_REGISTERS + 7 * 8, bool(address))

    call(_SEIZE)
    interrupt()
    break_at(function)
    call(_CONT)
    until = time.monotonic() + seconds
    while not (come := os.waitpid(thread, _WALL | os.WNOHANG)[0]) and time.monotonic() < until:
        time.sleep(0.0005)
    if not come:
        interrupt()
    break_at(0)
    print("stopped" if come else "the thread has not come by", flush=True)
    if sys.stdin.readline() == "end\n":
        registers = (ctypes.c_ulonglong * 27)()
        call(_GETREGS, 0, ctypes.addressof(registers))
        registers[_RIP], registers[_RDI], registers[_RSI], registers[_ORIG_RAX] = leave, _EXIT, 0, 2**64 - 1
        call(_SETREGS, 0, ctypes.addressof(registers))
        call(_DETACH)
        print("ended", flush=True)


if __name__ == "__main__":
    _trace(*map(int, sys.argv[1:4]), seconds=float(sys.argv[4]))
