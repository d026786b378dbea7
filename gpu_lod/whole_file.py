"""Files written in one step: whoever reads one finds the old one or the new one, whole."""

from __future__ import annotations

import errno
import os
import secrets
from contextlib import suppress
from pathlib import Path


def make_folder(path: Path) -> None:
    """Where there is none yet, with those above it.

    Raises:
        OSError: it cannot be made. A file in its place is no directory, where the system says that it exists.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None


def write(path: Path, data: bytes) -> None:
    """Makes the parent folder. A link goes on naming its file. What is no file, as /dev/stdout, or lies in a folder
    that takes no other one, is written to as it is.

    Raises:
        OSError: it cannot be written, and then a file that was there is as it was.
        ValueError: a null byte in the name.
    """
    make_folder(path.parent)
    target = Path(os.path.realpath(path))
    there = path.exists()  # a pipe's link names nothing that the target could be found by
    if there and (not path.is_file() or not os.access(target.parent, os.W_OK)):
        path.write_bytes(data)
        return
    if there and not os.access(target, os.W_OK):
        raise PermissionError(13, "Permission denied", str(path))
    unfinished = target.with_name(f".gpu_lod.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with open(unfinished, "xb") as file:
            file.write(data)
        if there:
            unfinished.chmod(target.stat().st_mode)
        os.replace(unfinished, target)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise
