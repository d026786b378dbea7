"""How forked children end."""

from __future__ import annotations

import pytest
from scripts import succeed

from gpu_lod.bridge import exits


@pytest.mark.parametrize(
    ("version", "waits"),
    [
        *(("glibc 2.36", False), ("glibc 2.42", False), ("glibc 2.43", True), ("glibc 2.43.9000", True)),
        *(("glibc 3.0", True), ("musl", False), ("", False), (None, False)),
    ],
)
def test_which_libc_waits_for_threads_that_are_not_there(version: str | None, waits: bool) -> None:
    assert exits._waits(version) is waits


@pytest.mark.parametrize(("waits", "ends"), [(True, "sys.exit(7)"), (True, "pass"), (True, "1 / 0"), (False, "pass")])
def test_a_child_ends_with_its_status_and_without_handlers_of_c(waits: bool, ends: str) -> None:
    """Not before Python's handlers, nor before what C and Python have still to write."""
    out = succeed(f"""
        import atexit, ctypes, os, sys, torch, gpu_lod as lod
        from gpu_lod import context
        from gpu_lod.bridge import exits

        exits._waits = lambda version: {waits}
        context._opened_in_pid = os.getpid()
        process = ctypes.CDLL(None)
        process.__cxa_atexit(process.puts, ctypes.c_char_p(b"C's handler"), None)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.dup2(write, 1)
            os.dup2(write, 2)
            atexit.register(print, "Python's handler")
            process.fdopen.restype = ctypes.c_void_p
            stream = ctypes.c_void_p(process.fdopen(2, b"w"))  # not Python's, which flushes its own
            process.fputs(b"C\\n", stream)
            print("Python")
            {ends}
        else:
            os.close(write)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            said = os.fdopen(read).read()
            print(status, *(word in said.splitlines() for word in ("Python", "C", "Python's handler", "C's handler")))
        """)
    status = {"sys.exit(7)": 7, "1 / 0": 1, "pass": 0}[ends]
    assert out.splitlines()[0] == f"{status} True True True {not waits}"
