"""A worker among peers that do not have its secret, and among some that have it and send what they like.

Each attack is played against a real worker over real sockets, and the test is that an engine is served meanwhile or
afterwards, with the bits of one process.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import strangers
import torch
import zmq
from effort import examples
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from worker_threads import (
    ANOTHER,
    HIDDEN,
    LAYERS,
    SECRET,
    TOP_K,
    Threads,
    answers,
    assert_right,
    connected,
    services,
)

from vllm_spac.integration import worker_process
from vllm_spac.methods.od_moe import worker_link
from vllm_spac.methods.od_moe.wire import (
    NO_FINGERPRINT,
    FrameKind,
    Header,
    Hello,
    Limits,
    decode,
    encode,
    raw,
    text_payload,
)
from vllm_spac.methods.od_moe.worker_link import Lost, WorkerLink, facts

MIB = 1 << 20


@pytest.fixture(scope="module")
def places() -> Iterator[Threads]:
    """One worker for all tests: whatever one of them does to it, the others meet."""
    found = Threads(1)
    yield found
    found.close()


@pytest.fixture(scope="module")
def context() -> Iterator[zmq.Context]:
    found = zmq.Context()
    yield found
    found.destroy(linger=0)


@pytest.fixture(autouse=True)
def served_afterwards(places: Threads) -> Iterator[None]:
    yield
    engine(places)


def engine(places: Threads) -> None:
    """An engine comes, is served right, and goes; the worker stays."""
    client = connected(places)
    try:
        for layer in range(LAYERS):
            assert_right(client, layer, seed=layer)
    finally:
        client.connections.places = Threads(0)
        client.close()


def port(places: Threads) -> int:
    return places.running[0].worker.port


def proved(context: zmq.Context, places: Threads) -> zmq.Socket:
    """The socket of somebody who has the secret."""
    socket = worker_link.dealer(context, SECRET)
    socket.connect(places.addresses()[0])
    return socket


HELLO = encode(Header(FrameKind.HELLO), text_payload(Hello(facts=facts(), engine="engine")))


def received(socket: zmq.Socket) -> Header:
    return decode(worker_link.receive(socket), Limits()).header


def test_a_nonce_that_is_no_text(places: Threads) -> None:
    """One such HELLO ended workers that had a handshake of their own."""
    hello = encode(Header(FrameKind.HELLO), rb'{"nonce": "\ud800"}')
    with strangers.connect(port(places)) as peer:
        strangers.enter(peer)
        strangers.push(peer, strangers.message(*hello))
        engine(places)


def test_text_of_a_peer_with_the_secret_that_is_no_text(places: Threads, context: zmq.Context) -> None:
    socket, known = proved(context, places), json.dumps(facts()).encode()
    odd = rb'"\ud800"'
    for theirs in (odd, b'{"vllm": %b}' % odd, known):
        worker_link.send(socket, encode(Header(FrameKind.HELLO), b'{"engine": %b, "facts": %b}' % (odd, theirs)))
    worker_link.send(socket, HELLO)
    assert socket.poll(20_000)
    assert received(socket).kind == FrameKind.WELCOME and not socket.poll(0), "the others were dropped"
    socket.close()


def test_sixty_thousand_hellos_of_a_stranger_that_reads_no_answer(places: Threads) -> None:
    with strangers.connect(port(places)) as peer:
        strangers.enter(peer)
        strangers.push(peer, 60_000 * strangers.HELLO)
        engine(places)


def test_a_peer_with_the_secret_that_reads_no_answer(
    places: Threads, context: zmq.Context, caplog: pytest.LogCaptureFixture
) -> None:
    """What it is not sent is dropped, and nobody waits for it."""
    socket = worker_link.dealer(context, SECRET)
    socket.setsockopt(zmq.RCVHWM, 1)
    socket.setsockopt(zmq.RCVBUF, 1 << 12)
    socket.connect(places.addresses()[0])
    worker_link.send(socket, HELLO)
    assert socket.poll(20_000)
    question = encode(Header(FrameKind.STATS, received(socket).epoch))
    for _ in range(1000):  # until the buffers of the system, some MiB, are full
        for _ in range(100):
            socket.poll(20_000, zmq.POLLOUT)
            worker_link.send(socket, question)
        if "an engine does not read its answers" in caplog.text:
            break
    assert "an engine does not read its answers; dropped" in caplog.text
    assert answers(places.addresses()[0])
    socket.close()
    engine(places)


class Process:
    """A worker in a process of its own, whose memory can be looked at."""

    def __init__(self, *limits: int) -> None:
        command = [sys.executable, "-P", str(Path(__file__).with_name("worker_threads.py")), *map(str, limits)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.port = int(self._process.stdout.readline())
        self.address = f"tcp://127.0.0.1:{self.port}"
        self._before = self._memory()

    def _memory(self) -> int:
        return psutil.Process(self._process.pid).memory_info().rss

    def most_grown(self, act: Callable[[], object]) -> int:
        """The bytes by which its memory grows while something is done, and a little later."""
        thread, grown = threading.Thread(target=act, daemon=True), [0]
        thread.start()
        while thread.is_alive():
            grown.append(self._memory() - self._before)
            time.sleep(0.001)
        return max(*grown, self._memory() - self._before)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(60)


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    found = Process()
    yield found
    found.close()


def test_a_stranger_s_message_of_many_large_parts_is_not_kept(process: Process) -> None:
    """24 parts of 8 MiB, to be kept until the last has come; and parts that are larger than any may be."""
    many = 24 * strangers.piece(bytes(8 * MIB), more=True)
    large = strangers.greeting(b"CURVE") + strangers.piece(bytes(64 * MIB), command=True)
    for enters, data in ((True, many), (False, large)):
        with strangers.connect(process.port) as peer:
            if enters:
                strangers.enter(peer)
            assert process.most_grown(lambda peer=peer, data=data: strangers.push(peer, data)) < 8 * MIB
    assert answers(process.address)


def test_strangers_hold_one_small_part_each(process: Process) -> None:
    """zmq takes a part of a handshake whole before it looks at it."""
    part = strangers.piece(bytes(worker_link.PART), command=True)[:-1]
    peers = [strangers.connect(process.port) for _ in range(40)]

    def fill() -> None:
        for peer in peers:
            assert strangers.push(peer, strangers.greeting(b"CURVE") + part) == 64 + len(part)

    assert process.most_grown(fill) < (40 + 16) * (worker_link.PART + MIB // 16)
    for peer in peers:
        peer.close()
    assert answers(process.address)


def test_a_part_that_is_too_large_ends_the_connection_of_a_peer_with_the_secret(process: Process) -> None:
    context = zmq.Context()
    link = WorkerLink(context, process.address, SECRET, facts(), "engine")
    link.open(20)
    link.socket.send_multipart([b"head", bytes(64 * MIB)])
    with pytest.raises(Lost, match="its connection ended"):
        link.ask(FrameKind.STATS, 20)
    assert process.most_grown(lambda: None) < 16 * MIB
    link.drop()
    context.destroy(linger=0)
    assert answers(process.address)


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.full)])
def test_engines_get_in_beside_strangers(places: Threads, count: int) -> None:
    """Some say nothing, some noise, some begin a handshake, some ask without a secret, and all come again."""
    with strangers.open_files(4096), strangers.crowd(port(places), count):
        for _ in range(3):
            engine(places)


@pytest.mark.full
def test_engines_get_in_where_strangers_take_all_descriptors() -> None:
    """They wait until strangers that have proved nothing are sent away, which is soon."""
    process = Process(256)
    with strangers.open_files(4096), strangers.crowd(process.port, 600, [b""]):
        context = zmq.Context()
        for _ in range(2):
            link = WorkerLink(context, process.address, SECRET, facts(), "engine")
            link.open(120)
            link.close()
        context.destroy(linger=200)
    process.close()


def test_who_knows_the_public_key_alone_stays_outside(places: Threads, context: zmq.Context) -> None:
    """Each side proves that it has the secret, not only that it has heard of the other's key."""
    public = worker_link._Keys.of(SECRET).public
    own = worker_link._Keys.of(ANOTHER)
    socket = context.socket(zmq.DEALER)
    socket.linger, socket.curve_serverkey = 0, public
    socket.curve_publickey, socket.curve_secretkey = own
    monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    socket.connect(places.addresses()[0])
    assert monitor.poll(20_000)
    assert zmq.utils.monitor.recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    socket.disable_monitor()
    monitor.close()
    socket.close()


