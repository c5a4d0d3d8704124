"""Files take their places as a whole: modes, links, kills, full disks, several writers at once."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import zipfx
from zipfx.report.format import disk
from zipfx.report.format.disk import replacing

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="modes, links and locks of Unix")


def write(path: Any, content: bytes = b"new") -> None:
    with replacing(os.fspath(path)) as file:
        file.write(content)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.fixture
def _umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


# ------------------------------------------------------------------ modes
@pytest.mark.usefixtures("_umask")
@pytest.mark.parametrize("mask", [0o022, 0o002, 0o077, 0o000, 0o027])
def test_a_new_file_follows_the_umask(mask: int, tmp_path: Path) -> None:
    os.umask(mask)
    write(tmp_path / "a")
    (tmp_path / "b").write_bytes(b"")
    assert mode(tmp_path / "a") == mode(tmp_path / "b") == 0o666 & ~mask


@pytest.mark.usefixtures("_umask")
@pytest.mark.parametrize("kept", [0o600, 0o640, 0o666, 0o755, 0o444])
def test_a_file_that_is_overwritten_keeps_its_mode(kept: int, tmp_path: Path) -> None:
    if kept == 0o444 and os.geteuid() != 0:
        pytest.skip("only root may")
    (tmp_path / "a").write_bytes(b"old")
    (tmp_path / "a").chmod(kept)
    write(tmp_path / "a")
    assert mode(tmp_path / "a") == kept
    assert (tmp_path / "a").read_bytes() == b"new"


@pytest.mark.usefixtures("_umask")
def test_a_private_file_is_private_while_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    (tmp_path / "a").chmod(0o600)
    with replacing(str(tmp_path / "a")):
        assert [mode(path) for path in tmp_path.iterdir()] == [0o600, 0o600]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives away")
def test_a_file_that_is_overwritten_keeps_its_owner(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    os.chown(tmp_path / "a", 12345, 54321)
    write(tmp_path / "a")
    found = (tmp_path / "a").stat()
    assert (found.st_uid, found.st_gid) == (12345, 54321)


# ------------------------------------------------------------------ links
def test_symbolic_links_stay_and_lead_to_what_is_written(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_bytes(b"old")
    (tmp_path / "one").symlink_to("there/file")
    (tmp_path / "two").symlink_to(tmp_path / "one")
    write(tmp_path / "two")
    assert (tmp_path / "one").is_symlink()
    assert (tmp_path / "two").is_symlink()
    assert (tmp_path / "there" / "file").read_bytes() == b"new"
    assert names(tmp_path) == ["one", "there", "two"]
    assert names(tmp_path / "there") == ["file"]


def test_a_link_to_nothing_makes_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    write(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"new"


def test_a_folder_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder", target_is_directory=True)
    write(tmp_path / "link" / "file")
    assert (tmp_path / "folder" / "file").read_bytes() == b"new"


def test_a_link_to_itself_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("link")
    with pytest.raises(OSError, match="symbolic links"):
        write(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()


# ------------------------------------------------------------------ what is no file
def test_only_regular_files_are_written(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    with socket.socket(socket.AF_UNIX) as open_socket:
        open_socket.bind(os.path.relpath(tmp_path / "socket"))
    before = names(tmp_path)
    for name, kind in (
        ("folder", "folder"),
        ("folder/", "folder"),
        ("nothing/", "folder"),
        ("pipe", "device, pipe or socket"),
        ("link", "device, pipe or socket"),
        ("socket", "device, pipe or socket"),
        ("/dev/null", "device, pipe or socket"),
    ):
        with pytest.raises(zipfx.ZipError, match=rf"is (the path of )?a {kind}: give"):
            write(os.path.join(tmp_path, name))
    assert names(tmp_path) == before
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        (3, "the path is a int: give a string or a Path"),
        (None, "the path is a NoneType"),
        ("", "'' is no path"),
        ("a\0b", "is no path"),
    ],
)
def test_what_is_no_path(path: Any, says: str) -> None:
    with pytest.raises(zipfx.ZipError, match=says):
        disk.text_path(path)


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no such folder: make it first.*'.*/no'"):
        write(tmp_path / "no" / "file")
    (tmp_path / "link").symlink_to("nowhere/file")
    with pytest.raises(FileNotFoundError, match=r"no such folder.*'.*/nowhere'"):
        write(tmp_path / "link")


def test_a_relative_path_is_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write("file")
    assert names(tmp_path) == ["file"]


def test_names_may_be_as_long_as_names_get(tmp_path: Path) -> None:
    for name in ("x" * 255, "é" * 127):
        write(tmp_path / name)
        assert (tmp_path / name).read_bytes() == b"new"


ONLY_READ = """
import os, sys
from zipfx.report.format.disk import replacing
os.setuid(65534) if os.geteuid() == 0 else None
for path in sys.argv[1:]:
    try:
        with replacing(path) as file:
            file.write(b"new")
    except PermissionError as error:
        print(error)
