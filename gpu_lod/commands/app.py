"""The application that commands register with: its help, its version, and errors in the words of its options."""

from __future__ import annotations

import re
from typing import Annotated

import typer
from typer.main import get_command

import gpu_lod as lod

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # which fills paragraphs
    help="Level of detail on graphics hardware for PyTorch: pyramids, samplers and token budgets for image files.",
    epilog="Exit codes: 0 done, 1 it failed or cannot be done (one line on stderr says why), 2 arguments that make no "
    "sense, alone or for this picture, 130 interrupted.",
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"gpu-lod {lod.__version__}")
        raise typer.Exit


def as_options(text: str, command: str) -> str:
    """Errors name the way out by arguments of Python; here they are options, where the command has such a one."""
    known = getattr(get_command(app), "commands", {}).get(command)
    options = {p.name: max(p.opts, key=len) for p in ([] if known is None else known.params)}

    def option(found: re.Match[str]) -> str:
        name = options.get(found["name"], "")
        value = next(filter(None, found.groups()[1:]), "")
        return f"{name} {value}".strip() if name.startswith("--") else found[0]

    # Not in the names of files.
    return re.sub(r"(?<![\w/.-])(?P<name>[a-z]\w*)=(?:'([^']*)'|\"([^\"]*)\"|(\d[\d.]*\b))?(?!\.?[\w/-])", option, text)


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback where something fails.")] = False,
) -> None: ...
