"""Commands about the machine: what it has, what works, what it measures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import torch
import typer

import gpu_lod as lod
from gpu_lod.commands import options, printing
from gpu_lod.commands.app import app
from gpu_lod.commands.options import AsJson, Device
from gpu_lod.timing import at_work


@app.command()
def info(as_json: AsJson = False) -> None:
    """List the EGL devices, with their renderers, limits and extensions."""
    found = printing.device_info()
    if as_json:
        printing.print_json({"gpu_lod": lod.__version__, "devices": found})
    else:
        printing.show_info(found)


@app.command()
def doctor(
    device: Device = None,
    shaders: Annotated[
        bool, typer.Option("--shaders", help="Also compare what every shader makes with torch's (up to a minute).")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check what works here, and print the line that mends what does not."""
    from gpu_lod import doctor as checks

    with printing.busy("examining"):
        findings = checks.examine(device, shaders=shaders)
    if as_json:
        printing.print_json(checks.as_dict(findings))
    else:
        printing.show_findings(findings)
    failed = sum(finding.status == "fail" for finding in findings)
    if failed:
        raise lod.GpuLodError(f"{failed} of {len(findings)} checks failed.")


@app.command()
def calibrate(
    minutes: Annotated[float, typer.Option(min=0.01, help="How long it may take, roughly.")] = 1.0,
    quick: Annotated[bool, typer.Option("--quick", help="Few jobs, and short.")] = False,
    verbs: Annotated[str | None, typer.Option(metavar="A,B", help="Only these verbs.", show_default=False)] = None,
    tensors: Annotated[
        Literal["cpu", "cuda"] | None, typer.Option(help="Only tensors there (default: both).", show_default=False)
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Print the times in force, and measure nothing.")] = False,
    reset: Annotated[bool, typer.Option("--reset", help="Remove what was calibrated, and measure nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure on this machine what the auto backend decides, and keep the times for it."""
    from gpu_lod import calibration, tables
    from gpu_lod.calibrate import Report
    from gpu_lod.calibrate import calibrate as measure

    wanted = None if verbs is None else [verb.strip() for verb in verbs.split(",")]
    if reset and (show or verbs is not None):
        raise typer.BadParameter(
            "all that was calibrated is removed; leave --show and --verbs out.", param_hint="'--reset'"
        )
    if show and verbs is not None:
        raise typer.BadParameter("all times in force are printed; leave --verbs out.", param_hint="'--show'")
    if reset:
        removed = tables.forget()
        return printing.print_json([str(path) for path in removed]) if as_json else printing.show_removed(removed)
    if show:
        devices = [torch.device("cpu"), *([torch.device("cuda", 0)] if torch.cuda.is_available() else [])]
        force = [
            table for one in devices for table in calibration.in_force(calibration.host(one, torch.get_num_threads()))
        ]
        return printing.print_json([table.as_dict() for table in force]) if as_json else printing.show_tables(force)
    report, problem = Report(), None
    try:
        with printing.progress() as progress:
            where = [tensors] if tensors else None
            measure(minutes, wanted, quick=quick, devices=where, progress=progress, report=report)
    except (KeyboardInterrupt, lod.GpuLodError) as error:  # what was measured is printed all the same
        problem = error
    measured = [tables.Table(machine, tuple(entries)) for machine, entries in report.entries.items()]
    if as_json and measured:
        printing.print_json(
            {
                "tables": [table.as_dict() for table in measured],
                "left_out": report.left_out,
                "unsteady": report.unsteady,
                "wrong": report.wrong,
                "busy": report.busy,
                "written": list(map(str, report.paths)),
            }
        )
    elif measured:
        printing.show_tables(measured, new=True)
        count = sum(len(table.entries) for table in measured)
        printing.show_left_out(report.left_out, report.unsteady, report.busy, count, minutes)
        printing.show_wrong(report.wrong)
        printing.show_written(report.paths)
    if isinstance(problem, KeyboardInterrupt):
        raise typer.Exit(130)
    if problem is not None:
        raise problem
    if not measured:
        raise lod.GpuLodError("nothing was measured: " + "; ".join(report.left_out[:2]) + ".")


@app.command()
def report(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILES...", help="Result files of the benchmarks.", show_default=False)
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The page. (default: out/report.html)", show_default=False)
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the README's tables, and write no page.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make one HTML page of benchmark results: times, floors, where GL loses and why; devices beside each other."""
    from gpu_lod.report import page, text
    from gpu_lod.report.files import load_all

    if markdown:
        if output is not None or as_json:
            raise typer.BadParameter("no page is written; leave -o and --json out.", param_hint="'--markdown'")
        tables = [text.markdown(path, Path(), data) for path, data in load_all(files)]
        typer.echo("\n\n".join(tables))
        return
    output = Path("out/report.html") if output is None else output
    options.check_not_read(output, "--output", *files)
    with printing.busy("report"):
        page.report(files, output)
    if as_json:
        printing.print_json({"input": [str(path) for path in files], "output": [str(output)]})
    else:
        printing.show_written([output])


@app.command()
def demo(
    image: Annotated[
        Path | None,
        typer.Argument(metavar="IMAGE", help="A picture of yours; without one, a portrait and a printed page."),
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write to.")] = Path("out/demo"),
    fixation: options.OptionalFixation = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Draw a contact sheet of what the verbs make of a picture, and measure each of them beside torch.

    Fails if a shader's result differs from the reference by more than its tolerance.
    """
    from gpu_lod import demo as show

    chosen = show.pictures(image, None if fixation is None else options.point(fixation))
    for name in (*(f"{picture.name}.png" for picture in chosen), "table.json"):
        options.check_not_read(output / name, "--output", image)
    busy = at_work()
    with options.on(device), printing.busy("starting") as say:
        rows, written = show.run(chosen, output, say)
    if as_json:
        typer.echo(written[-1].read_text(), nl=False)
    else:
        printing.show_rows(rows, busy)
        printing.show_written(written)
    wrong = [row for row in rows if not row.ok]
    if wrong:
        names = ", ".join(f"{row.verb} {row.generator} on {row.picture}" for row in wrong)
        raise lod.GpuLodError(f"larger differences than the tolerance: {names}.")
