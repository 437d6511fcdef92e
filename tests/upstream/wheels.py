"""The Python sources of a published vLLM, without the rest of its wheel: some 13 of several hundred MB."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from packaging.version import Version

from vllm_spac.system.files import replacing

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "vllm-sources"
_SECONDS = 20  # without an answer
_READ_AHEAD = 1 << 20  # bytes; a wheel's Python files are beside one another, but for eight gaps
_LISTED = 12


class NoSourcesError(Exception):
    """The sources of a version cannot be had; the message says why."""


def sources(version: str) -> Path:
    """Returns a zip archive with the Python sources of vLLM ``version``, kept from one call to the next.

    Raises:
        NoSourcesError: no index can be reached, or it has no wheel of this version for this machine.
    """
    if not re.fullmatch(r"[\w.+!-]+", version):
        raise NoSourcesError(f"{version!r} is no version of vLLM")
    kept = CACHE / f"{version}.zip"
    if not kept.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        url = _resolve(f"vllm=={version}")[1]
        with replacing(kept) as partial:
            try:
                with _opened(url) as wheel:
                    _keep(wheel, partial)
            except (OSError, urllib.error.URLError) as error:
                print(f"compat: {error}; pip downloads the whole wheel", file=sys.stderr)
                _download(version, partial)
    return kept


def newest() -> str:
    """Returns the newest version that pip's index has for this machine; raises as ``sources``."""
    return _resolve("vllm")[0]


def _resolve(requirement: str) -> tuple[str, str]:
    """Returns (version, address of its wheel): what pip would install, by the index that it is configured for."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = ("--dry-run", "--ignore-installed", "--report", str(report))
        _pip("install", *options, requirement)
        [found] = json.loads(report.read_text(encoding="utf-8"))["install"]
    return found["metadata"]["version"], found["download_info"]["url"]


def _download(version: str, target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _pip("download", "--dest", folder, f"vllm=={version}", seconds=1800)
        [wheel] = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as opened:
            _keep(opened, target)


def _pip(command: str, *arguments: str, seconds: int = 3 * _SECONDS) -> None:
    options = ("--quiet", "--no-deps", "--only-binary", ":all:", "--timeout", str(_SECONDS), "--retries", "1")
    call = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", command, *options, *arguments]
    try:
        done = subprocess.run(call, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise NoSourcesError(f"pip got no answer from its index within {seconds} s") from None
    if done.returncode:
        raise NoSourcesError(refusal(arguments[-1], done.stderr))


def refusal(requirement: str, said: str) -> str:
    """Returns why pip found no ``requirement``, from its messages ``said``."""
    listed = re.search(r"\(from versions: (.*?)\)", said)
    found = [] if listed is None or listed[1] == "none" else listed[1].split(", ")
    wanted = requirement.replace("==", " ")
    if found:
        newest_first = sorted(found, key=Version, reverse=True)
        older = f", and {len(found) - _LISTED} older ones" * (len(found) > _LISTED)
        return (
            f"pip's index has no wheel of {wanted} for this machine; it has {', '.join(newest_first[:_LISTED])}{older}"
        )
    lines = (
        [line for line in said.splitlines() if line.startswith("ERROR: ")] or said.splitlines()[-1:] or ["no reason"]
    )
    return f"pip reaches no index that has vllm (is there a network?): {lines[-1].removeprefix('ERROR: ')}"


def _opened(url: str) -> zipfile.ZipFile:
    parts = urlsplit(url)
    if parts.scheme == "file":
        return zipfile.ZipFile(url2pathname(parts.path))
    return zipfile.ZipFile(io.BufferedReader(_Remote(url), _READ_AHEAD))


def _keep(wheel: zipfile.ZipFile, target: Path) -> None:
    """Copies the Python files of a wheel, in their order in it."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as kept:
        for info in sorted(wheel.infolist(), key=lambda info: info.header_offset):
            if info.filename.startswith("vllm/") and info.filename.endswith(".py"):
                kept.writestr(info.filename, wheel.read(info))


class _Remote(io.RawIOBase):
    """A file on a server that answers requests for parts of it."""

    def __init__(self, url: str) -> None:
        self._url, self._at = url, 0
        self._size = int(self._part(0, 1)[1].rpartition("/")[2])

    def _part(self, start: int, count: int) -> tuple[bytes, str]:
        """Returns (the bytes, the header that names their place and the file's size)."""
        request = urllib.request.Request(self._url, headers={"Range": f"bytes={start}-{start + count - 1}"})
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            if answer.status != 206:
                raise OSError("the server of the index sends no parts of files")
            return answer.read(), answer.headers["Content-Range"]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer) -> int:
        count = min(len(buffer), self._size - self._at)
        if count <= 0:
            return 0
        data, _ = self._part(self._at, count)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