def test_what_is_longer_than_any_frame_is_not_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_link, "_MOST_PARTS", 2)
    with zmq.Context() as context, context.socket(zmq.PAIR) as there, context.socket(zmq.PAIR) as here:
        there.bind("inproc://there")
        here.connect("inproc://there")
        for sent, found in (
            ([b"head"], [b"head"]),
            ([b"head", b""], [b"head", b""]),
            ([b"head", b"1", b"2"], [b"head", b"12"]),
            ([b"head", b"1", b"2", b"3", b"4"], [b"head", b"12"]),
        ):
            there.send_multipart(sent)
            assert [bytes(part) for part in worker_link.receive(here)] == found
            assert not here.poll(0), "nothing is left of it"


def test_a_payload_of_several_parts_arrives(context: zmq.Context) -> None:
    listener = worker_link.WorkerListener(SECRET)
    socket = worker_link.dealer(context, SECRET)
    socket.connect(f"tcp://127.0.0.1:{listener.socket.bind_to_random_port('tcp://127.0.0.1')}")
    for rows, hidden in (
        (1, 1),
        (1, worker_link.PART // 2),
        (2, worker_link.PART // 4 + 1),
        (5, worker_link.PART // 2 - 1),
    ):
        sent = torch.arange(rows * hidden, dtype=torch.int16).view(torch.bfloat16).view(rows, hidden)
        head = Header(FrameKind.ROWS, rows=rows, hidden=hidden, dtype=sent.dtype)
        worker_link.send(socket, encode(head, raw(sent)))
        assert listener.socket.poll(20_000) and listener.socket.recv()
        assert raw(decode(worker_link.receive(listener.socket), Limits()).rows()) == raw(sent)
    socket.close()
    listener.close()


def test_a_worker_of_a_release_without_curve(context: zmq.Context) -> None:
    """It is refused at once, in a sentence that says what may be wrong."""
    old = context.socket(zmq.ROUTER)
    at = old.bind_to_random_port("tcp://127.0.0.1")
    link = WorkerLink(context, f"tcp://127.0.0.1:{at}", SECRET, facts(), "engine")
    with pytest.raises(Lost, match="another secret or is of another release"):
        link.open(20)
    link.drop()
    old.close()


numbers = st.sampled_from([0, 1, 2, 3, 7, HIDDEN, 255]) | st.integers(0, 1 << 16)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
SERVICE = json.loads(text_payload(services(1)[0]))
texts = st.one_of(
    st.dictionaries(st.sampled_from(["engine", "facts", "nonce", "proof"]), values),
    st.dictionaries(st.sampled_from(sorted(SERVICE)), values).map(lambda changes: SERVICE | changes),
    st.just(SERVICE),
    st.fixed_dictionaries({"engine": st.text(max_size=3), "facts": st.just(facts())}),
    values,
).map(lambda found: json.dumps(found).encode())


@st.composite
def frames(draw: st.DrawFn, epoch: int = 0) -> list[bytes]:
    """A frame with a right checksum, whose sizes often fit, of any kind."""
    kind = draw(st.sampled_from(FrameKind))
    rows, hidden, top_k = draw(st.just((2, HIDDEN, TOP_K)) | st.tuples(*[numbers.filter(lambda n: n < 300)] * 3))
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16, None]))
    size = draw(st.sampled_from([rows * hidden * 4, rows * (hidden * 4 + top_k * 8), top_k * 4, rows, 0])) % MIB
    sized = draw(st.booleans())
    payload = draw(st.randoms()).randbytes(size) if sized else draw(texts | st.binary(max_size=50))
    sizes = {"rows": rows, "hidden": hidden, "top_k": top_k, "dtype": dtype} if sized else {}
    fingerprint = draw(st.sampled_from([NO_FINGERPRINT, bytes.fromhex(SERVICE["fingerprint"])]))
    header = Header(
        kind, draw(st.just(epoch) | numbers), draw(numbers), draw(numbers), draw(numbers), fingerprint=fingerprint,
        prompts=draw(st.booleans()), **sizes,
    )  # fmt: skip
    return list(encode(header, payload))


