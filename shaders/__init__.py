"""GLSL sources as package data; installs as `gpu_lod.shaders`. Works without GL.

Shaders are plain GLSL files with one addition: `#include "name"` puts another file of this folder in its place, at any
depth, each file at most once. `#line` directives number the lines of file k from 10000 k on, and `translate` turns the
driver's numbers back into file and line. (GLSL's own source-string numbers are no use: Mesa often
reports 0.)

Prefixes in the files: `t_` sampler, `i_` image, `b_` buffer, `u_` uniform.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.resources import files

from gpu_lod.errors import ShaderError

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]*)"\s*(//.*)?$')
_VERSION = re.compile(r"^\s*#\s*version\b")
# "0:12(5): error: ..." (Mesa), "0(12) : error C0000: ..." (NVIDIA), "ERROR: 0:12: ..." (others)
_LOCATION = re.compile(r"(?P<before>^|ERROR: |WARNING: )\d+(?::(?P<a>\d+)(?:\(\d+\))?|\((?P<b>\d+)\))", re.M)
_LINES_A_FILE = 10_000


@dataclass(frozen=True)
class Source:
    """A complete shader: its text, and the files in it in the order of their line numbers."""

    name: str
    text: str
    files: tuple[str, ...]

    def translate(self, log: str) -> str:
        """The driver's message with "file:line" in place of its locations."""

        def named(match: re.Match[str]) -> str:
            number, line = divmod(int(match["a"] or match["b"]), _LINES_A_FILE)
            file = self.files[number] if number < len(self.files) else self.name
            return f"{match['before']}{file}:{line}"

        return _LOCATION.sub(named, log)


def names() -> list[str]:
    """All shader files."""
    return sorted(
        item.name for item in files(__name__).iterdir() if not item.name.endswith((".py", ".pyc", "__pycache__"))
    )


def source(name: str, **defines: object) -> Source:
    """Assemble a shader.

    Args:
        name: a file of this package, such as "log_polar.comp".
        defines: become `#define NAME value` lines right after `#version`; False and None are left out, True is 1.

    Raises:
        ShaderError: an unknown name (the message lists the choices), an include cycle, or no `#version` line.
    """
    numbers: list[str] = []
    lines = _expand(name, numbers, (), defines)
    if not any(_VERSION.match(line) for line in lines):
        raise ShaderError(f"shader {name} has no #version line; it must be the first line that is no comment.")
    return Source(name, "\n".join(lines) + "\n", tuple(numbers))


def _expand(name: str, numbers: list[str], stack: tuple[str, ...], defines: dict[str, object]) -> list[str]:
    if name in stack:
        raise ShaderError(f"shader include cycle: {' -> '.join((*stack, name))}.")
    if name in numbers:
        return []
    number = len(numbers)
    numbers.append(name)
    offset = number * _LINES_A_FILE
    result = [] if not stack else [f"#line {offset + 1}"]
    for position, line in enumerate(_read(name, stack).splitlines(), start=1):
        include = _INCLUDE.match(line)
        if include:
            result += _expand(include[1], numbers, (*stack, name), {})
            result.append(f"#line {offset + position + 1}")
        elif _VERSION.match(line):
            result.append(line)
            result += [f"#define {key} {int(v) if isinstance(v, bool) else v}" for key, v in defines.items() if v]
            result.append(f"#line {offset + position + 1}")
        else:
            result.append(line)
    return result


def _read(name: str, stack: tuple[str, ...]) -> str:
    if name not in names():
        origin = f", included from {' -> '.join(stack)}" if stack else ""
        raise ShaderError(f"there is no shader {name!r}{origin}; there are {', '.join(names())}.")
    return files(__name__).joinpath(name).read_text(encoding="utf-8")


__all__ = ["Source", "names", "source"]
