"""Checksums of a checkpoint's weight files: each file is read once and trusted until it is written again.

The results are kept in a small record next to the packed experts: the checksum of each file with its inode, size,
mtime and ctime. A file is read again when one of them differs. The kernel sets the ctime at every change and
programs cannot set it, so a copy that keeps names, sizes and mtimes (rsync, an image) is noticed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError
from tqdm import tqdm

from vllm_spac.errors import StoreError
from vllm_spac.system import files
from vllm_spac.system.files import prepare_folder, write_text
from vllm_spac.system.host_memory import gib
from vllm_spac.system.machine import reset_affinity

logger = logging.getLogger("vllm.spac")

_BLOCK = 8 << 20
_THREADS = 4
_BAR = 1 << 30  # bytes from which on reading shows a progress bar
# A generous bound on the time within which two changes of a file may get the same ctime. A file written less than this
# before it was read is not trusted at the next start.
_SETTLED_NS = 2_000_000_000
# Load formats that prefer *.safetensors.
_SAFETENSORS = {"auto", "hf", "safetensors", "fastsafetensors", "runai_streamer"}


class Stamp(BaseModel):
    """The file attributes that change when a file is replaced or written."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path) -> Stamp:
        facts = path.stat()
        return cls(inode=facts.st_ino, size=facts.st_size, mtime_ns=facts.st_mtime_ns, ctime_ns=facts.st_ctime_ns)


class _Read(BaseModel):
    model_config = ConfigDict(extra="forbid")
    stamp: Stamp
    xxh3_128: str


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid")
    format: Literal["spac-checkpoint-1"] = "spac-checkpoint-1"
    files: dict[str, _Read]  # by real path


class CheckpointContents:
    """The content of a checkpoint's weight files.

    Attributes:
        facts: JSON value that differs between different checkpoints.
    """

    def __init__(self, facts: Sequence, stamps: Mapping[Path, Stamp] | None = None) -> None:
        self.facts = list(facts)
        self._stamps = dict(stamps or {})

    def check_unchanged(self) -> None:
        """Raises ``StoreError`` if a file was written or replaced since it was read."""
        for path, stamp in self._stamps.items():
            try:
                same = Stamp.of(path) == stamp
            except OSError:
                same = False
            if not same:
                raise StoreError(
                    f"spac: {path} was changed while the model was loaded; start again when it is complete"
                )


def weight_files(folder: Path, load_format: str) -> list[Path]:
    """Returns the files of ``folder`` that vLLM may load weights from, by name; with indices, which select shards."""
    weights = sorted(folder.glob("*.safetensors"))
    if load_format not in _SAFETENSORS or not weights:
        weights += sorted(path for kind in ("bin", "pt") for path in folder.glob(f"*.{kind}"))
    if load_format == "npcache":  # what vLLM converted the others to, and loads instead
        weights += sorted(path for path in folder.glob("np/*") if path.is_file())
    return weights + sorted(folder.glob("*.index.json")) if weights else []


def no_weights(model: str, load_format: str) -> str:
    """Says that ``weight_files`` finds none in the folder ``model``, and what to do."""
    return (
        f"spac: {model} has no weight files that --load-format {load_format} takes; download the checkpoint "
        "completely, or name a folder with *.safetensors"
    )


def read(files: Sequence[Path], folders: Iterable[Path]) -> CheckpointContents:
    """Reads the ``files`` of a checkpoint, or trusts the checksums of an earlier start.

    Args:
        files: weight files, possibly symbolic links; all in one folder.
        folders: searched for the record; it is written to the first writable one.

    Raises:
        StoreError: a file cannot be read, or changes meanwhile.
    """
    begun = time.time_ns()
    name = f"checkpoint-{xxhash.xxh3_64_hexdigest(os.fsencode(files[0].parent.resolve()))}.json"
    records = [folder / name for folder in folders]
    known = _known(records)
    try:
        keys = {path: str(path.resolve(strict=True)) for path in files}
        stamps = {path: Stamp.of(path) for path in files}
        trusted = [path for path in files if keys[path] in known and known[keys[path]].stamp == stamps[path]]
        unknown = [path for path in files if path not in trusted]
        sums = {path: known[keys[path]].xxh3_128 for path in trusted} | _read_all(unknown, stamps)
        changed = [path for path in unknown if Stamp.of(path) != stamps[path]]
    except OSError as error:
        raise StoreError(f"spac: cannot read {error.filename}: {error.strerror}") from error
    if changed:
        raise StoreError(f"spac: {changed[0]} changed while it was read; start again when it is complete")
    if trusted:
        where = " or ".join(str(path) for path in records if path.exists())
        logger.info(
            "spac: %s were not read: inodes, sizes, mtimes and ctimes are those of an earlier start, which read them; "
            "to have them read again, delete %s",
            _described(trusted, files, stamps),
            where,
        )
    if unknown:
        settled = [path for path in files if stamps[path].ctime_ns + _SETTLED_NS < begun]
        record = _Record(files={keys[path]: _Read(stamp=stamps[path], xxh3_128=sums[path]) for path in settled})
        written = _write(records, record)
        kept = f"kept in {written}" if written else f"each start reads them, because {records[0]} cannot be written"
        logger.info("spac: %s were read to name their packed experts; %s", _described(unknown, files, stamps), kept)
    return CheckpointContents([[path.name, stamps[path].size, sums[path]] for path in files], stamps)


def _described(some: Sequence[Path], files: Sequence[Path], stamps: Mapping[Path, Stamp]) -> str:
    return f"{len(some)} of {len(files)} weight files ({gib(sum(stamps[path].size for path in some))})"


def _known(records: Sequence[Path]) -> dict[str, _Read]:
    known: dict[str, _Read] = {}
    for record in reversed(records):
        try:
            if problem := files.refusal(record):
                logger.warning("spac: %s; until then the files of the checkpoint are read again", problem)
                continue
            known |= _Record.model_validate_json(record.read_bytes()).files
        except FileNotFoundError:
            continue
        except (OSError, ValidationError):
            logger.warning("spac: %s is not a record of a checkpoint; its files are read again", record)
    return known


def _write(records: Sequence[Path], content: _Record) -> Path | None:
    """Replaces the first record that can be written; returns its path, or None."""
    for record in records:
        with contextlib.suppress(OSError):
            prepare_folder(record.parent)
            write_text(record, content.model_dump_json(indent=1))
            return record
    return None


def _read_all(files: Sequence[Path], stamps: Mapping[Path, Stamp]) -> dict[Path, str]:
    total = sum(stamps[path].size for path in files)
    bar = {"unit": "B", "unit_scale": True, "unit_divisor": 1024, "file": sys.stderr, "disable": total < _BAR}
    with (
        tqdm(total=total, desc="Reading the checkpoint", **bar) as shown,
        ThreadPoolExecutor(_THREADS, initializer=reset_affinity) as threads,
    ):

        def step(count: int) -> None:
            with shown.get_lock():
                shown.update(count)

        return dict(zip(files, threads.map(lambda path: _digest(path, step), files), strict=True))


def _digest(path: Path, step: Callable[[int], None]) -> str:
    digest, block = xxhash.xxh3_128(), memoryview(bytearray(_BLOCK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
            step(count)
    return digest.hexdigest()
