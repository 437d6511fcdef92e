"""Packed experts damaged while a server runs or is stopped: correct tokens, or an error that names the file."""

from __future__ import annotations

import os
import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import exchange
import httpx
import pytest
import serving
from exchange import PROMPTS

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]  # servers start slowly on a busy machine

NAMED = r"spac: (\S+/expert-\d{4}\.safetensors) (is not what was packed|has \d+ bytes)|cannot read (\S+/expert-\d{4})"


def flip(path: Path, rng: random.Random) -> None:
    """Another value for one bit, header or data."""
    position, bit = rng.randrange(path.stat().st_size), 1 << rng.randrange(8)
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ bit]))


def spoil(path: Path, rng: random.Random) -> None:
    """One of the ways in which a file is lost."""
    how = rng.choice(["flip", "flip", "flip", "header", "short", "long", "empty", "gone", "zeros"])
    if how == "flip":
        flip(path, rng)
    elif how == "header":
        path.write_bytes(bytes(4096) + path.read_bytes()[4096:])
    elif how == "short":
        os.truncate(path, path.stat().st_size // 2)
    elif how == "long":
        os.truncate(path, path.stat().st_size + 4096)
    elif how == "empty":
        os.truncate(path, 0)
    elif how == "gone":
        path.unlink()
    else:
        path.write_bytes(bytes(path.stat().st_size))


def ask_while_it_lasts(server, answers) -> int:
    """Ask for every prompt again and again until the server ends or has answered them all; how many answers came."""

    def one(index: int) -> int:
        with exchange.client(server.url) as http:
            try:
                answer = exchange.ask(http, exchange.greedy(PROMPTS[index]))
            except httpx.HTTPError:
                return 0
        if answer["status"] != 200:
            return 0
        assert answer["choices"][0]["token_ids"] == answers[index], "a wrong token"
        return 1

    with ThreadPoolExecutor(4) as pool:
        return sum(pool.map(one, range(len(PROMPTS))))


def serves(server, answers) -> bool:
    """Whether it serves every prompt, with right tokens; if it does not, its log names a file."""
    serving.wait_until(lambda: server.process.poll() is not None or _answers(server), 300, "it serves or ends")
    answered = ask_while_it_lasts(server, answers)
    server.stop()
    server.wait_for_end()
    if answered == len(PROMPTS):
        return True
    assert re.search(NAMED, "\n".join(server.messages())), server.log.read_text()[-3000:]
    return False


def _answers(server) -> bool:
    try:
        server.get("/health")
    except OSError:
        return False
    return True


def restarts(starting, disk: Path, answers, most: int) -> bool:
    """Whether one of ``most`` starts serves, right tokens in any case; those that do not name a file."""
    return any(serves(starting(disk), answers) for _ in range(most))


@pytest.fixture(scope="module")
def disk(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("damaged") / "disk"


@pytest.mark.parametrize("flags", [(), serving.THREE_TIERS], ids=["two tiers", "three tiers"])
def test_damage_while_serving(starting, disk, answers, flags):
    """What host memory has was checked when it was read: only what comes from the disk can be damaged."""
    server = starting(disk, *flags).wait()
    assert exchange.tokens(server.url) == answers
    rng = random.Random(1)
    for path in rng.sample(serving.packed(disk), 60):
        flip(path, rng)
    answered = ask_while_it_lasts(server, answers)
    assert answered < len(PROMPTS), "no damaged expert was read"
    server.stop()
    named = re.search(NAMED, "\n".join(server.messages()))
    assert named, server.log.read_text()[-3000:]
    print(f"{answered} right answers before {named[0]}")


def test_one_restart_heals_what_was_damaged_while_serving(starting, disk, answers):
    """The folder of the test before this one."""
    assert list(disk.rglob("*.corrupt"))
    assert restarts(starting, disk, answers, 1)


def test_one_restart_heals_what_was_damaged_while_stopped(starting, disk, answers, tmp_path):
    """At most one start may fail: with the file's name, and all that is damaged set right by the next."""
    fresh = tmp_path / "fresh"
    server = starting(fresh).wait()
    server.stop()
    rng = random.Random(2)
    for path in rng.sample(serving.packed(fresh), 40):
        spoil(path, rng)
    assert restarts(starting, fresh, answers, 2)
