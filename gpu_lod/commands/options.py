"""Options that many commands have, and what is made of their text."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import gpu_lod as lod
from gpu_lod import images

Picture = Annotated[Path, typer.Argument(metavar="IMAGE", help="PNG, JPEG, TIFF or WebP.", show_default=False)]
# No Path, which does not keep the slash that a folder may be told by.
Output = Annotated[
    str | None,
    typer.Option(
        "-o", "--output", metavar="<path>", help="File or folder to write. (default: `out/<name>.<command>.png`)"
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")]
Device = Annotated[
    int | None,
    typer.Option(help="EGL device, as `gpu-lod info` lists them; implies gl.", show_default=False),
]
Backend = Annotated[
    Literal["auto", "gl", "torch"], typer.Option(help="auto takes what measures fastest; a name is used or fails.")
]
Eccentricity = Annotated[float, typer.Option(help="Eccentricity of half resolution, in units of the longer side.")]
_FIXATION = "Fixation in fractions of width and height, y down."
Fixation = Annotated[str, typer.Option(metavar="X,Y", help=_FIXATION)]
OptionalFixation = Annotated[str | None, typer.Option(metavar="X,Y", help=_FIXATION, show_default=False)]


def on(device: int | None) -> AbstractContextManager[Any]:
    """Run on that device; `with context` makes it the one that verbs use."""
    return nullcontext() if device is None else lod.Context(device)


def backend_for(backend: str, device: int | None) -> Any:
    if device is None:
        return backend
    if backend == "torch":
        raise typer.BadParameter("a device is for the gl backend, not for torch.", param_hint="'--device'")
    return "gl"


def point(text: str) -> tuple[float, float]:
    try:
        x, y = (float(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not X,Y, such as 0.5,0.5.", param_hint="'--fixation'") from None
    if not (0 <= x <= 1 and 0 <= y <= 1):
        raise typer.BadParameter(
            f"{text!r} is outside the picture; expected two fractions, 0 to 1.", param_hint="'--fixation'"
        )
    return x, y


def box(text: str) -> tuple[float, float, float, float]:
    try:
        x0, y0, x1, y1 = (float(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not X0,Y0,X1,Y1, such as 0.1,0.2,0.5,0.6.", param_hint="'--box'"
        ) from None
    if not (0 <= x0 < x1 <= 1 and 0 <= y0 < y1 <= 1):
        raise typer.BadParameter(
            f"{text!r} is no box in the picture; expected fractions, 0 to 1, with x0 < x1 and y0 < y1.",
            param_hint="'--box'",
        )
    return x0, y0, x1, y1


def output_path(image: Path, verb: str, output: str | None) -> Path:
    """Where to write; an extension that cannot be written fails before any work."""
    if output in ("", "-"):
        raise typer.BadParameter(f"{output!r} is no file; name one, or a folder.", param_hint="'--output'")
    name = "out/" if output is None else output
    path = Path(name)
    if path.is_dir() or not path.suffix or name.endswith(("/", os.sep)):
        path = path / f"{image.stem}.{verb}.png"
    images.file_format(path)
    check_not_read(path, "--output", image)
    return path


def same_file(path: Path, *others: Path | None) -> bool:
    """Whether it is one of the others, by links too; those that go in circles are names like any other."""
    return os.path.realpath(path) in [os.path.realpath(other) for other in others if other is not None]


def check_not_read(path: Path, option: str, *read: Path | None) -> None:
    """Raises BadParameter where a file that is read would be written over."""
    if same_file(path, *read):
        raise typer.BadParameter(f"{path} is read, and would be written over; name another.", param_hint=f"'{option}'")
