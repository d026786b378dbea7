"""Commands that sample the pyramids of a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

import gpu_lod as lod
from gpu_lod import images
from gpu_lod.commands import options, printing
from gpu_lod.commands.app import app
from gpu_lod.commands.options import AsJson, Backend, Device, Eccentricity, Fixation, Output, Picture
from gpu_lod.saliency import PATCH


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
    e0: Annotated[
        float | None,
        typer.Option(help="Eccentricity of half magnification; only with cortical spacing. (default: 0.05)"),
    ] = None,
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
    path = options.output_path(image, "log-polar", output)
    paths = [path]
    back_path = path.with_name(f"{path.stem}.back{path.suffix}")
    if back:
        options.check_not_read(back_path, "--output", image)
    if e0 is not None and spacing != "cortical":
        raise typer.BadParameter("log rings have none; add --spacing cortical.", param_hint="'--e0'")
    points = options.point(fixation)
    with options.on(device), printing.busy("log-polar"):
        picture = images.load(image)
        place: dict[str, Any] = {
            "r_min": r_min, "r_max": r_max, "spacing": spacing, "e0": 0.05 if e0 is None else e0
        }  # fmt: skip
        how = {"backend": options.backend_for(backend, device)}
        arguments = {**place, **how, "border": border, "generator": generator}
        choice = lod.explain(lod.log_polar, picture, points, rings, wedges, **arguments)
        mapped = lod.log_polar(picture, points, rings, wedges, **arguments)
        images.save(mapped, path)
        if back:
            height, width = picture.shape[-2:]
            paths.append(back_path)
            images.save(lod.inverse_log_polar(mapped, points, (height, width), **place, **how), paths[-1])
    printing.show_made("log_polar", image, paths, [mapped], choice, as_json)


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
    from gpu_lod.commands import drawing
    from gpu_lod.foveate_tiles import level_map as levels_of

    path = options.output_path(image, "foveate", output)
    point = options.point(fixation)
    with options.on(device), printing.busy("foveate"):
        picture = images.load(image)
        arguments: dict[str, Any] = {
            "e0": e0, "bias": bias, "anisotropy": anisotropy, "backend": options.backend_for(backend, device)
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
    printing.show_made("foveate", image, [path], [seen], choice, as_json)


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
    from gpu_lod.commands import drawing

    path = options.output_path(image, "features", output)
    options.check_not_read(path, "--output", previous)
    point = options.point(fixation)
    with options.on(device), printing.busy("features"):
        arguments: dict[str, Any] = {
            "fixation": point,
            "previous": None if previous is None else images.load(previous),
            "backend": options.backend_for(backend, device),
        }
        picture = images.load(image)
        choice = lod.explain(lod.feature_maps, picture, **arguments)
        maps = lod.feature_maps(picture, **arguments)
        images.save(drawing.feature_grid(maps), path)
    printing.show_made("feature_maps", image, [path], [maps], choice, as_json)


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
    from gpu_lod.commands import drawing

    path = options.output_path(image, "sites", output)
    point = options.point(fixation)
    with printing.busy("sites"):
        picture = images.load(image)
        height, width = picture.shape[-2:]
        found = lod.cortical_sites(point, budget, (height, width), patch, e0)
        images.save(drawing.footprints(picture, found, patch), path)
    if as_json:
        printing.print_json(
            {
                "verb": "cortical_sites",
                "input": str(image),
                "output": [str(path)],
                "patch": patch,
                "sites": found.tolist(),
            }
        )
    else:
        printing.show_written([path])


@app.command()
def patches(
    image: Picture,
    fixation: Fixation = "0.5,0.5",
    budget: Annotated[int, typer.Option(min=1, help="How many.")] = 273,
    patch: Annotated[int, typer.Option(min=1, help="Samples along a patch's side.")] = PATCH,
    e0: Eccentricity = 0.05,
    border: Annotated[Literal["clamp", "zero"], typer.Option(help="What is outside the picture.")] = "clamp",
    bias: Annotated[float, typer.Option(help="Added to the level that is read: below 0 is sharper.")] = 0.0,
    backend: Backend = "auto",
    device: Device = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Write the patches at the cortical sites of a picture as a contact sheet, each framed by its level's colour.

    They are in the order of the sites, as an encoder would read them; `sites` draws where they lie.
    """
    path = options.output_path(image, "patches", output)
    point = options.point(fixation)
    with options.on(device), printing.busy("patches"):
        picture = images.load(image)
        height, width = picture.shape[-2:]
        found = lod.cortical_sites(point, budget, (height, width), patch, e0)
        arguments: dict[str, Any] = {"patch": patch, "border": border, "bias": bias}
        arguments["backend"] = options.backend_for(backend, device)
        choice = lod.explain(lod.gather_patches, picture, found, **arguments)
        gathered = lod.gather_patches(picture, found, **arguments)
        from gpu_lod.commands import sheets

        about = f"{budget} patches of {patch} \N{MULTIPLICATION SIGN} {patch} samples about {point[0]:g}, {point[1]:g}"
        images.save(sheets.patches(gathered, found, image.stem, about), path)
    more = {"patch": patch, "sites": found.tolist()}
    printing.show_made("gather_patches", image, [path], [gathered], choice, as_json, more)
