"""Reads exllamav3's frozen automata as its loader does, and drafts from them as its cursor does."""

import json
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

NAMES = (
    "link", "max_len", "min_end", "edge_offsets", "edge_token", "edge_to", "root", "corpus",
    "document_ends",
)  # fmt: skip


class Frozen:
    """A file that was read: `header`, and the arrays by their names."""

    def __init__(self, path: Path) -> None:
        content = path.read_bytes()
        magic, version, header_bytes, payload_bytes = struct.unpack_from("<8sIIQ", content)
        assert (magic, version) == (b"EXL3SAM\0", 1)
        begin = struct.calcsize("<8sIIQ")
        self.header: dict[str, Any] = json.loads(content[begin : begin + header_bytes])
        payload = zstd.decompress(content[begin + header_bytes :])
        assert len(payload) == payload_bytes == self.header["payload_bytes"]
        assert [section["name"] for section in self.header["sections"]] == list(NAMES)
        self.arrays = {
            section["name"]: unpacked(payload, section["offset"], section["count"])
            for section in self.header["sections"]
        }

    def next(self, state: int, token: int) -> int:
        offsets, labels = self.arrays["edge_offsets"], self.arrays["edge_token"]
        begin, end = offsets[state : state + 2].tolist()
        found = begin + int(np.searchsorted(labels[begin:end], token))
        if found < end and labels[found] == token:
            return int(self.arrays["edge_to"][found])
        return -1

    def draft(self, history: Sequence[int], length: int) -> tuple[int, list[int]]:
        """The length of the match, and what the corpus goes on with behind its first occurrence."""
        state = matched = 0
        for token in history:
            target = self.next(state, token)
            while target == -1 and state:
                state = int(self.arrays["link"][state])
                matched = min(matched, int(self.arrays["max_len"][state]))
                target = self.next(state, token)
            state, matched = (target, matched + 1) if target != -1 else (0, 0)
        end = int(self.arrays["min_end"][state]) + 1 if matched else 0
        follows = self.arrays["corpus"][end : end + length].tolist() if matched else []
        return matched, follows[: follows.index(-1)] if -1 in follows else follows


def unpacked(payload: bytes, offset: int, count: int) -> NDArray[np.int32]:
    planes = np.frombuffer(payload, np.uint8, 4 * count, offset).reshape(4, count)
    return np.ascontiguousarray(planes.T).view("<i4").reshape(-1)
