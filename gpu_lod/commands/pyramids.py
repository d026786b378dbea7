"""Commands that write the pyramids of a picture."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
import typer

import gpu_lod as lod
from gpu_lod import checks, images
from gpu_lod.commands import options, printing
from gpu_lod.commands.app import app
from gpu_lod.commands.options import AsJson, Backend, Device, Output, Picture
from gpu_lod.patch_grid import pooled
from gpu_lod.pyramid import burt_sizes
from gpu_lod.saliency import PATCH, colour, luma, saliency


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
    path = options.output_path(image, "mipmap", output)

    def make(picture: torch.Tensor) -> tuple[Any, lod.Pyramid]:
        arguments: dict[str, Any] = {"levels": levels, "reduce": reduce, "generator": generator}
        arguments["backend"] = options.backend_for(backend, device)
        return lod.explain(lod.mipmap, picture, **arguments), lod.mipmap(picture, **arguments)

    with options.on(device), printing.busy("mipmap"):
        choice, pyramid = make(images.load(image))
        if separate:
            paths = [path.with_name(f"{path.stem}.{level}{path.suffix}") for level in range(len(pyramid))]
            for one in paths:
                options.check_not_read(one, "--output", image)
            for level, one in zip(pyramid, paths, strict=True):
                images.save(level, one)
        else:
            paths = [path]
            images.save(images.atlas(pyramid.levels), path)
    printing.show_made("mipmap", image, paths, pyramid.levels, choice, as_json)


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
    path = options.output_path(image, "hiz", output)
    with options.on(device), printing.busy("hiz"):
        picture = images.load(image)
        values = luma(picture) if of == "luma" else pooled(saliency(picture), PATCH)
        arguments: dict[str, Any] = {
            "reduce": reduce,
            "generator": generator,
            "backend": options.backend_for(backend, device),
        }
        choice = lod.explain(lod.hiz, values, **arguments)
        pyramid = lod.hiz(values, **arguments)
        drawn = images.atlas(pyramid.levels)
        if of == "saliency":
            drawn = drawn.repeat_interleave(PATCH, -1).repeat_interleave(PATCH, -2)
        images.save(drawn, path)
    printing.show_made("hiz", image, [path], pyramid.levels, choice, as_json)


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
    path = options.output_path(image, "laplacian", output)
    checks.number(gain, "--gain")
    back_path = path.with_name(f"{path.stem}.back{path.suffix}")
    if back:
        options.check_not_read(back_path, "--output", image)
    with options.on(device), printing.busy("laplacian"):
        picture = images.load(image)
        arguments: dict[str, Any] = {"levels": levels, "backend": options.backend_for(backend, device)}
        choice = lod.explain(lod.laplacian, picture, **arguments)
        pyramid = lod.laplacian(picture, **arguments)
        white = 255.0 if picture.dtype == torch.uint8 else 1.0
        bands = [(white / 2 + gain * band.float()) for band in pyramid.levels[:-1]]
        drawn = images.atlas([*bands, pyramid[-1].float()], background=white / 2).clamp(0, white)
        whole = picture.dtype == torch.uint8
        images.save(drawn.round().byte() if whole else drawn.to(picture.dtype), path)
        paths = [path]
        if back:
            paths.append(back_path)
            again = lod.collapse(pyramid, arguments["backend"])
            images.save(again.round().clamp(0, 255).byte() if whole else again.to(picture.dtype), paths[-1])
    printing.show_made("laplacian", image, paths, pyramid.levels, choice, as_json)


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
    path = options.output_path(image, "gaussian", output)
    with options.on(device), printing.busy("gaussian"):
        picture = images.load(image)
        arguments: dict[str, Any] = {"levels": levels, "backend": options.backend_for(backend, device)}
        choice = lod.explain(lod.gaussian, picture, **arguments)
        pyramid = lod.gaussian(picture, **arguments)
        images.save(images.atlas(pyramid.levels), path)
    printing.show_made("gaussian", image, [path], pyramid.levels, choice, as_json)


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
    path = options.output_path(image, "energy", output)
    with options.on(device), printing.busy("energy"):
        picture = colour(images.load(image))
        full = len(burt_sizes(*picture.shape[-2:]))
        arguments: dict[str, Any] = {
            "levels": min(4, full) if levels is None else levels, "backend": options.backend_for(backend, device)
        }  # fmt: skip
        choice = lod.explain(lod.oriented_energy, picture, **arguments)
        energies = lod.oriented_energy(picture, **arguments)
        from gpu_lod.commands import sheets

        least = sheets.noise_of(picture)
        found = sheets.shares(energies, least)
        images.save(sheets.energy(energies, image.stem, least), path)
    if not as_json:
        printing.show_energies(energies, found)
    printing.show_made("oriented_energy", image, [path], energies, choice, as_json, {"shares": found})
