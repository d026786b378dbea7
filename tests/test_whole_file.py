"""Files are written whole or not at all."""

from __future__ import annotations

import os
import resource
import stat
from pathlib import Path

import pytest

from gpu_lod import whole_file


def test_new_and_old_files(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file"
    before = os.umask(0o027)
    try:
        whole_file.write(path, b"one")
    finally:
        os.umask(before)
    assert path.read_bytes() == b"one" and stat.S_IMODE(path.stat().st_mode) == 0o640
    path.chmod(0o604)
    whole_file.write(path, b"two")
    assert path.read_bytes() == b"two" and stat.S_IMODE(path.stat().st_mode) == 0o604
    assert [*path.parent.iterdir()] == [path]


def test_a_link_goes_on_naming_its_file(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there" / "file")
    for data in (b"one", b"two"):  # made, and replaced
        whole_file.write(tmp_path / "link", data)
        assert (tmp_path / "link").is_symlink() and (tmp_path / "there" / "file").read_bytes() == data


def test_what_was_there_stays_where_it_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # as a full disk: Python ignores the signal
    try:
        with pytest.raises(OSError, match="File too large"):
            whole_file.write(path, bytes(5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == b"old" and [*tmp_path.iterdir()] == [path]
    with pytest.raises(IsADirectoryError):
        whole_file.write(tmp_path, b"new")
    with pytest.raises(ValueError, match="null"):
        whole_file.write(tmp_path / "a\0b", b"new")


def test_a_file_in_the_place_of_a_folder_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    for path in (tmp_path / "file" / "new", tmp_path / "file" / "folder" / "new"):
        with pytest.raises(NotADirectoryError, match="Not a directory"):
            whole_file.write(path, b"new")
    assert (tmp_path / "file").read_bytes() == b"old"


def test_what_is_no_file_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        whole_file.write(pipe, b"through")
        assert os.read(reader, 100) == b"through" and stat.S_ISFIFO(pipe.stat().st_mode)
    finally:
        os.close(reader)


def test_a_link_to_a_pipe_is_written_to() -> None:
    """As /dev/stdout is one: of a pipe without a name."""
    reader, writer = os.pipe()
    try:
        whole_file.write(Path(f"/dev/fd/{writer}"), b"through")
        assert os.read(reader, 100) == b"through"
    finally:
        os.close(reader)
        os.close(writer)


def test_the_long_name_of_a_file_is_enough(tmp_path: Path) -> None:
    whole_file.write(tmp_path / ("x" * 255), b"data")
    assert [path.name for path in tmp_path.iterdir()] == ["x" * 255]
