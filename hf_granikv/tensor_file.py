"""Safetensors files that are mapped, and of which every byte is checked.

```
8 bytes     length of the header
header      JSON: dtype, shape and offsets of each tensor; in its metadata the SHA-256 of each
            tensor, and the SHA-256 of the header itself, taken with zeros in its place
tensors     the first one at a multiple of 64 bytes, as torch's own lie in memory
```
"""

import hashlib
import json
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hf_granikv.errors import PrefixFileError
from hf_granikv.tensor_hash import pieces, tensor_hashes

# fused attention takes half as long again where tensors do not lie at multiples of 16 bytes
_ALIGNMENT = 64
_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_NO_CHECKSUM = "0" * 64
# no text in the metadata can look like this: JSON escapes its quotes
_CHECKSUM = re.compile(rb'"sha256": "([0-9a-f]{64})"')
_REMEDY = "Copy it here again, or prefill and save the prefix anew."


class Header(NamedTuple):
    """What stands before the tensors of a file.

    Attributes:
        path: The file.
        raw: All bytes before the tensors.
        metadata: The texts in it.
    """

    path: Path
    raw: bytes
    metadata: Mapping[str, str]

    def check(self) -> None:
        """Checks that the header is as it was written.

        Raises:
            PrefixFileError: If a byte of it was altered.
        """
        found = _CHECKSUM.findall(self.raw)
        if len(found) != 1 or found[0] != _checksum(self.raw):
            raise PrefixFileError(f"{self.path} is damaged: its header was altered. {_REMEDY}")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Writes a file that appears, or replaces what is at `path`, when it is complete.

    Args:
        path: Where to.
        tensors: By name; moved to the CPU one at a time.
        metadata: Texts to go with them.
    """
    # by the power of two in its size, so that each tensor starts at a multiple of its own
    ordered = dict(sorted(tensors.items(), key=lambda item: -(item[1].nbytes & -item[1].nbytes)))
    hashes = tensor_hashes(list(ordered.values()))
    metadata = {
        **metadata,
        "hashes": json.dumps(dict(zip(ordered, hashes, strict=True))),
        "sha256": _NO_CHECKSUM,
    }
    scratch = path.with_name(f".{path.name[:200]}.{secrets.token_hex(6)}")
    try:
        with scratch.open("xb") as file:
            file.write(_header(ordered, metadata))
            for tensor in ordered.values():
                file.writelines(piece.numpy().data for piece in pieces(tensor))
            # a crash after the rename must not leave a name without its bytes
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def read_header(path: Path) -> Header:
    """Reads a header without checking that it is as it was written.

    Raises:
        PrefixFileError: If there is no file, or one that does not begin as safetensors do.
    """
    if not path.is_file():
        found = "is no regular file" if path.exists() else "is not there"
        raise PrefixFileError(f"{path} {found}. Give a file that prefix.save wrote.")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(9)
        length = int.from_bytes(start[:8], "little")
        if start[8:] != b"{":
            raise PrefixFileError(
                f"{path} is no safetensors file, or its first bytes are gone. Give a file that "
                "prefix.save wrote."
            )
        if 8 + length > size:
            raise PrefixFileError(f"{path} is truncated within its header. {_REMEDY}")
        raw = start + file.read(length - 1)
    try:
        metadata = json.loads(raw[8:]).get("__metadata__")
    except (ValueError, RecursionError) as error:
        raise PrefixFileError(f"{path} is damaged: its header is no JSON. {_REMEDY}") from error
    return Header(path, raw, metadata if isinstance(metadata, dict) else {})


def map_tensors(header: Header) -> dict[str, Tensor]:
    """Maps the tensors of a file, and compares every byte of them with what was written.

    Each is contiguous on the CPU, in a storage of exactly its bytes. The comparison reads the pages
    from the disk; they stay shared with the page cache until something writes to them, which never
    reaches the file. A mapped file may be replaced or removed, but not be written into.

    Args:
        header: A header that was checked.

    Raises:
        PrefixFileError: If the file is truncated, or a byte of a tensor was altered.
    """
    path, hashes = header.path, json.loads(header.metadata["hashes"])
    try:
        # never inference tensors: nothing could show a later write to them
        with torch.inference_mode(False), safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in hashes}
    except (SafetensorError, OSError) as error:
        raise PrefixFileError(f"{path} is truncated or damaged: {error}. {_REMEDY}") from error
    for name, found in zip(hashes, tensor_hashes(list(tensors.values())), strict=True):
        if found != hashes[name]:
            raise PrefixFileError(f"{path} is damaged: {name} was altered. {_REMEDY}")
    return tensors


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": metadata}
    stop = 0
    for name, tensor in tensors.items():
        start, stop = stop, stop + tensor.nbytes
        dtype = _DTYPE_NAMES[tensor.dtype]
        entries[name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": [start, stop]}
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    raw = len(text).to_bytes(8, "little") + text
    return _CHECKSUM.sub(b'"sha256": "%s"' % _checksum(raw), raw)


def _checksum(raw: bytes) -> bytes:
    blank = _CHECKSUM.sub(b'"sha256": "%s"' % _NO_CHECKSUM.encode(), raw)
    return hashlib.sha256(blank).hexdigest().encode()