"""


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A folder that others may look into, which tmp_path is not."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.mark.slow
def test_what_may_not_be_written_is_not(open_path: Path) -> None:
    closed, opened = open_path / "closed", open_path / "opened"
    for folder, kept in ((closed, 0o555), (opened, 0o777)):
        folder.mkdir()
        (folder / "file").write_bytes(b"old")
        (folder / "file").chmod(0o666 if folder is closed else 0o444)
        folder.chmod(kept)
    paths = [closed / "new", closed / "file", opened / "file"]
    said = run(ONLY_READ, *paths).stdout.splitlines()
    assert len(said) == 3
    assert all(f"no file can be made here: Permission denied: '{closed}'" in s for s in said[:2])
    assert "this file is write-protected" in said[2]
    assert (closed / "file").read_bytes() == (opened / "file").read_bytes() == b"old"
    closed.chmod(0o755)


# ------------------------------------------------------------------ what fails
def run(code: str, *arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("old", [b"old", None])
def test_what_fails_leaves_all_as_it_was(error: Any, old: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "file"
    if old is not None:
        path.write_bytes(old)
    before = path.stat() if old is not None else None

    def half() -> None:
        with replacing(str(path)) as file:
            file.write(b"half")
            raise error

    with pytest.raises(error):
        half()
    assert names(tmp_path) == ([] if old is None else ["file"])
    if old is not None:
        assert path.read_bytes() == old
        assert path.stat() == before


@pytest.mark.parametrize("step", ["fsync", "replace", "chmod"])
def test_a_step_that_fails_leaves_all_as_it_was(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"old")

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise OSError(5, "a broken disk")

    monkeypatch.setattr(disk.os, step, fails)
    with pytest.raises(OSError, match="a broken disk"):
        write(tmp_path / "file")
    assert names(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"


FULL = """
import resource, signal, sys
from zipfx.report.format.disk import replacing
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    with replacing(sys.argv[1]) as file:
        file.write(bytes(1_000_000))
except OSError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.slow
def test_a_full_disk_leaves_all_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    assert run(FULL, tmp_path / "file").stdout.startswith("OSError [Errno 27] File too large")
    assert names(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"


# ------------------------------------------------------------------ several processes
WRITER = """
import os, sys
from zipfx.report.format.disk import replacing
with replacing(sys.argv[1]) as file:
    file.write(b"of the other")
    file.flush()
    print("writes", flush=True)
    sys.stdin.readline()
"""


def writer(path: Path) -> subprocess.Popen[str]:
    """Another process that has begun to write, and waits."""
    command = [sys.executable, "-c", WRITER, str(path)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "writes\n"
    return process


def end(process: subprocess.Popen[str], how: signal.Signals | None = None) -> None:
    if how is None:
        process.communicate("go on\n", timeout=300)
    else:
        process.send_signal(how)
        process.communicate(timeout=300)


@pytest.mark.slow
def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    for _ in range(2):
        end(writer(path), signal.SIGKILL)
    assert len(names(tmp_path)) in (2, 3)  # the second may have removed what the first left
    assert path.read_bytes() == b"old"
    write(path)
    assert names(tmp_path) == ["file"]
    assert path.read_bytes() == b"new"


@pytest.mark.slow
def test_what_another_process_writes_to_right_now_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    other = writer(path)
    (theirs,) = names(tmp_path)
    write(path)
    assert names(tmp_path) == sorted([theirs, "file"])
    assert path.read_bytes() == b"new"
    end(other)
    assert names(tmp_path) == ["file"]
    assert path.read_bytes() == b"of the other"  # who ends last


@pytest.mark.slow
def test_what_is_left_of_other_targets_or_not_ours_stays(tmp_path: Path) -> None:
    end(writer(tmp_path / "other"), signal.SIGKILL)
    (left,) = names(tmp_path)
    prefix = disk._prefix(str(tmp_path / "file"))
    (tmp_path / f"{prefix}link.tmp").symlink_to("precious")
    (tmp_path / f"{prefix}folder.tmp").mkdir()
    for name in (".tmp123456", "file.tmp", ".zipfx-file.tmp", f"{prefix}backup", "precious"):
        (tmp_path / name).write_bytes(b"precious")
    os.mkfifo(tmp_path / f"{prefix}pipe.tmp")
    before = names(tmp_path)
    write(tmp_path / "file")
    assert names(tmp_path) == sorted([*before, "file"])
    assert left in names(tmp_path)


@pytest.mark.slow
def test_links_to_one_file_share_what_is_left(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "link").symlink_to("file")
    end(writer(tmp_path / "file"), signal.SIGKILL)
    assert len(names(tmp_path)) == 3
    write(tmp_path / "link")
    assert names(tmp_path) == ["file", "link"]


@pytest.mark.slow
def test_a_disk_that_knows_no_locks_keeps_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end(writer(tmp_path / "file"), signal.SIGKILL)

    def refuses(*_: Any) -> None:
        raise OSError(95, "not supported")

    monkeypatch.setattr(disk, "flock", refuses)
    write(tmp_path / "file")
    assert len(names(tmp_path)) == 2
    monkeypatch.setattr(disk, "flock", None)  # as on Windows
    write(tmp_path / "file", b"newer")
    assert len(names(tmp_path)) == 2
    assert (tmp_path / "file").read_bytes() == b"newer"


def test_one_that_is_taken_for_left_over_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, removed = disk.flock, []

    def late(descriptor: int, how: int) -> None:
        if not removed:
            removed.extend(tmp_path.iterdir())
            removed[0].unlink()  # as another process would, just now
        real(descriptor, how)

    monkeypatch.setattr(disk, "flock", late)
    write(tmp_path / "file")
    assert len(removed) == 1
    assert names(tmp_path) == ["file"]


MANY = """
import sys
from zipfx.report.format.disk import replacing
path, letter, turns = sys.argv[1], sys.argv[2].encode(), int(sys.argv[3])
for _ in range(turns):
    with replacing(path) as file:
        for _ in range(100):
            file.write(letter * 1000)
"""


@pytest.mark.slow
def test_of_many_writers_one_wins_and_the_file_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    writers = [
        subprocess.Popen([sys.executable, "-c", MANY, str(path), letter, "40"]) for letter in "abc"
    ]
    while any(process.poll() is None for process in writers):
        if path.exists():
            content = path.read_bytes()
            assert content == content[:1] * 100_000
        time.sleep(0.001)
    assert [process.wait() for process in writers] == [0, 0, 0]
    assert names(tmp_path) == ["file"]
