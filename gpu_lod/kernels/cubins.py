"""Compiled kernels on disk, so that only the first process compiles.

A file is a digest of what follows, then the machine code: one that is damaged, cut short or cannot be read counts as
absent. It appears under its name whole or not at all, so processes may write at the same time.
"""

from __future__ import annotations

import functools
import hashlib
import warnings
from pathlib import Path

from gpu_lod import cache, whole_file

_DIGEST_BYTES = hashlib.sha256().digest_size


def folder() -> Path | None:
    return cache.folder("cubins")


def load(name: str) -> bytes | None:
    """What was kept under a name."""
    where = folder()
    if where is None:
        return None
    try:
        content = (where / f"{name}.cubin").read_bytes()
    except OSError:
        return None
    code = content[_DIGEST_BYTES:]
    return code if hashlib.sha256(code).digest() == content[:_DIGEST_BYTES] else None


def keep(name: str, code: bytes) -> None:
    """Keep it under a name, if that can be."""
    where = folder()
    if where is None:
        return
    try:
        whole_file.write(where / f"{name}.cubin", hashlib.sha256(code).digest() + code)
    except OSError as error:
        _warn_once(where, str(error))


@functools.cache
def _warn_once(where: Path, reason: str) -> None:
    warnings.warn(
        f"compiled CUDA kernels cannot be kept in {where} ({reason}), so every process compiles them again. Make it "
        "writable, or name another place with GPU_LOD_CACHE.",
        stacklevel=2,
    )
