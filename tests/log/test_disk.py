from __future__ import annotations

import os
from pathlib import Path

import pytest

from quiver.log.disk import SystemDisk, write_atomically


def test_many_buffers_are_written_one_after_the_other(tmp_path: Path) -> None:
    disk = SystemDisk()
    file = disk.open(f"{tmp_path}/f", create=True)
    buffers = [bytes([number % 256]) * (number % 5) for number in range(3000)]  # more than one call takes
    assert file.pwrite(buffers, 7) == sum(map(len, buffers))
    assert file.pread(100_000, 0) == bytes(7) + b"".join(buffers)
    assert file.pwrite([], 3) == 0
    assert file.size() == 7 + sum(map(len, buffers))


def test_short_writes_and_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SystemDisk()
    file = disk.open(f"{tmp_path}/f", create=True)
    pwrite, pread = os.pwrite, os.pread
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, at: pwrite(fd, b"".join(parts)[:5], at))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:3], at))
    monkeypatch.setattr(os, "pread", lambda fd, length, at: pread(fd, min(length, 4), at))
    assert file.pwrite([b"hello ", b"wide ", b"world"], 0) == 16
    assert file.pread(16, 0) == b"hello wide world"
    assert file.pread(100, 6) == b"wide world"


def test_truncated_file_is_shorter(tmp_path: Path) -> None:
    file = SystemDisk().open(f"{tmp_path}/f", create=True)
    file.pwrite([b"abcdef"], 0)
    file.truncate(2)
    file.datasync()
    assert (file.size(), file.pread(10, 0), file.pread(10, 5)) == (2, b"ab", b"")


def test_missing_file_is_only_made_when_asked(tmp_path: Path) -> None:
    disk = SystemDisk()
    with pytest.raises(FileNotFoundError):
        disk.open(f"{tmp_path}/f")
    disk.open(f"{tmp_path}/f", create=True)
    assert disk.exists(f"{tmp_path}/f")
    assert disk.list(str(tmp_path)) == ["f"]
    disk.rename(f"{tmp_path}/f", f"{tmp_path}/g")
    disk.remove(f"{tmp_path}/g")
    assert disk.list(str(tmp_path)) == []


def test_atomic_write_replaces_the_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    disk = SystemDisk()
    (tmp_path / "f").write_bytes(b"old and longer")
    (tmp_path / "f.tmp").write_bytes(b"left behind by a crash, and longer than the new one")
    write_atomically(disk, f"{tmp_path}/f", b"new")
    assert (tmp_path / "f").read_bytes() == b"new"
    assert disk.list(str(tmp_path)) == ["f"]


def test_new_directory_is_on_disk_with_all_its_new_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A log whose own directory vanishes in a power cut has lost everything it acknowledged.
    synced = set()
    fsync = os.fsync

    def recording_fsync(fd: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    disk = SystemDisk()
    disk.make_directory(f"{tmp_path}/a/b/c")
    assert {str(tmp_path), f"{tmp_path}/a", f"{tmp_path}/a/b"} <= synced
    synced.clear()
    disk.make_directory(f"{tmp_path}/a/b/c")
    # The process that made it may have been killed before its sync.
    assert f"{tmp_path}/a/b" in synced
    disk.remove_tree(f"{tmp_path}/a")
    assert disk.list(str(tmp_path)) == []
