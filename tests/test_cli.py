"""The command line, as a subprocess: what it writes, what it prints, how it fails."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scripts
import torch
from command_line import cat, done, refused, run
from PIL import Image

import gpu_lod as lod
from gpu_lod import demo
from gpu_lod.commands import as_options, drawing, lettering, printing, sheets
from gpu_lod.demo import panels
from gpu_lod.images import atlas, load, save
from gpu_lod.saliency import luma

NO_EGL = {"GPU_LOD_LIBEGL": "/nonexistent.so"}


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    return cat(tmp_path)


# -- what the commands do ---------------------------------------------------------------------------------------------


def test_as_a_module(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gpu_lod.cli"]
    for argument, code, stdout, stderr in (
        ("--version", 0, f"gpu-lod {lod.__version__}\n", ""),
        ("mipmap none.png", 1, "", "gpu-lod: none.png does not exist.\n"),
    ):
        result = subprocess.run(
            [*command, *argument.split()], cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert (result.returncode, result.stdout, result.stderr) == (code, stdout, stderr)


def test_help_and_version(tmp_path: Path) -> None:
    assert done(tmp_path, "--version") == f"gpu-lod {lod.__version__}\n"
    text = done(tmp_path, "--help")
    verbs = ("mipmap", "hiz", "gaussian", "laplacian", "energy", "log-polar", "foveate", "features", "sites", "patches")
    for command in ("info", "doctor", "demo", *verbs, "cull"):
        assert command in text


def test_info(tmp_path: Path) -> None:
    found = json.loads(done(tmp_path, "info", "--json"))
    assert found["gpu_lod"] == lod.__version__
    device = next(device for device in found["devices"] if device["default"])
    assert device["renderer"] and device["limits"]["texture_size"] >= 1024
    assert device["extensions"]["GL_ARB_buffer_storage"] in (True, False)
    assert device["renderer"] in done(tmp_path, "info")


def test_doctor(tmp_path: Path) -> None:
    found = json.loads(done(tmp_path, "doctor", "--json"))
    status = {finding["name"]: finding["status"] for finding in found["findings"]}
    assert found["ok"]
    assert status["EGL library"] == "ok"
    assert any(name.startswith("host bridge") and value == "ok" for name, value in status.items())
    assert "CUDA" in status


def test_doctor_without_egl_says_what_to_install(tmp_path: Path) -> None:
    result = run(tmp_path, "doctor", env=NO_EGL)
    assert result.returncode == 1
    assert "apt-get install libegl1 libgl1-mesa-dri" in result.stdout
    assert "torch" in result.stdout and "CUDA" in result.stdout
    assert result.stderr.startswith("gpu-lod: 1 of ")


def test_demo(tmp_path: Path, picture: Path) -> None:
    found = json.loads(done(tmp_path, "demo", "cat.png", "-o", "there", "--fixation", "0.3,0.6", "--json"))
    verbs = {(row["verb"], row["generator"]) for row in found["rows"]}
    assert {
        ("mipmap", "compute"),
        ("mipmap", "single-pass"),
        ("hiz", "registers"),
        ("hiz", "fragment"),
        ("log_polar", "compute"),
        ("cull", "descent"),
    } <= verbs
    assert all(row["ok"] and row["gl_ms"] > 0 and row["torch_ms"] > 0 for row in found["rows"])
    assert found == json.loads((tmp_path / "there" / "table.json").read_text())
    with Image.open(tmp_path / "there" / "cat.png") as sheet:
        assert sheet.width > 1500


@pytest.mark.parametrize("size", [(3, 60, 85), (2, 1, 1)])
def test_the_demo_shows_what_is_seen_and_spent(tmp_path: Path, size: tuple[int, int, int]) -> None:
    image, fixation = torch.rand(size), (0.3, 0.6)
    sheet = demo.sheet(demo.Picture("noise", image, fixation, "centre-surround"), lod.Context())
    assert torch.equal(sheet.foveated.image, lod.foveate(lod.mipmap(image, backend="gl"), fixation, backend="gl"))
    tokens = sheet.tokens.chosen
    cells = -(-size[1] // 14) * -(-size[2] // 14)
    assert tokens.budget == min(273, cells) and float(sheet.tokens.rebuilt.coverage) == 1
    assert sheet.tokens.psnr > 20
    titles = [panel.title for panel in panels.panels(sheet)]
    assert titles[-3:] == ["Foveated", f"{cells} token{'s' * (cells > 1)}", "Rebuilt"]
    importlib.import_module("gpu_lod.demo.sheet").draw(sheet, tmp_path / "sheet.png")
    assert load(tmp_path / "sheet.png").shape[0] in (3, 4)


def test_the_demo_compares_pictures_of_any_range(tmp_path: Path) -> None:
    """By tolerances as many times larger; NaN cannot be compared."""
    values = torch.rand(1, 30, 40) * 1000
    save(values, tmp_path / "bright.tiff")
    [bright] = demo.pictures(tmp_path / "bright.tiff")
    rows = demo.rows._mipmap("bright", bright.image, lod.Context())
    assert all(row.ok and row.tolerance > 1e-3 for row in rows)
    values[0, 3, 4] = math.nan
    save(values, tmp_path / "hole.tiff")
    with pytest.raises(lod.errors.FileError, match="holds NaN or infinities"):
        demo.pictures(tmp_path / "hole.tiff")


def test_laplacian(tmp_path: Path, picture: Path) -> None:
    found = json.loads(done(tmp_path, "laplacian", "cat.png", "--levels", "3", "--gain", "2", "--json"))
    assert found["output"] == ["out/cat.laplacian.png"] and found["backend"] == "torch"
    pyramid = lod.laplacian(load(picture), 3)
    bands = [(127.5 + 2 * band).clamp(0, 255) for band in pyramid.levels[:-1]]
    expected = atlas([*bands, pyramid[-1]], background=127.5).clamp(0, 255).round().byte()
    assert torch.equal(load(tmp_path / "out" / "cat.laplacian.png"), expected)


def test_mipmap(tmp_path: Path, picture: Path) -> None:
    assert done(tmp_path, "mipmap", "cat.png") == "wrote out/cat.mipmap.png\n"
    image = load(picture)
    expected = lod.mipmap(image, backend="torch")
    assert torch.equal(load(tmp_path / "out" / "cat.mipmap.png"), atlas(expected.levels))

    options = ("--levels", "3", "--reduce", "max", "--generator", "compute", "--separate", "-o", "a/b/x.tiff")
    found = json.loads(done(tmp_path, "mipmap", "cat.png", *options, "--json"))
    assert found["output"] == [f"a/b/x.{level}.tiff" for level in range(3)]
    assert (found["backend"], found["generator"]) == ("gl", "compute")
    assert found["renderer"]
    for path, level in zip(found["output"], lod.mipmap(image, 3, "max", backend="torch"), strict=True):
        assert torch.equal(load(tmp_path / path), level)


def test_hiz(tmp_path: Path, picture: Path) -> None:
    found = json.loads(done(tmp_path, "hiz", "cat.png", "--generator", "compute", "--json"))
    image = load(picture)
    assert found["output"] == ["out/cat.hiz.png"]
    expected = atlas(lod.hiz(luma(image), backend="torch").levels)
    assert torch.equal(load(tmp_path / "out" / "cat.hiz.png"), expected)

    done(tmp_path, "hiz", "cat.png", "--of", "saliency", "-o", "s.png")
    drawn = load(tmp_path / "s.png")
    assert drawn.dtype == torch.float32
    assert drawn.shape == (1, 2 * 14, (3 + 1) * 14)


def test_log_polar(tmp_path: Path, picture: Path) -> None:
    options: tuple[str, ...] = (
        "--fixation",
        "0.25,0.5",
        "--rings",
        "9",
        "--wedges",
        "20",
        "--r-max",
        "0.5",
        "--border",
        "zero",
    )
    found = json.loads(done(tmp_path, "log-polar", "cat.png", *options, "--spacing", "cortical", "--json"))
    assert found["verb"] == "log_polar"
    expected = lod.log_polar(
        load(picture), (0.25, 0.5), 9, 20, r_max=0.5, spacing="cortical", border="zero", backend="torch"
    )
    assert found["shapes"] == [[3, 9, 20]]
    assert torch.equal(load(tmp_path / "out" / "cat.log-polar.png"), expected)

    found = json.loads(done(tmp_path, "log-polar", "cat.png", *options, "--back", "-o", "there.png", "--json"))
    mapped = lod.log_polar(load(picture), (0.25, 0.5), 9, 20, r_max=0.5, border="zero", backend="torch")
    seen = lod.inverse_log_polar(mapped, (0.25, 0.5), tuple(load(picture).shape[-2:]), r_max=0.5, backend="torch")
    assert found["output"] == ["there.png", "there.back.png"]
    assert torch.equal(load(tmp_path / "there.png"), mapped)
    assert torch.equal(load(tmp_path / "there.back.png"), seen)

    options += ("--spacing", "cortical", "--device", "0", "-o", "gl.png")
    found = json.loads(done(tmp_path, "log-polar", "cat.png", *options, "--json"))
    assert (found["backend"], found["output"]) == ("gl", ["gl.png"])  # a device implies it
    # Within a count, and one more where texture units weigh with 8 bits.
    assert (load(tmp_path / "gl.png").int() - expected.int()).abs().max() <= 2


def test_foveate(tmp_path: Path, picture: Path) -> None:
    options = ("--fixation", "0.25,0.5", "--e0", "0.1", "--bias", "0.5")
    found = json.loads(done(tmp_path, "foveate", "cat.png", *options, "--no-map", "--json"))
    image = load(picture)
    expected = lod.foveate(image, (0.25, 0.5), e0=0.1, bias=0.5, backend="torch")
    assert found["shapes"] == [list(image.shape)]
    assert torch.equal(load(tmp_path / "out" / "cat.foveate.png"), expected)

    done(tmp_path, "foveate", "cat.png", *options, "-o", "map.png")
    drawn = load(tmp_path / "map.png")
    height, width = image.shape[-2:]
    assert torch.equal(drawn[:3, :, :width], expected[:3])  # the picture, pixel for pixel
    assert drawn.shape[1] == height and drawn.shape[2] > 2 * width
    near, far = (drawn[:, height // 2, drawn.shape[2] // 2 + at].int() for at in (-width // 4, width // 4))
    assert (near - far).abs().max() > 20  # another level, another colour


def test_features(tmp_path: Path, picture: Path) -> None:
    found = json.loads(done(tmp_path, "features", "cat.png", "--backend", "torch", "--json"))
    height, width = load(picture).shape[-2:]
    assert found["shapes"] == [[40, height, width]]
    still = load(tmp_path / "out" / "cat.features.png")
    assert still.shape[0] == 3 and still.shape[2] > 6 * 120
    image = load(picture)
    save(255 - image if image.shape[0] in (1, 3) else image.flip(-1), tmp_path / "before.png")
    done(tmp_path, "features", "cat.png", "--previous", "before.png", "-o", "moved.png")
    assert not torch.equal(load(tmp_path / "moved.png"), still)
    assert drawing.labels()[5] == "saliency" and drawing.labels()[39] == "blue - yellow" and len(drawing.labels()) == 40


def test_pictures_of_any_numbers(tmp_path: Path) -> None:
    """JSON has none for what is no number, and a drawing no shade."""
    values = np.random.default_rng(0).random((40, 50), dtype=np.float32)
    values[3, 3], values[30, 20], values[9, 9] = math.inf, math.nan, 3e38
    Image.fromarray(values).save(tmp_path / "any.tif")
    done(tmp_path, "features", "any.tif")
    assert np.isfinite(json.loads(done(tmp_path, "energy", "any.tif", "--json"))["shares"]).all()
    found = json.loads(done(tmp_path, "cull", "any.tif", "--threshold", "0.5", "--box", "0,0,1,1", "--json"))
    assert found["boxes"][0]["upper"] is None
    refused(tmp_path, ("cull any.tif", 1, "infinities, or values that are too large. Name a --threshold."))


def test_energies_of_the_largest_numbers_have_shares() -> None:
    level = torch.tensor([3e38, 1e38, 0, 0]).view(1, 4, 1, 1).expand(1, 4, 5, 5)
    assert sheets.shares([level], 1.0)[0] == pytest.approx([0.75, 0.25, 0, 0])
    assert int(sheets.energy([level], "large", 1.0).max()) > 200
    level = level.where(level > 0, math.inf)
    assert np.isfinite(sheets.shares([level], 1.0)).all()


@pytest.mark.parametrize("name", ["two\nlines", "\udcffbytes"])
def test_names_of_files_are_drawn_in_a_line(name: str, tmp_path: Path) -> None:
    cat(tmp_path).rename(tmp_path / f"{name}.png")
    for command in (["energy"], ["sites"], ["allocate", "--budget", "4", "--patch", "8"]):
        done(tmp_path, *command, f"{name}.png", "-o", "drawn.png")
    assert lettering.fitted(name, lettering.font(lettering.NAME), 1e4) in ("two lines", "?bytes")


def test_nothing_is_printed_where_stdout_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then Python has none."""
    monkeypatch.setattr(sys, "stdout", None)
    printing.show_removed([Path("one")])
    printing.show_info([])


