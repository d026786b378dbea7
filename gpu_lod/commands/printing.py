"""What the commands print: tables on stdout, progress on stderr and only on a terminal."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable
from rich.text import Text

from gpu_lod import calibration
from gpu_lod.bridge import devices
from gpu_lod.context import Context, context_for
from gpu_lod.errors import GpuLodError, InputError
from gpu_lod.tables import Table, Timed
from gpu_lod.token_files import finite

if TYPE_CHECKING:
    import torch

    from gpu_lod.commands.allocation import Allocation, Skipped
    from gpu_lod.commands.sheets import Bounds
    from gpu_lod.cull import Culled
    from gpu_lod.demo.rows import Row
    from gpu_lod.doctor import Finding
    from gpu_lod.pyramid import Pyramid

EXTENSIONS = (
    "GL_ARB_buffer_storage",
    "GL_EXT_texture_filter_minmax",
    "GL_ARB_texture_filter_minmax",
    "GL_ARB_texture_filter_anisotropic",
    "GL_KHR_shader_subgroup",
    "GL_EXT_shader_16bit_storage",
    "GL_EXT_memory_object",
)
"""Those that make a difference to gpu_lod."""

_MARKS = {"ok": ("ok", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "bold red")}


def _console() -> Console:
    # Piped, there is no width to fit, and breaking lines would only hurt whoever reads them.
    return Console(highlight=False, width=None if sys.stdout is not None and sys.stdout.isatty() else 160)


_FOLDED = 24
"""Characters that columns which may be folded have at least."""


def _show(table: RichTable) -> None:
    """A table on stdout. On a terminal that is too narrow its lines run on: nothing is left out."""
    console = _console()
    wide = console.options.update(width=10_000)
    least = 3 * len(table.columns)
    for column in table.columns:
        longest = max(Measurement.get(console, wide, cell).maximum for cell in (column.header, *column.cells))
        least += longest if column.no_wrap else min(longest, _FOLDED)
    console.width = max(console.width, least)
    console.print(table)


@contextmanager
def busy(what: str) -> Iterator[Callable[[str], None]]:
    """A spinner while the block runs; call what it gives to change the words."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda step: None
        return
    with console.status(what) as status:
        yield status.update


