"""The commands of `gpu-lod`. Whatever they need that is slow to import, they import themselves."""

from __future__ import annotations

import json
import math
import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import typer
from typer.main import get_command

import gpu_lod as lod
from gpu_lod import images, printing
from gpu_lod.context import context_for
from gpu_lod.patch_grid import pooled
from gpu_lod.pyramid import burt_sizes
from gpu_lod.saliency import PATCH, colour, luma, saliency
from gpu_lod.timing import at_work

KEPT = 0.2
"""Share of the patches that `cull` keeps where no threshold is given."""

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # which fills paragraphs
    help="Level of detail on graphics hardware for PyTorch: pyramids, samplers and token budgets for image files.",
    epilog="Exit codes: 0 done, 1 failed (one line on stderr says why), 2 wrong arguments.",
)

Picture = Annotated[Path, typer.Argument(metavar="IMAGE", help="PNG, JPEG, TIFF or WebP.", show_default=False)]
Output = Annotated[
    Path | None, typer.Option("-o", "--output", help="File or folder to write. (default: `out/<name>.<command>.png`)")
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
Fixation = Annotated[str, typer.Option(metavar="X,Y", help="Fixation in fractions of width and height, y down.")]


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"gpu-lod {lod.__version__}")
        raise typer.Exit


def as_options(text: str) -> str:
    """Errors name the way out by arguments of Python; here they are options, where there is such a one."""
    commands = getattr(get_command(app), "commands", {})
    options = {p.name: max(p.opts, key=len) for command in commands.values() for p in command.params}

    def option(found: re.Match[str]) -> str:
        name = options.get(found["name"], "")
        value = next(filter(None, found.groups()[1:]), "")
        return f"{name} {value}".strip() if name.startswith("--") else found[0]

    return re.sub(r"\b(?P<name>[a-z]\w*)=(?:'([^']*)'|\"([^\"]*)\")?", option, text)


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback where something fails.")] = False,
) -> None: ...


@app.command()
def info(as_json: AsJson = False) -> None:
    """List the EGL devices, with their renderers, limits and extensions."""
    found = printing.device_info()
    if as_json:
        _print_json({"gpu_lod": lod.__version__, "devices": found})
    else:
        printing.show_info(found)


@app.command()
def doctor(device: Device = None, as_json: AsJson = False) -> None:
    """Check what works here, and print the line that mends what does not."""
    from gpu_lod import doctor as checks

    with printing.busy("examining"):
        findings = checks.examine(device)
    if as_json:
        _print_json(checks.as_dict(findings))
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

    if reset:
        removed = tables.forget()
        return _print_json([str(path) for path in removed]) if as_json else printing.show_removed(removed)
    if show:
        devices = [torch.device("cpu"), *([torch.device("cuda", 0)] if torch.cuda.is_available() else [])]
        force = [
            table for one in devices for table in calibration.in_force(calibration.host(one, torch.get_num_threads()))
        ]
        return _print_json([table.as_dict() for table in force]) if as_json else printing.show_tables(force)
    report, problem = Report(), None
    try:
        with printing.progress() as progress:
            wanted = verbs.split(",") if verbs else None
            where = [tensors] if tensors else None
            measure(minutes, wanted, quick=quick, devices=where, progress=progress, report=report)
    except (KeyboardInterrupt, lod.GpuLodError) as error:  # what was measured is printed all the same
        problem = error
    measured = [tables.Table(machine, tuple(entries)) for machine, entries in report.entries.items()]
    if as_json and measured:
        _print_json(
            {
                "tables": [table.as_dict() for table in measured],
                "left_out": report.left_out,
                "busy": report.busy,
                "written": list(map(str, report.paths)),
            }
        )
    elif measured:
        printing.show_tables(measured, new=True)
        printing.show_left_out(report.left_out, report.busy)
        _wrote(report.paths)
    if isinstance(problem, KeyboardInterrupt):
        raise typer.Exit(130)
    if problem is not None:
        raise problem
    if not measured:
        raise lod.GpuLodError("nothing was measured: " + "; ".join(report.left_out[:2]) + ".")


