"""Container: named tensors and one text as a safetensors file, with a checksum of all that is said.

Written here, piece by piece into an open file: safetensors writes to names only, with a temporary
file of its own beside them. Read by safetensors, which checks that the parts fit.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import torch
from torch import Tensor

from zipfx.errors import ZipError, first_line

#: metadata key of the text; one entry, as the order of several is up to who writes them
KEY = "zipfx"
#: bytes of a text that is parsed: 400 for each node of a graph is usual
LONGEST = 2**25
_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
}
#: dtypes of torch that have a name in safetensors, the widest last
DTYPES: dict[torch.dtype, str] = {getattr(torch, name): key for name, key in _NAMES.items()}

_SUM = re.compile(r'\{"sha256": "([0-9a-f]{64})", ')
_BLANK = "0" * 64
_PIECE = 2**24  # bytes that are copied at a time
_TRIES = 100  # to read a file that others write


def write(file: BinaryIO, text: str, tensors: Mapping[str, Tensor]) -> None:
    """Write a file, with a checksum of all of it as the first entry of the text.

    Args:
        file: empty, and open for writing anywhere in it.
        text: a dict in JSON, with at least one entry; goes into the metadata.
        tensors: real, contiguous and on the CPU; their dtypes are among `DTYPES`. If another thread
            writes to them meanwhile, the checksum is of what came into the file.

    >>> import io
    >>> file = io.BytesIO()
    >>> write(file, '{"a": 1}', {"x": torch.ones(1)})
    >>> file.getvalue()[8:32]
    b'{"__metadata__":{"zipfx"'
    """
    text = f'{{"sha256": "{_BLANK}", {text[1:]}'
    entries: dict[str, Any] = {"__metadata__": {KEY: text}}
    # the widest first, so that each lies at a multiple of its width; in the order of safetensors
    order = {dtype: -i for i, dtype in enumerate(DTYPES)}
    names = sorted(tensors, key=lambda name: (order[tensors[name].dtype], name))
    at = 0
    for name in names:
        t = tensors[name]
        entries[name] = {
            "dtype": DTYPES[t.dtype],
            "shape": list(t.shape),
            "data_offsets": [at, at := at + t.nbytes],
        }
    head = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    file.write(len(head).to_bytes(8, "little"))
    file.write(head)
    sums = {}
    for name in names:
        found = hashlib.sha256()
        for data in _bytes_of(tensors[name]):
            found.update(data)
            file.write(data)
        sums[name] = found.hexdigest()
    file.seek(8 + head.index(_BLANK.encode()))
    file.write(_checksum(text, tensors, sums).encode())


def contents(path: str) -> tuple[str, dict[str, Tensor]]:
    """The text and the tensors of a file. The tensors may be views of it: copy them.

    Raises:
        ZipError: it is no regular file, no safetensors file, or none with such a text.
        OSError: it can not be opened.
    """
    for _ in range(_TRIES):
        before = _mark(path)
        try:
            found = _contents(path)
        except ZipError:
            if _mark(path) == before:
                raise
            continue
        if _mark(path) == before:
            return found
    raise ZipError("it was replaced all the time while it was read: load it again")


def _mark(path: str) -> tuple[int, ...]:
    """What tells a file from another one that took its place: safetensors opens it twice."""
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):  # to open a pipe would wait for who writes to it
        raise ZipError("it is no regular file")
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _contents(path: str) -> tuple[str, dict[str, Tensor]]:
    safetensors = library()
    try:
        with safetensors.safe_open(path, "pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            if KEY not in metadata:
                raise ZipError("it is a safetensors file, but was not written by zipfx.save")
            names: list[str] = file.keys()
            return metadata[KEY], {name: file.get_tensor(name) for name in names}
    except safetensors.SafetensorError as error:
        raise ZipError(
            f"it is no safetensors file, or only a part of one ({first_line(error)}); save it again"
        ) from error
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ZipError(
            f"torch can not hold what is in it ({first_line(error)}); save it again"
        ) from error


def unsigned(text: str, tensors: Mapping[str, Tensor]) -> str:
    """The text that was given to `write`.

    Raises:
        ZipError: the text or the tensors are not those that were written.
    """
    found = _SUM.match(text)
    if found is not None:
        blank = text.replace(found[1], _BLANK, 1)
        sums = {name: _sum(t) for name, t in tensors.items()}
        if _checksum(blank, tensors, sums) == found[1]:
            return "{" + text[found.end() :]
    raise ZipError("it is damaged, or was edited: its checksum is not right; save it again")


def _checksum(text: str, tensors: Mapping[str, Tensor], sums: Mapping[str, str]) -> str:
    """Of a text and of named tensors; sums: of their entries."""
    found = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        t = tensors[name]
        found.update(json.dumps([name, str(t.dtype), list(t.shape), sums[name]]).encode())
    return found.hexdigest()


def _sum(t: Tensor) -> str:
    found = hashlib.sha256()
    for data in _bytes_of(t):
        found.update(data)
    return found.hexdigest()


def _bytes_of(t: Tensor) -> Iterator[bytes]:
    """The entries of a contiguous tensor, lowest byte first, piece by piece."""
    flat: Any = t.detach().flatten().view(torch.uint8).numpy()
    if sys.byteorder == "big":
        flat = flat.view(f"u{t.itemsize}").byteswap().view("u1")
    for start in range(0, len(flat), _PIECE):
        yield flat[start : start + _PIECE].tobytes()


def library() -> Any:
    """The module safetensors.

    Raises:
        ZipError: it is not installed.
    """
    try:
        importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise ZipError(
            "zipfx.save and zipfx.load need safetensors: pip install 'zipfx[save]'"
        ) from error
    return importlib.import_module("safetensors")