def test_feature_maps_of_a_strip_are_no_taller_than_a_page(tmp_path: Path) -> None:
    save(torch.rand(3, 3000, 1), tmp_path / "strip.png")
    done(tmp_path, "features", "strip.png", "--backend", "torch")
    assert max(load(tmp_path / "out" / "strip.features.png").shape) < 2**13


def test_sites(tmp_path: Path, picture: Path) -> None:
    found = json.loads(done(tmp_path, "sites", "cat.png", "--budget", "20", "--patch", "4", "--json"))
    height, width = load(picture).shape[-2:]
    expected = lod.cortical_sites((0.5, 0.5), 20, (height, width), 4)
    assert torch.equal(torch.tensor(found["sites"]), expected)
    assert done(tmp_path, "sites", "cat.png", "-o", "all.png") == "wrote all.png\n"
    drawn, plain = load(tmp_path / "all.png"), load(picture)
    assert drawn.shape[1] % plain.shape[1] == 0 and drawn.shape[1] >= plain.shape[1]


def test_circles_are_as_wide_as_patches() -> None:
    image = torch.full((3, 100, 160), 128, dtype=torch.uint8)
    page = drawing.footprints(image, torch.tensor([[0.5, 0.5, 2.0]]), 8)
    times = page.shape[-1] // 160
    background = page[:, 0, 0]
    row = (page[:, page.shape[1] // 2] != background[:, None]).any(0).nonzero()[:, 0] - page.shape[2] / 2
    assert abs(float(row.max()) - 16 * times) <= 3 and abs(float(row.min()) + 16 * times) <= 3
    inside = row[row.abs() < 15 * times]
    assert len(inside) and float(inside.abs().max()) < 3 * times  # the centre's dot alone


def test_exif_alpha_and_16_bits_get_through(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: stored on its side
    rgba = np.random.default_rng(0).integers(0, 256, (10, 20, 4), dtype=np.uint8)
    Image.fromarray(rgba).save(tmp_path / "turned.png", exif=exif)
    done(tmp_path, "mipmap", "turned.png", "--levels", "1", "-o", "upright.png")
    upright = np.rot90(rgba, -1)
    assert np.array_equal(load(tmp_path / "upright.png").permute(1, 2, 0).numpy(), upright)

    deep = np.array([[0, 40000], [300, 65535]], dtype=np.uint16)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    done(tmp_path, "mipmap", "deep.png", "--levels", "1", "-o", "deep2.png")
    assert np.array_equal(np.array(Image.open(tmp_path / "deep2.png")), deep)


def test_calibrate(tmp_path: Path) -> None:
    env = {"GPU_LOD_CACHE": str(tmp_path / "cache")}
    text = done(tmp_path, "calibrate", "--quick", "--verbs", "region_max,hiz", env=env)
    [path] = (tmp_path / "cache" / "calibration").glob("*.json")
    assert "region_max" in text and "gl (" in text and text.endswith(f"wrote {path}\n")
    shown = done(tmp_path, "calibrate", "--show", env=env)
    assert f"calibrated: {path}" in shown and "seed: " in shown and shown.index("calibrated") < shown.index("seed")
    tables = json.loads(done(tmp_path, "calibrate", "--show", "--json", env=env))
    assert [table["path"] for table in tables][:2] == [str(path), None]
    assert [entry["verb"] for entry in tables[0]["entries"]] == ["hiz", "region_max"]
    words = ("--quick", "--minutes", "0.5", "--verbs", "cull", "--tensors", "cpu", "--json")
    again = json.loads(done(tmp_path, "calibrate", *words, env=env))
    assert again["written"] == [str(path)] and again["left_out"] == []
    assert [entry["verb"] for entry in json.loads(path.read_text())["entries"]] == ["cull", "hiz", "region_max"]
    assert done(tmp_path, "calibrate", "--reset", env=env) == f"removed {path}\n"
    assert done(tmp_path, "calibrate", "--reset", env=env) == "nothing was calibrated here\n"
    assert "calibrated: " not in done(tmp_path, "calibrate", "--show", env=env)


def test_calibrate_keeps_what_was_measured_before_ctrl_c(tmp_path: Path) -> None:
    code = """
        import contextlib, os, signal, sys
        from gpu_lod import cli
        from gpu_lod.commands import printing
        signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have background jobs ignore it
        @contextlib.contextmanager
        def progress():
            yield lambda number, of, what: number == 1 and os.kill(os.getpid(), signal.SIGINT)
        printing.progress = progress
        sys.argv = ["gpu-lod", "calibrate", "--quick", "--verbs", "region_max,hiz,cull"]
        cli.main()
    """
    result = scripts.run(code, GPU_LOD_CACHE=str(tmp_path))
    assert (result.returncode, result.stderr) == (130, "")
    [path] = (tmp_path / "calibration").glob("*.json")
    assert f"wrote {path}" in result.stdout
    assert [entry["verb"] for entry in json.loads(path.read_text())["entries"]] == ["region_max"]


# -- how they fail ----------------------------------------------------------------------------------------------------


def test_bad_files(tmp_path: Path, picture: Path) -> None:
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "cut.png").write_bytes(picture.read_bytes()[:-900])
    refused(
        tmp_path,
        ("mipmap text.png", 1, "text.png is not a PNG"),
        ("log-polar cut.png", 1, "truncated"),
        ("hiz none.png", 1, "does not exist"),
        ("demo .", 1, "is a directory"),
    )


def test_output_to_a_folder(tmp_path: Path, picture: Path) -> None:
    """One that is there, whatever its name, or is made: one without an extension, or with a slash behind it."""
    (tmp_path / "v1.2").mkdir()
    for folder in ("v1.2", "new/below", "v1.3/"):
        assert done(tmp_path, "sites", "cat.png", "-o", folder) == f"wrote {Path(folder)}/cat.sites.png\n"
        assert (tmp_path / folder / "cat.sites.png").stat().st_size


def test_output_that_cannot_be_written(tmp_path: Path, picture: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(
        tmp_path,
        ("mipmap cat.png -o file/x.png", 1, "cannot be written"),
        ("hiz cat.png -o x.gif", 1, "the choices are .png"),
        ("demo cat.png -o file", 1, "cannot be written to"),
        ("sites cat.png -o -", 2, "'-' is no file"),
    )


def test_errors_name_options(tmp_path: Path, picture: Path) -> None:
    """The library's own name arguments of Python."""
    refused(
        tmp_path,
        ("log-polar cat.png --spacing cortical --r-min 0.02", 2, "or use --spacing log."),
        ("mipmap cat.png --generator compute --backend torch", 1, "--backend torch has none: leave it out."),
        ("mipmap cat.png --generator driver --reduce max", 1, "Use --generator compute or --generator fragment."),
        ("allocate cat.png --patch 4 --budget 5 --with GridTopK --fixation 0.2,0.2", 2, "Leave --fixation out."),
    )


def test_files_are_no_options() -> None:
    for text, expected in (
        ("pass patch=14, or labels=.", "pass --patch 14, or --labels."),
        ("device=3.png does not exist", None),
        ("a/budget=3.png, and out/patch=.json", None),
    ):
        assert as_options(text, "allocate") == (expected or text)
    assert as_options("Use backend='torch'.", "foveate") == "Use --backend torch."
    for command in ("demo", "", "none"):
        assert as_options("Use backend='torch'.", command) == "Use backend='torch'."


def test_bad_options(tmp_path: Path, picture: Path) -> None:
    refused(
        tmp_path,
        ("log-polar cat.png --fixation 2,0.5", 2, "'--fixation': '2,0.5'"),
        ("log-polar cat.png --fixation nan,0", 2, "'--fixation': 'nan,0'"),
        ("log-polar cat.png --fixation middle", 2, "'--fixation': 'middle'"),
        ("foveate cat.png --anisotropy 17", 2, "'--anisotropy'"),
        ("foveate cat.png --e0 0", 2, "e0 is 0"),
        ("sites cat.png --budget 0", 2, "'--budget'"),
        ("mipmap cat.png --generator fast", 2, "'fast' is not one of 'auto'"),
        ("mipmap cat.png --levels 99", 2, "levels is 99"),
        ("hiz cat.png --device 99", 2, "there is no EGL device 99"),
        ("laplacian cat.png --gain inf", 2, "--gain is inf"),
        ("log-polar cat.png --e0 0.1", 2, "add --spacing cortical"),
        ("report cat.png --markdown -o page.html", 2, "leave -o and --json out"),
        ("calibrate --show --verbs mipmap", 2, "leave --verbs out"),
        ("calibrate --show --reset", 2, "leave --show and --verbs out"),
    )
    assert not (tmp_path / "out").exists()


def test_calibrate_where_nothing_can_be_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    arguments = ("calibrate", "--quick", "--verbs", "region_max")
    result = run(tmp_path, *arguments, env={"GPU_LOD_CACHE": str(tmp_path / "file")})
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("gpu-lod: ") and "Set GPU_LOD_CACHE to a folder" in result.stderr
    refused(
        tmp_path,
        ("calibrate --verbs mipmaps", 2, "there is no mipmaps to measure; expected collapse"),
        ("calibrate --verbs=", 2, "expected collapse"),
        ("calibrate --minutes 0", 2, "--minutes"),
        ("calibrate --verbs mipmaps --json", 2, "expected collapse"),
        ("calibrate --minutes nan", 2, "--minutes"),
        ("calibrate --tensors gpu", 2, "--tensors"),
        env={"GPU_LOD_CACHE": str(tmp_path)},
    )


def test_no_egl(tmp_path: Path, picture: Path) -> None:
    refused(tmp_path, ("mipmap cat.png --backend gl", 1, "no EGL on this machine"), env=NO_EGL)
    done(tmp_path, "mipmap", "cat.png", env=NO_EGL)  # torch needs none


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    result = run(tmp_path, "mipmap", "none.png", "--debug")
    assert result.returncode == 1
    assert "Traceback" in result.stderr and "FileError" in result.stderr


def test_without_the_cli_extra() -> None:
    code = "import sys; sys.modules['typer'] = None; sys.argv[1:] = ['info']; from gpu_lod.cli import main; main()"
    result = scripts.run(code)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "gpu-lod: the command line needs extra packages; in the checkout: pip install '.[cli]'\n"


# -- what the pictures are made of ------------------------------------------------------------------------------------