def damaged(message: list[bytes], place: int) -> list[bytes]:
    part = bytearray(message[place % len(message)])
    if part:
        part[place % len(part)] ^= 1 << place % 8
    message[place % len(message)] = bytes(part)
    return message


anything = st.lists(st.binary(max_size=200), min_size=1, max_size=6) | st.just([b""] * 3000)


@given(
    begin=st.sampled_from([b"", strangers.greeting(b"CURVE"), strangers.greeting(b"PLAIN"), strangers.NULL]),
    rest=st.lists(
        st.binary(max_size=300)
        | anything.map(lambda parts: strangers.message(*parts))
        | frames().map(lambda parts: strangers.message(*parts))
        | st.binary(max_size=300).map(lambda data: strangers.piece(data, command=True))
        | st.builds(
            lambda n, data: strangers.piece(b"\x05HELLO" + bytes(n) + data, command=True), st.just(194), st.just(b"")
        ),
        max_size=8,
    ),
)
@settings(max_examples=examples(150))
def test_what_strangers_send_never_arrives(places: Threads, begin: bytes, rest: list[bytes]) -> None:
    """Arbitrary bytes, before and in a handshake: no frame of a stranger is ever looked at."""
    worker, arrived = places.running[0].worker, []
    with pytest.MonkeyPatch.context() as patch, strangers.connect(port(places)) as peer:
        patch.setattr(worker, "serve_message", arrived.append)
        if begin == strangers.NULL:
            strangers.enter(peer)
        else:
            strangers.push(peer, begin)
        strangers.push(peer, b"".join(rest))
        assert not listens(peer)
    assert arrived == [] and places.running[0].thread.is_alive()


