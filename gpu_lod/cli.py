"""The entry point of `gpu-lod`: exit codes and one-line errors. The commands themselves are in `commands`."""

from __future__ import annotations

import io
import logging
import sys

from gpu_lod.errors import GpuLodError, InputError

_EXTRA = {"typer", "rich", "PIL", "matplotlib", "skimage", "jinja2", "markupsafe", "jsonschema", "safetensors"}
FAILURE, USAGE = 1, 2


def main() -> None:
    """Run the command line on `sys.argv`.

    Exit codes: 0 done; 1 it failed or cannot be done, and a line on stderr says why; 2 the arguments make no sense,
    alone or for this picture; 130 interrupted.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # tables have signs that not every encoding has
    logging.getLogger("PIL").addHandler(logging.NullHandler())  # what it tells is in the error, in one line
    # Taken out here, so that it may stand before or behind the command.
    debug = "--debug" in sys.argv[1:]
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    try:
        from gpu_lod.commands import app

        app(arguments, prog_name="gpu-lod")
    except KeyboardInterrupt:  # before the commands are there, which say so themselves
        sys.exit(130)
    except Exception as error:
        if debug:
            raise
        command = next((argument for argument in arguments if not argument.startswith("-")), "")
        sys.exit(_report(error, command))


def _report(error: Exception, command: str) -> int:
    """Say it in one line; returns the exit code."""
    if isinstance(error, ImportError) and (error.name or "").partition(".")[0] in _EXTRA:
        text = "the command line needs extra packages; in the checkout: pip install '.[cli]'"
    elif isinstance(error, GpuLodError):
        from gpu_lod.commands import as_options

        text = as_options(str(error), command)
    elif isinstance(error, OSError) and error.filename is None and error.strerror:
        text = f"the output cannot be written: {error.strerror}."
    else:
        text = f"{type(error).__name__}: {error} (--debug shows where)"
    print("gpu-lod: " + " ".join(text.split()), file=sys.stderr)
    return USAGE if isinstance(error, InputError) else FAILURE


if __name__ == "__main__":
    main()
