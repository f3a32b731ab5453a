"""Text in as few bytes as it travels in: `.ppmd` (PPMd, smaller than xz by a sixth on this text), `.xz`, or plain.

A `.ppmd` file is eight bytes, the length of the text in bytes, little endian, and then one PPMd variant H stream.
"""

from __future__ import annotations

import lzma
from pathlib import Path

ORDER = 16
MEMORY_BYTES = 1 << 30  # of the model, in packing and unpacking alike


def pack_text(text: str) -> bytes:
    """The `.ppmd` form of a text."""
    import pyppmd  # only the corpus and the trainer need it

    raw = text.encode()
    encoder = pyppmd.Ppmd7Encoder(ORDER, MEMORY_BYTES)
    return len(raw).to_bytes(8, "little") + encoder.encode(raw) + encoder.flush()


def unpack_text(data: bytes) -> str:
    """The text of `pack_text`."""
    import pyppmd

    length = int.from_bytes(data[:8], "little")
    raw = pyppmd.Ppmd7Decoder(ORDER, MEMORY_BYTES).decode(data[8:], length)
    if len(raw) != length:
        raise ValueError(f"The packed text must hold {length} bytes. Got {len(raw)}.")
    return raw.decode()


def read_text(path: Path) -> str:
    """A packed, compressed or plain text file, by its suffix."""
    data = path.read_bytes()
    if path.suffix == ".ppmd":
        return unpack_text(data)
    return (lzma.decompress(data) if path.suffix == ".xz" else data).decode()
