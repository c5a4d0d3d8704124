"""Disk: a file takes the place of another one as a whole, or not at all.

What is written goes to a temporary file in the same folder, which is renamed once it is complete
and on the disk, so whoever reads sees the old file or the new one. A process that is killed while
it writes leaves its temporary file; the next one that writes to the same target removes it. Whose
it is a lock tells: the writer holds one on its temporary file, and it ends with the process.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

from zipfx.errors import ZipError

try:
    from fcntl import LOCK_EX, LOCK_NB, flock
except ImportError:  # Windows, where what is left over stays, as nobody can tell whose it is
    flock = None  # type: ignore[assignment]


def text_path(path: Any) -> str:
    """A path as a string.

    Raises:
        ZipError: it is none.

    >>> text_path(b"merged.safetensors")
    'merged.safetensors'
    """
    try:
        found = os.fsdecode(path)
    except TypeError as error:
        raise ZipError(f"the path is a {type(path).__name__}: give a string or a Path") from error
    if not found or "\0" in found:
        raise ZipError(f"{found!r} is no path: give that of a file")
    return found


def target_of(path: str) -> str:
    """The file that is written when `path` is: the end of symbolic links, existing or not.

    Raises:
        ZipError: something is there that is no regular file.
        OSError: its folder does not exist, or it is write-protected.
    """
    if path.endswith((os.sep, os.altsep or os.sep)):
        raise ZipError(f"{path!r} is the path of a folder: give that of a file")
    with suppress(FileNotFoundError):
        mode = os.stat(path).st_mode  # of what links lead to
        if not stat.S_ISREG(mode):
            kind = "folder" if stat.S_ISDIR(mode) else "device, pipe or socket"
            raise ZipError(f"{path!r} is a {kind}: give the path of a file")
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, "this file is write-protected", path)
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    if not os.path.isdir(folder):
        raise FileNotFoundError(errno.ENOENT, "there is no such folder: make it first", folder)
    return target


@contextmanager
def replacing(path: str) -> Iterator[BinaryIO]:
    """A file to write to, which takes the place of `path` when the block ends.

    If the block raises, `path` is as it was. The file has the mode of the one that it replaces (and
    its owner, where that is allowed), or that of any new file here. Symbolic links stay.

    Raises:
        ZipError: something is at `path` that is no regular file.
        OSError: the folder does not exist, or nothing may be written there; the disk is full.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replacing(folder + "/a") as file:
    ...         _ = file.write(b"all of it")
    ...     os.listdir(folder)
    ['a']
    """
    target = target_of(path)
    _remove_left_overs(target)
    before = os.stat(target) if os.path.exists(target) else None
    temporary, descriptor = _locked_file(target, 0o666 if before is None else 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            if before is not None:
                _make_alike(descriptor, temporary, before)
            os.fsync(descriptor)
            if flock is not None:  # as long as it is locked
                os.replace(temporary, target)
        if flock is None:  # what is open can not be renamed there
            os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_folder(os.path.dirname(target))


def _prefix(target: str) -> str:
    """Of the names of temporary files for a target, whose own name may be as long as names get."""
    name = os.path.basename(target)
    return f".zipfx-{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}-"


def _locked_file(target: str, mode: int) -> tuple[str, int]:
    """A new temporary file for a target, open and locked."""
    folder = os.path.dirname(target)
    flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | getattr(os, "O_BINARY", 0)
    while True:
        path = os.path.join(folder, f"{_prefix(target)}{secrets.token_hex(8)}.tmp")
        try:
            descriptor = os.open(path, flags, mode)
        except OSError as error:
            says = f"no file can be made here: {error.strerror}"
            raise OSError(error.errno, says, folder) from error
        _lock(descriptor, wait=True)  # in vain where the disk knows no locks: nobody removes it
        if _is_at(descriptor, path):
            return path, descriptor
        os.close(descriptor)  # before it was locked, another process took it for left over


def _remove_left_overs(target: str) -> None:
    """Remove the temporary files for a target that no process writes to any more."""
    folder, prefix = os.path.dirname(target), _prefix(target)
    for name in os.listdir(folder) if flock is not None and os.access(folder, os.R_OK) else ():
        if name.startswith(prefix) and name.endswith(".tmp"):
            path = os.path.join(folder, name)
            with suppress(OSError):
                descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    if _lock(descriptor, wait=False) and _is_at(descriptor, path):
                        os.unlink(path)
                finally:
                    os.close(descriptor)


def _lock(descriptor: int, *, wait: bool) -> bool:
    """Lock an open file; whether that worked."""
    if flock is None:
        return False
    try:
        flock(descriptor, LOCK_EX if wait else LOCK_EX | LOCK_NB)
    except OSError:
        return False
    return True


def _is_at(descriptor: int, path: str) -> bool:
    """Whether a path is still that of an open file."""
    try:
        mine, there = os.fstat(descriptor), os.lstat(path)
    except FileNotFoundError:
        return False
    return stat.S_ISREG(there.st_mode) and os.path.samestat(mine, there)


def _make_alike(descriptor: int, path: str, before: os.stat_result) -> None:
    """Give an open file the owner and the mode of another one."""
    if hasattr(os, "fchown"):
        with suppress(OSError):  # only root may give files away
            os.fchown(descriptor, before.st_uid, before.st_gid)
    os.chmod(descriptor if os.chmod in os.supports_fd else path, before.st_mode & 0o777)


def _sync_folder(folder: str) -> None:
    """Bring the new name to the disk, too, where that can be asked for."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