def listens(peer: socket.socket) -> bool:
    """Whether the worker took what a connection sent for a handshake that is done."""
    peer.settimeout(0.02)
    answer = b""
    with contextlib.suppress(OSError):
        while data := peer.recv(4096):
            answer += data
    return b"READY" in answer[64:]


# No shrinking: an example without an answer takes as long as its waits, and hundreds of them would look like a hang.
@given(data=st.data(), role=st.sampled_from(["nobody", "engine", "served"]))
@settings(max_examples=examples(150), phases=[Phase.explicit, Phase.reuse, Phase.generate])
def test_what_peers_with_the_secret_send_harms_nobody(
    places: Threads, context: zmq.Context, data: st.DataObject, role: str
) -> None:
    """Arbitrary messages and frames, in a session or before: answered, refused or dropped, and the next is answered."""
    assert places.running[0].thread.is_alive()
    link = WorkerLink(context, places.addresses()[0], SECRET, facts(), "engine")
    try:
        if role != "nobody":
            link.open(30)
        if role == "served":
            link.serve(services(1)[0], 30)
        sent = data.draw(
            st.lists(anything | frames(link.epoch) | st.builds(damaged, frames(link.epoch), numbers), max_size=12)
        )
        for message in sent:
            assert link.socket.poll(30_000, zmq.POLLOUT)
            link.socket.send_multipart(message, zmq.NOBLOCK)
        assert answers(places.addresses()[0], 30.0)
    finally:
        link.drop()


def test_all_connections_of_strangers_hold_little() -> None:
    """Measured with parts of 256 KiB and 20,000 descriptors: 5,000 strangers made a worker grow by a GiB."""
    assert worker_process.CONNECTIONS * worker_link.PART <= 64 * MIB
