"""Bytes by their frequencies, as Zstandard's Huffman codes: what the forms near the entropy share.

Repetitions are not searched for: looking takes as long as all of the rest, and finds little.
"""

import sys
from collections.abc import Sequence

import torch

from fcdp.checksum import bytes_of
from fcdp.delta.compiled import extra

#: Part of Python from 3.14 on.
ZSTD = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"


def write(parts: Sequence[torch.Tensor], window: int) -> torch.Tensor:
    """Encode the ``parts`` (contiguous, on the host), each with its own codes, as uint8.

    Codes are chosen anew each 2^window bytes, 10 ≤ window ≤ 17; each choice takes some 60 bytes.
    """
    zstd = extra(ZSTD)
    options = {
        zstd.CompressionParameter.strategy: zstd.Strategy.fast,
        zstd.CompressionParameter.min_match: 7,
        zstd.CompressionParameter.hash_log: 6,
        zstd.CompressionParameter.window_log: window,
        zstd.CompressionParameter.target_length: 2**17,  # bytes that a search leaps over
        # ZSTD_c_literalCompressionMode, which Python does not name: codes though nothing is found.
        1002: 1,
    }
    coder = zstd.ZstdCompressor(options=options)
    written = [coder.compress(bytes_of(part), coder.FLUSH_BLOCK) for part in parts]
    data = bytearray().join([*written, coder.flush()])
    return torch.frombuffer(data, dtype=torch.uint8)


def read(data: torch.Tensor, most: int) -> torch.Tensor | None:
    """Decode ``data`` (uint8) to bytes (uint8); ``None`` if damaged or not 1 to ``most``."""
    zstd = extra(ZSTD)
    coder = zstd.ZstdDecompressor()
    try:
        decoded = bytearray(coder.decompress(bytes_of(data), most + 1))
    except zstd.ZstdError:
        return None
    if not coder.eof or coder.unused_data or not 0 < len(decoded) <= most:
        return None
    return torch.frombuffer(decoded, dtype=torch.uint8)