@app.command()
def demo(
    image: Annotated[
        Path | None,
        typer.Argument(metavar="IMAGE", help="A picture of yours; without one, a portrait and a printed page."),
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write to.")] = Path("out/demo"),
    fixation: Annotated[str | None, typer.Option(metavar="X,Y", help="As for log-polar.", show_default=False)] = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Draw a contact sheet of what the verbs make of a picture, and measure each of them beside torch.

    Fails if a shader's result differs from the reference by more than its tolerance.
    """
    from gpu_lod import demo as show

    chosen = show.pictures(image, None if fixation is None else _fixation(fixation))
    busy = at_work()
    with _on(device), printing.busy("starting") as say:
        rows, written = show.run(chosen, output, say)
    if as_json:
        typer.echo(written[-1].read_text(), nl=False)
    else:
        printing.show_rows(rows, busy)
        _wrote(written)
    wrong = [row for row in rows if not row.ok]
    if wrong:
        names = ", ".join(f"{row.verb} {row.generator} on {row.picture}" for row in wrong)
        raise lod.GpuLodError(f"larger differences than the tolerance: {names}.")


@app.command()
def mipmap(
    image: Picture,
    levels: Annotated[int | None, typer.Option(help="How many, the picture included. (default: all)")] = None,
    reduce: Annotated[Literal["mean", "max", "min"], typer.Option(help="What a texel is of those below it.")] = "mean",
    generator: Annotated[
        Literal["auto", "registers", "single-pass", "single-pass-texture", "compute", "fragment", "driver"],
        typer.Option(help="A name implies the gl backend."),
    ] = "auto",
    backend: Backend = "auto",
    device: Device = None,
    separate: Annotated[bool, typer.Option("--separate", help="A file for each level instead of one atlas.")] = False,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Write the mip chain of a picture as an atlas: level 0 on the left, the others stacked on its right."""
    path = _path(image, "mipmap", output)

    def make(picture: torch.Tensor) -> tuple[Any, lod.Pyramid]:
        arguments: dict[str, Any] = {"levels": levels, "reduce": reduce, "generator": generator}
        arguments["backend"] = _backend(backend, device)
        return lod.explain(lod.mipmap, picture, **arguments), lod.mipmap(picture, **arguments)

    with _on(device), printing.busy("mipmap"):
        choice, pyramid = make(images.load(image))
        if separate:
            paths = [path.with_name(f"{path.stem}.{level}{path.suffix}") for level in range(len(pyramid))]
            for level, one in zip(pyramid, paths, strict=True):
                images.save(level, one)
        else:
            paths = [path]
            images.save(images.atlas(pyramid.levels), path)
    _report("mipmap", image, paths, pyramid.levels, choice, as_json)


@app.command()
def hiz(
    image: Picture,
    of: Annotated[
        Literal["luma", "saliency"], typer.Option(help=f"saliency: a value a patch of {PATCH} px, drawn in that size.")
    ] = "luma",
    reduce: Annotated[Literal["max", "min"], typer.Option(help="Upper or lower bounds.")] = "max",
    generator: Annotated[
        Literal["auto", "registers", "single-pass", "compute", "fragment", "sampler"],
        typer.Option(help="A name implies the gl backend."),
    ] = "auto",
    backend: Backend = "auto",
    device: Device = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Write the Hi-Z pyramid of a picture's luma or saliency as an atlas of its levels."""
    path = _path(image, "hiz", output)
    with _on(device), printing.busy("hiz"):
        picture = images.load(image)
        values = luma(picture) if of == "luma" else pooled(saliency(picture), PATCH)
        arguments: dict[str, Any] = {"reduce": reduce, "generator": generator, "backend": _backend(backend, device)}
        choice = lod.explain(lod.hiz, values, **arguments)
        pyramid = lod.hiz(values, **arguments)
        drawn = images.atlas(pyramid.levels)
        if of == "saliency":
            drawn = drawn.repeat_interleave(PATCH, -1).repeat_interleave(PATCH, -2)
        images.save(drawn, path)
    _report("hiz", image, [path], pyramid.levels, choice, as_json)


@app.command()
def laplacian(
    image: Picture,
    levels: Annotated[int | None, typer.Option(help="How many bands and the rest. (default: all)")] = None,
    gain: Annotated[float, typer.Option(min=0.0, help="Contrast of the differences, which are drawn about grey.")] = 4,
    back: Annotated[
        bool, typer.Option("--back", help="Also write the picture that the bands add up to again: <name>.back.png.")
    ] = False,
    backend: Backend = "auto",
    device: Device = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Write the Laplacian pyramid of a picture as an atlas: bands about grey, the last Gaussian level as it is."""
    path = _path(image, "laplacian", output)
    with _on(device), printing.busy("laplacian"):
        picture = images.load(image)
        arguments: dict[str, Any] = {"levels": levels, "backend": _backend(backend, device)}
        choice = lod.explain(lod.laplacian, picture, **arguments)
        pyramid = lod.laplacian(picture, **arguments)
        white = 255.0 if picture.dtype == torch.uint8 else 1.0
        bands = [(white / 2 + gain * band.float()) for band in pyramid.levels[:-1]]
        drawn = images.atlas([*bands, pyramid[-1].float()], background=white / 2).clamp(0, white)
        whole = picture.dtype == torch.uint8
        images.save(drawn.round().byte() if whole else drawn.to(picture.dtype), path)
        paths = [path]
        if back:
            paths.append(path.with_name(f"{path.stem}.back{path.suffix}"))
            again = lod.collapse(pyramid, arguments["backend"])
            images.save(again.round().clamp(0, 255).byte() if whole else again.to(picture.dtype), paths[-1])
    _report("laplacian", image, paths, pyramid.levels, choice, as_json)


@app.command()
def gaussian(
    image: Picture,
    levels: Annotated[int | None, typer.Option(help="How many, the picture included. (default: all)")] = None,
    backend: Backend = "auto",
    device: Device = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Write the Gaussian pyramid of a picture as an atlas of its levels."""
    path = _path(image, "gaussian", output)
    with _on(device), printing.busy("gaussian"):
        picture = images.load(image)
        arguments: dict[str, Any] = {"levels": levels, "backend": _backend(backend, device)}
        choice = lod.explain(lod.gaussian, picture, **arguments)
        pyramid = lod.gaussian(picture, **arguments)
        images.save(images.atlas(pyramid.levels), path)
    _report("gaussian", image, [path], pyramid.levels, choice, as_json)


@app.command()
def energy(
    image: Picture,
    levels: Annotated[
        int | None, typer.Option(help="How many, the picture's own included. (default: 4, or all)")
    ] = None,
    backend: Backend = "auto",
    device: Device = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Write the oriented energy of a picture: a row a level, its strongest orientations first, then each of the four.

    90 degrees answers to lines of text, 0 to upright strokes.
    """
    path = _path(image, "energy", output)
    with _on(device), printing.busy("energy"):
        picture = colour(images.load(image))
        full = len(burt_sizes(*picture.shape[-2:]))
        arguments: dict[str, Any] = {
            "levels": min(4, full) if levels is None else levels, "backend": _backend(backend, device)
        }  # fmt: skip
        choice = lod.explain(lod.oriented_energy, picture, **arguments)
        energies = lod.oriented_energy(picture, **arguments)
        from gpu_lod import sheets

        least = sheets.noise_of(picture)
        found = sheets.shares(energies, least)
        images.save(sheets.energy(energies, image.stem, least), path)
    if not as_json:
        printing.show_energies(energies, found)
    _report("oriented_energy", image, [path], energies, choice, as_json, {"shares": found})


@app.command("log-polar")
def log_polar(
    image: Picture,
    fixation: Fixation = "0.5,0.5",
    rings: Annotated[int, typer.Option(help="Rows of the map.")] = 128,
    wedges: Annotated[int, typer.Option(help="Columns of the map.")] = 256,
    r_min: Annotated[
        float | None, typer.Option(help="Where the rings begin; only with log spacing. (default: 0.01)")
    ] = None,
    r_max: Annotated[float, typer.Option(help="Where they end, in units of the longer side.")] = 0.7,
    spacing: Annotated[Literal["log", "cortical"], typer.Option(help="How the rings are spaced.")] = "log",
    e0: Annotated[float, typer.Option(help="Eccentricity of half magnification; only with cortical spacing.")] = 0.05,
    border: Annotated[Literal["clamp", "zero"], typer.Option(help="What is outside the picture.")] = "clamp",
    generator: Annotated[
        Literal["auto", "compute", "fragment"], typer.Option(help="A name implies the gl backend.")
    ] = "auto",
    back: Annotated[
        bool, typer.Option("--back", help="Also write what the map shows, drawn where it was seen: <name>.back.png.")
    ] = False,
    backend: Backend = "auto",
    device: Device = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Write the log-polar map of a picture: a ring a row, the innermost on top; a wedge a column, from +x clockwise."""
    path = _path(image, "log-polar", output)
    paths = [path]
    points = _fixation(fixation)
    with _on(device), printing.busy("log-polar"):
        picture = images.load(image)
        place: dict[str, Any] = {"r_min": r_min, "r_max": r_max, "spacing": spacing, "e0": e0}
        how = {"backend": _backend(backend, device)}
        arguments = {**place, **how, "border": border, "generator": generator}
        choice = lod.explain(lod.log_polar, picture, points, rings, wedges, **arguments)
        mapped = lod.log_polar(picture, points, rings, wedges, **arguments)
        images.save(mapped, path)
        if back:
            height, width = picture.shape[-2:]
            paths.append(path.with_name(f"{path.stem}.back{path.suffix}"))
            images.save(lod.inverse_log_polar(mapped, points, (height, width), **place, **how), paths[-1])
    _report("log-polar", image, paths, [mapped], choice, as_json)


@app.command()
def foveate(
    image: Picture,
    fixation: Fixation = "0.5,0.5",
    e0: Eccentricity = 0.05,
    bias: Annotated[float, typer.Option(help="Added to the level: more is blurrier.")] = 0.0,
    anisotropy: Annotated[
        float, typer.Option(min=1, max=16, help="How much longer footprints are along the radius than across it.")
    ] = 1.0,
    level_map: Annotated[bool, typer.Option("--map/--no-map", help="The map of the levels beside the picture.")] = True,
    backend: Backend = "auto",
    device: Device = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Write a picture as sharp as the eye would see it that looks at the fixation, beside the map of its levels."""
    from gpu_lod import drawing
    from gpu_lod.foveate_tiles import level_map as levels_of

    path = _path(image, "foveate", output)
    point = _fixation(fixation)
    with _on(device), printing.busy("foveate"):
        picture = images.load(image)
        arguments: dict[str, Any] = {
            "e0": e0, "bias": bias, "anisotropy": anisotropy, "backend": _backend(backend, device)
        }  # fmt: skip
        choice = lod.explain(lod.foveate, picture, point, **arguments)
        seen = lod.foveate(picture, point, **arguments)
        drawn = seen
        if level_map:
            height, width = picture.shape[-2:]
            levels = levels_of(torch.tensor(point), (height, width), e0, bias)
            last = max(height, width).bit_length() - 1
            drawn = drawing.beside_level_map(seen, levels.clamp(max=last), point)
        images.save(drawn, path)
    _report("foveate", image, [path], [seen], choice, as_json)


@app.command()
def features(
    image: Picture,
    fixation: Fixation = "0.5,0.5",
    previous: Annotated[
        Path | None, typer.Option(help="The frame before, for the motion channel.", show_default=False)
    ] = None,
    backend: Backend = "auto",
    device: Device = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Write the feature maps of a picture as a grid, each with its number, name and range."""
    from gpu_lod import drawing

    path = _path(image, "features", output)
    point = _fixation(fixation)
    with _on(device), printing.busy("features"):
        arguments: dict[str, Any] = {
            "fixation": point,
            "previous": None if previous is None else images.load(previous),
            "backend": _backend(backend, device),
        }
        picture = images.load(image)
        choice = lod.explain(lod.feature_maps, picture, **arguments)
        maps = lod.feature_maps(picture, **arguments)
        images.save(drawing.feature_grid(maps), path)
    _report("feature_maps", image, [path], [maps], choice, as_json)


@app.command()
def sites(
    image: Picture,
    fixation: Fixation = "0.5,0.5",
    budget: Annotated[int, typer.Option(min=1, help="How many.")] = 273,
    patch: Annotated[int, typer.Option(min=1, help="Samples along a patch's side.")] = PATCH,
    e0: Eccentricity = 0.05,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Draw the cortical sites of a picture: circles as wide as the patch that a token sees, fine ones dark."""
    from gpu_lod import drawing

    path = _path(image, "sites", output)
    point = _fixation(fixation)
    with printing.busy("sites"):
        picture = images.load(image)
        height, width = picture.shape[-2:]
        found = lod.cortical_sites(point, budget, (height, width), patch, e0)
        images.save(drawing.footprints(picture, found, patch), path)
    if as_json:
        _print_json(
            {
                "verb": "cortical_sites",
                "input": str(image),
                "output": [str(path)],
                "patch": patch,
                "sites": found.tolist(),
            }
        )
    else:
        _wrote([path])


@app.command()
def patches(
    image: Picture,
    fixation: Fixation = "0.5,0.5",
    budget: Annotated[int, typer.Option(min=1, help="How many.")] = 273,
    patch: Annotated[int, typer.Option(min=1, help="Samples along a patch's side.")] = PATCH,
    e0: Eccentricity = 0.05,
    border: Annotated[Literal["clamp", "zero"], typer.Option(help="What is outside the picture.")] = "clamp",
    backend: Backend = "auto",
    device: Device = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Write the patches at the cortical sites of a picture as a contact sheet, each framed by its level's colour.

    They are in the order of the sites, as an encoder would read them; `sites` draws where they lie.
    """
    path = _path(image, "patches", output)
    point = _fixation(fixation)
    with _on(device), printing.busy("patches"):
        picture = images.load(image)
        height, width = picture.shape[-2:]
        found = lod.cortical_sites(point, budget, (height, width), patch, e0)
        arguments: dict[str, Any] = {"patch": patch, "border": border, "backend": _backend(backend, device)}
        choice = lod.explain(lod.gather_patches, picture, found, **arguments)
        gathered = lod.gather_patches(picture, found, **arguments)
        from gpu_lod import sheets

        about = f"{budget} patches of {patch} \N{MULTIPLICATION SIGN} {patch} samples about {point[0]:g}, {point[1]:g}"
        images.save(sheets.patches(gathered, found, image.stem, about), path)
    more = {"patch": patch, "sites": found.tolist()}
    _report("gather_patches", image, [path], [gathered], choice, as_json, more)


@app.command()
def cull(
    image: Picture,
    threshold: Annotated[
        float | None, typer.Option(help="Of the relevance, 0 to 1. (default: what a fifth of the patches reach)")
    ] = None,
    of: Annotated[
        Literal["saliency", "gradient"], typer.Option(help="What relevance is; gradient finds print on paper.")
    ] = "saliency",
    patch: Annotated[int, typer.Option(min=1, help="Pixels along the side of a patch, a texel of the map.")] = PATCH,
    boxes: Annotated[
        list[str] | None,
        typer.Option("--box", metavar="X0,Y0,X1,Y1", help="Also bound the relevance in this box; again for more."),
    ] = None,
    backend: Backend = "auto",
    device: Device = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Draw which patches of a picture are relevant enough, and the nodes of the Hi-Z pyramid that are pruned unseen.

    Boxes are fractions of width and height, y down. Their bounds, from four texels of a pyramid each, stand beside the
    largest and smallest values in them: where the upper bound is below the threshold, all of the box is pruned.
    """
    path = _path(image, "cull", output)
    areas = [_box(text) for text in boxes or []]
    with _on(device), printing.busy("cull"):
        picture = images.load(image)
        relevance = pooled(saliency(picture, "gradient" if of == "gradient" else "centre-surround"), patch)
        how: dict[str, Any] = {"backend": _backend(backend, device)}
        limit = float(np.quantile(relevance.numpy(), 1 - KEPT)) if threshold is None else threshold
        if threshold is None and not math.isfinite(limit):
            raise lod.errors.FileError(
                f"{image} holds NaN or infinities, and so does its relevance. Name a --threshold."
            )
        hz = lod.hiz(relevance, **how)
        choice = lod.explain(lod.cull, hz, limit, **how)
        culled = lod.cull(hz, limit, **how)
        from gpu_lod import sheets

        bounds = [sheets.bounds_of(relevance, hz, area, picture.shape[-2:], patch, how) for area in areas]
        about = f"{of}, threshold {limit:.3g}; {int(culled.mask.sum())} of {culled.mask.numel()} patches kept"
        images.save(sheets.culling(picture, relevance, culled, bounds, patch, image.stem, about), path)
    if not as_json:
        printing.show_culled(hz, culled, limit, bounds)
    more = {
        "threshold": limit if math.isfinite(limit) else str(limit),
        "kept": len(culled.indices),
        "pruned": len(culled.pruned),
        "tested": culled.tested,
        "texels": sum(level.numel() for level in hz.levels),
        "boxes": [asdict(bound) for bound in bounds],
    }
    _report("cull", image, [path], hz.levels, choice, as_json, more)


@app.command()
def allocate(
    image: Picture,
    name: Annotated[
        str,
        typer.Option("--with", metavar="NAME", help="An allocator, as `gpu_lod.allocate.names()` lists them, or all."),
    ] = "FoveatedPyramid",
    budget: Annotated[int, typer.Option(min=1, help="How many tokens.")] = 273,
    patch: Annotated[int, typer.Option(min=1, help="Samples along a patch's side.")] = PATCH,
    fixation: Annotated[str | None, typer.Option(metavar="X,Y", help="As for log-polar.", show_default=False)] = None,
    labels: Annotated[
        Path | None, typer.Option(help="A label map: a grey PNG or a .npy of integers.", show_default=False)
    ] = None,
    query: Annotated[
        Path | None, typer.Option(help="A query embedding: .npy or .safetensors.", show_default=False)
    ] = None,
    sites: Annotated[
        Path | None, typer.Option(help="Write sites and scores to this .json or .safetensors.", show_default=False)
    ] = None,
    with_patches: Annotated[bool, typer.Option("--patches", help="Write the patches too, in safetensors.")] = False,
    rebuilt: Annotated[
        Path | None, typer.Option(help="Write the rebuilt picture alone, pixel for pixel.", show_default=False)
    ] = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Draw the tokens that an allocator spends on a picture, beside the picture rebuilt from them alone.

    The drawing is out/NAME.allocate.ALLOCATOR.png if no -o says otherwise.

    With all, a contact sheet of every allocator, out/NAME.allocate.png: each is given what it takes of fixation, labels
    and query (FrequencyAware one of four numbers), and those that miss something are skipped. --sites and --rebuilt
    then write a file each, the name before the extension.
    """
    from gpu_lod import allocation, checks, token_files

    every = name == "all"
    checks.choice(name, "--with", [*lod.allocate.names(), "all"])
    path = _path(image, "allocate" if every else f"allocate.{name}", output)
    names = lod.allocate.names() if every else [name]
    _not_read(path, "--output", labels, query)
    for file, option in ((rebuilt, "--rebuilt"), (sites, "--sites")):
        for one in names if file is not None else []:
            assert file is not None
            _not_read(_of(file, one, every), option, image, labels, query)
    if rebuilt is not None:
        images.file_format(rebuilt)
        if path.resolve() in [_of(rebuilt, one, every).resolve() for one in names]:
            raise typer.BadParameter(f"{path} is the drawing's file (-o) too; name another.", param_hint="'--rebuilt'")
    if sites is not None:
        token_files.check_sites_path(sites, with_patches)
    elif with_patches:
        raise typer.BadParameter("the patches go into the file that --sites names.", param_hint="'--patches'")
    inputs = {
        "fixation": None if fixation is None else _fixation(fixation),
        "labels": None if labels is None else token_files.read_labels(labels),
        "query": None if query is None else token_files.read_query(query),
    }
    with printing.busy("allocate") as say:
        picture = images.load(image)
        results: list[allocation.Allocation | allocation.Skipped]
        if every:
            results = [
                replace(result, reason=as_options(result.reason)) if isinstance(result, allocation.Skipped) else result
                for result in allocation.run_all(picture, budget, patch, inputs, say)
            ]
        else:
            results = [allocation.run(name, picture, budget, patch, inputs)]
        from gpu_lod import token_sheet  # takes a second, which no error need wait for

        made = [result for result in results if isinstance(result, allocation.Allocation)]
        images.save(token_sheet.sheet(picture, results, budget, patch, image.stem), path)
        paths = [path]
        for result in made:
            files = [file and _of(file, result.name, every) for file in (sites, rebuilt)]
            if files[0] is not None:
                about = {"allocator": result.name, "image": str(image), "size": list(picture.shape[-2:])}
                token_files.write_sites(files[0], result.tokens, about, with_patches)
            if files[1] is not None:
                images.save(result.rebuilt.image, files[1])
            paths += [file for file in files if file is not None]
    if as_json:
        _print_json(
            {
                "verb": "allocate",
                "input": str(image),
                "output": [str(path) for path in paths],
                "budget": budget,
                "patch": patch,
                "allocators": [result.as_dict() for result in results],
            }
        )
    else:
        printing.show_allocations(results)
        _wrote(paths)


@app.command()
def report(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILES...", help="Result files of the benchmarks.", show_default=False)
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The page.")] = Path("out/report.html"),
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the README's tables, and write no page.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make one HTML page of benchmark results: times, floors, where GL loses and why; devices beside each other."""
    from gpu_lod.report import page, text
    from gpu_lod.report.files import load_all

    if markdown:
        tables = [text.markdown(path, Path()) for path, _ in load_all(files)]
        typer.echo("\n\n".join(tables))
        return
    with printing.busy("report"):
        page.report(files, output)
    if as_json:
        _print_json({"input": [str(path) for path in files], "output": [str(output)]})
    else:
        _wrote([output])


def _on(device: int | None) -> AbstractContextManager[Any]:
    """Run on that device; `with context` makes it the one that verbs use."""
    return nullcontext() if device is None else lod.Context(device)


def _backend(backend: str, device: int | None) -> Any:
    if device is None:
        return backend
    if backend == "torch":
        raise typer.BadParameter("a device is for the gl backend, not for torch.", param_hint="'--device'")
    return "gl"


def _fixation(text: str) -> tuple[float, float]:
    try:
        x, y = (float(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not X,Y, such as 0.5,0.5.", param_hint="'--fixation'") from None
    if not (0 <= x <= 1 and 0 <= y <= 1):
        raise typer.BadParameter(
            f"{text!r} is outside the picture; expected two fractions, 0 to 1.", param_hint="'--fixation'"
        )
    return x, y


def _box(text: str) -> tuple[float, float, float, float]:
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


def _path(image: Path, verb: str, output: Path | None) -> Path:
    """Where to write; an extension that cannot be written fails before any work."""
    path = Path("out") if output is None else output
    if path.is_dir() or not path.suffix:
        path = path / f"{image.stem}.{verb}.png"
    images.file_format(path)
    _not_read(path, "--output", image)
    return path


def _not_read(path: Path, option: str, *read: Path | None) -> None:
    """Raises BadParameter where a file that is read would be written over."""
    if path.resolve() in [file.resolve() for file in read if file is not None]:
        raise typer.BadParameter(f"{path} is read, and would be written over; name another.", param_hint=f"'{option}'")


def _of(file: Path, name: str, every: bool) -> Path:
    """An allocator's own file, where every allocator writes one."""
    return file.with_name(f"{file.stem}.{name}{file.suffix}") if every else file


def _report(
    verb: str, image: Path, paths: list[Path], results: Any, choice: Any, as_json: bool,
    more: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    if as_json:
        return _print_json(
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
    _wrote(paths)


def _renderer(results: Any) -> str | None:
    """Of the context that the results live in."""
    return context_for(*results).renderer


def _wrote(paths: list[Path]) -> None:
    for path in paths:
        typer.echo(f"wrote {path}")


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, allow_nan=False))