@contextmanager
def progress() -> Iterator[Callable[[int, int, str], None]]:
    """A bar while the block runs; tell what it gives how much is done, of how much, and what comes next."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done, of, what: None
        return
    with Progress(
        TextColumn("{task.percentage:>3.0f}%"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
        console=console,
        transient=True,
    ) as bar:
        task = bar.add_task("")
        yield lambda done, of, what: bar.update(task, completed=done, total=of, description=what)


def show_tables(tables: list[Table], *, new: bool = False) -> None:
    """Measured times, a table a machine.

    Args:
        new: they were measured just now.
    """
    console = _console()
    for table in tables:
        machine = table.machine
        threads = f", {machine.threads} threads" if machine.threads else ""
        console.print(
            Text(f"{machine.tensors} tensors: {machine.name}{threads}, {machine.renderer or 'no OpenGL'}", "bold")
        )
        if not new:
            seed = "seed: for what the tables above do not hold"
            console.print(f"calibrated: {table.path}" if table.path else seed, soft_wrap=True, markup=False)
        grid = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
        grid.add_column("verb", no_wrap=True)
        grid.add_column("job", overflow="fold")
        for name in ("torch ms", "best other ms"):
            grid.add_column(name, justify="right", no_wrap=True)
        grid.add_column("auto takes", no_wrap=True)
        for entry in table.entries:
            others = sorted((timed, way) for way, timed in entry.ways.items() if way != "torch")
            taken = calibration.taken(entry)
            guess = (new or table.path is not None) and calibration.guessed(entry)
            grid.add_row(
                entry.question.verb,
                f"{entry.at}{f' ({entry.question.state})' if entry.question.state else ''}",
                _spread(entry.ways["torch"]) if "torch" in entry.ways else "",
                f"{calibration.spoken(others[0][1])} {_spread(others[0][0])}" if others else "",
                Text("unsteady: as before", style="dim")
                if guess
                else Text(calibration.spoken(taken), style="" if taken == "torch" else "bold green"),
            )
        _show(grid)


def _spread(timed: Timed) -> str:
    return f"{timed.median_ms:.3g} ± {timed.iqr_ms / 2:.2g}"


def show_left_out(jobs: list[str], unsteady: list[str], busy: str, measured: int = 0, minutes: float = 0) -> None:
    """
    Args:
        measured: how many jobs were, in how many minutes.
    """
    late = sum(job.endswith("no time was left") for job in jobs)
    for job in jobs:
        if not job.endswith("no time was left"):
            _console().print(f"not measured: {job}", soft_wrap=True, markup=False)
    if late:
        more = f" {math.ceil(minutes * (1 + late / measured))} would do for all" if measured else " gives more"
        _console().print(f"No time was left for the {late} least telling jobs of {late + measured}: --minutes{more}.")
    if unsteady:
        _console().print(
            f"The times of {len(unsteady)} jobs spread too much to say what is fastest: there auto goes by what was "
            "calibrated before, or by the seeds."
        )
    if busy:
        _console().print(f"The machine had other things to do ({busy}): calibrate again when it has not.")


def show_wrong(ways: list[str]) -> None:
    for way in ways:
        _console().print(f"wrong: {way}", soft_wrap=True, markup=False)
    if ways:
        _console().print(
            "auto does not take these for their verbs: what this driver makes differs from torch's. Update it, and "
            "report it with what `gpu-lod doctor --json` prints.",
            soft_wrap=True,
        )


def show_removed(paths: list[Path]) -> None:
    for path in paths:
        _console().print(f"removed {path}", soft_wrap=True, markup=False)
    if not paths:
        _console().print("nothing was calibrated here")


def device_info() -> list[dict[str, Any]]:
    """All EGL devices, and what a context on each says of itself.

    Raises:
        GLUnavailableError: no EGL, or no device.
    """
    found = []
    try:
        default = Context().device
    except (GpuLodError, InputError):
        default = None
    for device in devices():
        entry: dict[str, Any] = {
            "index": device.index,
            "default": default is not None and default.index == device.index,
            "software": device.software,
            "drm_file": device.drm_file,
            "cuda_ordinal": device.cuda_ordinal,
            "error": None,
        }
        try:
            ctx = Context(device.index)
        except GpuLodError as error:
            entry["error"] = " ".join(str(error).split())
        else:
            entry |= {
                "vendor": ctx.vendor,
                "renderer": ctx.renderer,
                "driver": ctx.driver,
                "version": f"{ctx.version // 100}.{ctx.version // 10 % 10}",
                "software": ctx.software,
                "limits": dict(vars(ctx.limits)),
                "extensions": {name: name in ctx.extensions for name in EXTENSIONS},
            }
        found.append(entry)
    return found


def show_info(found: list[dict[str, Any]]) -> None:
    console = _console()
    for number, entry in enumerate(found):
        if number:
            console.print()
        title = Text(f"EGL device {entry['index']}", style="bold")
        title.append("  (default)" if entry["default"] else "", style="dim")
        console.print(title)
        table = RichTable.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        if entry["error"]:
            table.add_row("does not open", Text(entry["error"], style="red"))
        else:
            limits = entry["limits"]
            table.add_row("renderer", Text(entry["renderer"]))
            table.add_row("vendor", Text(entry["vendor"]))
            table.add_row("OpenGL", Text(entry["driver"]))
            table.add_row("kind", "software" if entry["software"] else "hardware")
            table.add_row("storage binding", f"{limits['storage_bytes'] / 2**20:.0f} MiB")
            table.add_row("textures", f"{limits['texture_size']} px a side, {limits['layers']} layers")
            for name, there in entry["extensions"].items():
                table.add_row(name, Text("yes", style="green") if there else Text("no", style="yellow"))
        if entry["drm_file"]:
            table.add_row("DRM file", entry["drm_file"])
        table.add_row("CUDA device", "none" if entry["cuda_ordinal"] is None else str(entry["cuda_ordinal"]))
        _show(table)


def show_findings(findings: list[Finding]) -> None:
    table = RichTable(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        table.add_row(Text(*_MARKS[finding.status]), Text(finding.name, style="bold"), Text(finding.found))
    console = _console()
    _show(table)
    for finding in findings:
        if finding.fix:  # below the table and unbroken, so that it can be copied
            console.print(Text(f"\n{finding.name}:\n  → ").append(finding.fix, style="bold"), soft_wrap=True)


def show_rows(rows: list[Row], busy: str) -> None:
    """
    Args:
        busy: what the machine was at when the measuring began, if that was much.
    """
    table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("picture", "verb", "generator", "size"):
        table.add_column(name, no_wrap=True)
    for name in ("GL ms", "best torch ms"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("torch way", no_wrap=True)
    for name in ("ratio", "largest difference"):
        table.add_column(name, justify="right", no_wrap=True)
    before: str | None = None
    for row in rows:
        if before is not None and row.picture != before:
            table.add_section()
        before = row.picture
        gain = row.ratio >= 1
        ratio = Text(
            f"{'' if row.steady else '? '}{row.ratio:.2f} {'faster' if gain else 'slower'}",
            style="bold green" if gain else "bold red",
        )
        apart = "exact" if row.difference == 0 else f"{row.difference:.1e}"
        difference = Text(apart) if row.ok else Text(f"{apart} > {row.tolerance:.0e}", style="bold red")
        table.add_row(
            row.picture, row.verb, row.generator, row.size, f"{row.gl_ms:.2f}", f"{row.torch_ms:.2f}", row.torch_way,
            ratio, difference,
        )  # fmt: skip
    console = _console()
    _show(table)
    steady = [row for row in rows if row.steady]
    gains = sum(row.ratio >= 1 for row in steady)
    unsteady = f", unsteady in {len(rows) - len(steady)}" if len(steady) < len(rows) else ""
    console.print(
        f"ratio: best torch ms / GL ms. GL is faster in {gains} of {len(rows)} rows, slower in {len(steady) - gains}"
        f"{unsteady}."
    )
    if unsteady:
        console.print("?: unsteady, the middle half of the times spans more than half the median; measure again.")
    if busy:
        console.print(
            f"The machine had other things to do ({busy}), so these ratios say little: measure when it has not."
        )


def show_energies(energies: Sequence[torch.Tensor], shares: list[list[float]]) -> None:
    table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    count = len(shares[0])
    for name in ("level", "size", *(f"{180 * k / count:g} degrees" for k in range(count))):
        table.add_column(name, justify="right", no_wrap=True)
    for level, (values, parts) in enumerate(zip(energies, shares, strict=True)):
        height, width = values.shape[-2:]
        table.add_row(str(level), f"{width} x {height}", *(f"{100 * part:.1f}%" for part in parts))
    _show(table)


def show_culled(hz: Pyramid, culled: Culled, threshold: float, bounds: Sequence[Bounds]) -> None:
    total, texels = culled.mask.numel(), sum(level.numel() for level in hz.levels)
    levels = Counter(culled.pruned[:, -3].tolist())
    which = ", ".join(f"{levels[level]} at level {level}" for level in sorted(levels, reverse=True))
    lines = [
        f"kept {len(culled.indices)} of {total} patches, of a relevance from {threshold:.3g}",
        f"pruned {len(culled.pruned)} nodes{f': {which}' if which else ''}",
        f"tested {culled.tested} of the {texels} texels of all levels",
    ]
    for number, one in enumerate(bounds, 1):
        low, high = (f"{value:.3g}" for value in (one.lower, one.upper))
        lines.append(
            f"box {number} ({', '.join(f'{side:g}' for side in one.box)}): bounds {low} to {high}, "
            f"values {one.least:.3g} to {one.largest:.3g}; {_fate(one, threshold)}"
        )
    for line in lines:
        _console().print(line, soft_wrap=True, markup=False)


def _fate(one: Bounds, threshold: float) -> str:
    """What the bounds alone say of a box."""
    if one.upper < threshold:
        return "nothing in it reaches the threshold"
    return "all of it reaches the threshold" if one.lower >= threshold else "the bounds do not decide"


def show_allocations(results: list[Allocation | Skipped]) -> None:
    from gpu_lod.commands.allocation import Allocation

    made = [result for result in results if isinstance(result, Allocation)]
    levels = sorted({level for result in made for level in result.levels})
    table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("allocator", no_wrap=True)
    for name in ("tokens", *(f"level {level}" for level in levels), "coverage", "PSNR dB"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for result in made:
        counts = [str(result.levels.get(level, "")) for level in levels]
        table.add_row(
            result.name, str(result.tokens.budget), *counts, f"{100 * result.coverage:.1f}%",
            "exact" if math.isinf(result.psnr) else f"{result.psnr:.2f}", "untrained" if result.untrained else "",
        )  # fmt: skip
    console = _console()
    _show(table)
    for one in results:
        if not isinstance(one, Allocation):
            console.print(f"skipped {one.name}: {one.reason}", soft_wrap=True, markup=False)


def show_made(
    verb: str, image: Path, paths: list[Path], results: Any, choice: Any, as_json: bool,
    more: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    if as_json:
        return print_json(
            {
                "verb": verb,
                "input": str(image),
                "output": [str(path) for path in paths],
                "shapes": [list(result.shape) for result in results],
                "dtype": str(results[0].dtype).removeprefix("torch."),
                "backend": choice.backend,
                "generator": choice.generator,
                "reason": choice.reason,
                "renderer": _renderer(results) if choice.backend == "gl" else None,
                **(more or {}),
            }
        )
    show_written(paths)


def _renderer(results: Any) -> str | None:
    """Of the context that the results live in."""
    return context_for(*results).renderer


def show_written(paths: list[Path]) -> None:
    for path in paths:
        typer.echo(f"wrote {path}")


def print_json(value: Any) -> None:
    typer.echo(json.dumps(finite(value), indent=2, allow_nan=False))
