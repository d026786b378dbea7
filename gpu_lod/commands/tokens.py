"""Commands that choose what of a picture is worth looking at."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer

import gpu_lod as lod
from gpu_lod import images
from gpu_lod.commands import options, printing
from gpu_lod.commands.app import app, as_options
from gpu_lod.commands.options import AsJson, Backend, Device, Output, Picture
from gpu_lod.patch_grid import pooled
from gpu_lod.saliency import PATCH, saliency

KEPT = 0.2
"""Share of the patches that `cull` keeps where no threshold is given."""


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
    path = options.output_path(image, "cull", output)
    areas = [options.box(text) for text in boxes or []]
    with options.on(device), printing.busy("cull"):
        picture = images.load(image)
        relevance = pooled(saliency(picture, "gradient" if of == "gradient" else "centre-surround"), patch)
        how: dict[str, Any] = {"backend": options.backend_for(backend, device)}
        limit = float(np.quantile(relevance.numpy(), 1 - KEPT)) if threshold is None else threshold
        if threshold is None and not math.isfinite(limit):
            raise lod.errors.FileError(
                f"the relevance of {image} is not finite: it holds NaN, infinities, or values that are too large. Name "
                "a --threshold."
            )
        hz = lod.hiz(relevance, **how)
        choice = lod.explain(lod.cull, hz, limit, **how)
        culled = lod.cull(hz, limit, **how)
        from gpu_lod.commands import sheets

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
    printing.show_made("cull", image, [path], hz.levels, choice, as_json, more)


@app.command()
def allocate(
    image: Picture,
    name: Annotated[
        str,
        typer.Option("--with", metavar="NAME", help="An allocator, as `gpu_lod.allocate.names()` lists them, or all."),
    ] = "FoveatedPyramid",
    budget: Annotated[int, typer.Option(min=1, help="How many tokens.")] = 273,
    patch: Annotated[int, typer.Option(min=1, help="Samples along a patch's side.")] = PATCH,
    fixation: options.OptionalFixation = None,
    labels: Annotated[
        Path | None, typer.Option(help="A label map: a grey PNG or a .npy of integers.", show_default=False)
    ] = None,
    query: Annotated[
        Path | None, typer.Option(help="A query embedding: .npy or .safetensors.", show_default=False)
    ] = None,
    bias: Annotated[float, typer.Option(help="Of the levels that patches are read at: below 0 is sharper.")] = 0.0,
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
    and query (FrequencyAware one of four numbers), blends no bias, and those that miss something are skipped. --sites
    and --rebuilt then write a file each, the name before the extension.
    """
    from gpu_lod import checks, token_files
    from gpu_lod.commands import allocation

    every = name == "all"
    checks.choice(name, "--with", [*lod.allocate.names(), "all"])
    checks.number(bias, "--bias")
    path = options.output_path(image, "allocate" if every else f"allocate.{name}", output)
    names = lod.allocate.names() if every else [name]
    options.check_not_read(path, "--output", labels, query)
    for file, option in ((rebuilt, "--rebuilt"), (sites, "--sites")):
        for one in names if file is not None else []:
            assert file is not None
            options.check_not_read(_of(file, one, every), option, image, labels, query)
    if rebuilt is not None:
        images.file_format(rebuilt)
        if options.same_file(path, *(_of(rebuilt, one, every) for one in names)):
            raise typer.BadParameter(f"{path} is the drawing's file (-o) too; name another.", param_hint="'--rebuilt'")
    if sites is not None:
        token_files.check_sites_path(sites, with_patches)
    elif with_patches:
        raise typer.BadParameter("the patches go into the file that --sites names.", param_hint="'--patches'")
    inputs = {
        "fixation": None if fixation is None else options.point(fixation),
        "labels": None if labels is None else token_files.read_labels(labels),
        "query": None if query is None else token_files.read_query(query),
        "bias": bias,
    }
    with printing.busy("allocate") as say:
        picture = images.load(image)
        results: list[allocation.Allocation | allocation.Skipped]
        if every:
            results = [
                replace(result, reason=as_options(result.reason, "allocate"))
                if isinstance(result, allocation.Skipped)
                else result
                for result in allocation.run_all(picture, budget, patch, inputs, say)
            ]
        else:
            results = [allocation.run(name, picture, budget, patch, inputs)]
        from gpu_lod.commands import token_sheet  # takes a second, which no error need wait for

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
        printing.print_json(
            {
                "verb": "allocate",
                "input": str(image),
                "output": [str(path) for path in paths],
                "budget": budget,
                "patch": patch,
                "bias": bias,
                "allocators": [result.as_dict() for result in results],
            }
        )
    else:
        printing.show_allocations(results)
        printing.show_written(paths)


def _of(file: Path, name: str, every: bool) -> Path:
    """An allocator's own file, where every allocator writes one."""
    return file.with_name(f"{file.stem}.{name}{file.suffix}") if every else file
