"""The file of a packed expert: in the format of safetensors, with a header that fills a page, as O_DIRECT needs."""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import xxhash
from safetensors.torch import save
from torch import Tensor

from vllm_spac.core import MoEShape
from vllm_spac.storage.checkpoint.packed_folder import FORMAT, HEADER, PAGE

_NO_CHECKSUM = "0" * 32


class FileFormat:
    """What the files of one shape and fingerprint hold; threads may call it at once.

    Attributes:
        bytes: of each file.
        offsets: (start, stop) of each tensor in the data, in the order of the file.
    """

    def __init__(self, shape: MoEShape, fingerprint: str) -> None:
        self._shape, self._fingerprint = shape, fingerprint
        self.bytes = HEADER + shape.expert_bytes
        raw = save({name: torch.empty(spec.shape, dtype=spec.dtype) for name, spec in shape.tensors.items()})
        self._entries = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])  # as safetensors writes them
        self._entries.pop("__metadata__", None)
        self.offsets = {name: tuple(entry["data_offsets"]) for name, entry in self._entries.items()}
        self._headers: dict[int, tuple[bytes, bytes]] = {}  # before and after the checksum

    def encode(self, key: int, tensors: Mapping[str, Tensor]) -> tuple[bytes, memoryview]:
        """Returns header and data of the file of an expert."""
        whole = save({name: tensors[name].contiguous() for name in self._shape.tensors})
        data = memoryview(whole)[8 + int.from_bytes(whole[:8], "little") :]
        return self._header(key, xxhash.xxh3_128_hexdigest(data)), data

    def matches(self, key: int, header: np.ndarray, tensors: Sequence[np.ndarray]) -> bool:
        """Whether header and tensors, as bytes, are those that were packed for ``key``."""
        checksum = xxhash.xxh3_128()
        for tensor in tensors:
            checksum.update(tensor.data)
        return header.tobytes() == self._header(key, checksum.hexdigest())

    def _header(self, key: int, checksum: str) -> bytes:
        if key not in self._headers:  # written once: reads of many threads compare it
            layer, expert = self._shape.split(key)
            metadata = {
                "format": FORMAT,
                "fingerprint": self._fingerprint,
                "layer": self._shape.layers[layer],
                "expert": str(expert),
                "xxh3_128": _NO_CHECKSUM,
            }
            text = json.dumps({"__metadata__": metadata, **self._entries}).encode()
            assert len(text) <= HEADER - 8, "the header outgrew its page"
            before, _, after = text.rpartition(_NO_CHECKSUM.encode())
            self._headers[key] = (HEADER - 8).to_bytes(8, "little") + before, after
        before, after = self._headers[key]
        return (before + checksum.encode() + after).ljust(HEADER)


class FileBuffer:
    """Page-aligned memory for a file: header, tensors, and a page more, so that a file that is too long is noticed."""

    def __init__(self, form: FileFormat) -> None:
        self.whole = np.frombuffer(mmap.mmap(-1, -(-form.bytes // PAGE) * PAGE + PAGE), np.uint8)
        self.header, self.rest = self.whole[:HEADER], self.whole[form.bytes :]
        self.tensors = {n: self.whole[HEADER + start : HEADER + stop] for n, (start, stop) in form.offsets.items()}
