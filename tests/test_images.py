"""Picture files to tensors and back."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from gpu_lod.errors import FileError, GpuLodError, InputError
from gpu_lod.images import atlas, atlas_offsets, file_format, load, save


def _random(channels: int, height: int = 5, width: int = 7) -> torch.Tensor:
    seed = torch.Generator().manual_seed(channels)
    return torch.randint(0, 256, (channels, height, width), dtype=torch.uint8, generator=seed)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("extension", [".png", ".tif", ".TIFF"])
def test_every_number_of_channels_comes_back_exactly(tmp_path: Path, channels: int, extension: str) -> None:
    image = _random(channels)
    save(image, tmp_path / f"x{extension}")
    found = load(tmp_path / f"x{extension}")
    assert found.dtype == torch.uint8
    assert torch.equal(found, image)


def test_webp_is_lossless_and_has_no_grey(tmp_path: Path) -> None:
    for channels in (3, 4):
        save(_random(channels), tmp_path / "x.webp")
        assert torch.equal(load(tmp_path / "x.webp"), _random(channels))
    save(_random(1), tmp_path / "x.webp")
    assert torch.equal(load(tmp_path / "x.webp"), _random(1).expand(3, -1, -1))


@pytest.mark.parametrize("channels", [1, 3])
def test_jpeg_comes_back_nearly(tmp_path: Path, channels: int) -> None:
    ramp = torch.arange(48, dtype=torch.float32).mul(5).expand(channels, 32, 48).to(torch.uint8)
    save(ramp, tmp_path / "x.jpg")
    found = load(tmp_path / "x.jpg")
    assert found.shape == ramp.shape
    assert (found.int() - ramp.int()).abs().max() <= 3


@pytest.mark.parametrize("channels", [2, 4])
def test_jpeg_refuses_alpha(tmp_path: Path, channels: int) -> None:
    with pytest.raises(FileError, match=r"holds no alpha.*\.png"):
        save(_random(channels), tmp_path / "x.jpg")
    assert not (tmp_path / "x.jpg").exists()


def test_16_bit_grey_becomes_float_and_comes_back(tmp_path: Path) -> None:
    values = np.array([[0, 1, 257], [1000, 65534, 65535]], dtype=np.uint16)
    for extension in (".png", ".tif"):
        Image.fromarray(values).save(tmp_path / f"x{extension}")
        found = load(tmp_path / f"x{extension}")
        assert found.dtype == torch.float32
        np.testing.assert_allclose(found[0].numpy() * 65535, values, atol=0.01)
    save(found, tmp_path / "y.png")
    assert np.array_equal(np.array(Image.open(tmp_path / "y.png")), values)


def test_float_tiff_keeps_every_value(tmp_path: Path) -> None:
    values = torch.tensor([[[-3.5, 0.1, 1e6], [0.0, 2.0, -1e-6]]])
    save(values, tmp_path / "x.tiff")
    assert torch.equal(load(tmp_path / "x.tiff"), values)


@pytest.mark.parametrize("dtype", [np.uint32, np.int32])
def test_integers_of_32_bits_keep_their_sign(tmp_path: Path, dtype: Any) -> None:
    values = np.array([[0, 7, np.iinfo(dtype).max, np.iinfo(dtype).min]], dtype)
    tifffile.imwrite(tmp_path / "x.tiff", values)
    assert load(tmp_path / "x.tiff").tolist() == [values.astype(np.float32).tolist()]


def test_a_tiff_that_is_not_read_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "x.tiff").write_bytes(b"II*\0" + bytes(40))
    with pytest.raises(FileError, match="is a TIFF of a kind that Pillow does not read"):
        load(tmp_path / "x.tiff")


def test_floats_are_clamped_and_rounded_to_8_bits(tmp_path: Path) -> None:
    values = torch.tensor([-1.0, 0.0, 0.5, 1.0, 7.0, float("nan")]).expand(3, 1, 6)
    save(values.to(torch.float16), tmp_path / "x.png")
    assert load(tmp_path / "x.png")[0, 0].tolist() == [0, 0, 128, 255, 255, 0]


def test_palettes_become_colours(tmp_path: Path) -> None:
    picture = Image.new("P", (3, 1))
    picture.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    picture.putdata([0, 1, 2])
    picture.save(tmp_path / "x.png")
    assert load(tmp_path / "x.png")[:, 0].tolist() == [[10, 40, 70], [20, 50, 80], [30, 60, 90]]
    picture.save(tmp_path / "x.png", transparency=1)
    assert load(tmp_path / "x.png")[3, 0].tolist() == [255, 0, 255]


@pytest.mark.parametrize(("mode", "channels"), [("1", 1), ("L", 1), ("RGB", 3), ("CMYK", 3)])
def test_other_modes(tmp_path: Path, mode: str, channels: int) -> None:
    Image.new(mode, (4, 3)).save(tmp_path / "x.tiff")
    found = load(tmp_path / "x.tiff")
    assert found.shape == (channels, 3, 4)
    assert found.dtype == torch.uint8


@pytest.mark.parametrize(("mode", "key", "channels"), [("L", 5, 2), ("RGB", (5, 5, 5), 4)])
def test_a_transparent_colour_becomes_alpha(tmp_path: Path, mode: str, key: Any, channels: int) -> None:
    picture = Image.new(mode, (2, 1), key)
    picture.putpixel((1, 0), 9 if mode == "L" else (9, 9, 9))
    picture.save(tmp_path / "x.png", transparency=key)
    found = load(tmp_path / "x.png")
    assert found.shape[0] == channels
    assert found[-1, 0].tolist() == [0, 255]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_honoured(tmp_path: Path, orientation: int) -> None:
    upright = np.arange(6, dtype=np.uint8).reshape(2, 3)
    # How the camera stores it: what undoes the turn that the tag asks for.
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.T,
        6: np.rot90(upright, 1),
        7: upright[::-1, ::-1].T,
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(np.ascontiguousarray(stored)).save(tmp_path / "x.png", exif=exif)
    assert load(tmp_path / "x.png")[0].tolist() == upright.tolist()


def _png() -> bytes:
    data = io.BytesIO()
    Image.fromarray(_random(3, 64, 64).permute(1, 2, 0).numpy()).save(data, "PNG")
    return data.getvalue()


def _bomb() -> bytes:
    """A PNG that says it is 60000 x 60000."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"hello, I am no picture", "is not a PNG"),
        (b"", "is not a PNG"),
        (_png()[:20], "is not a PNG"),
        (_png()[:3000], "truncated"),
        (_bomb(), "decompression bomb"),
    ],
    ids=["text", "empty", "header cut", "data cut", "bomb"],
)
def test_bad_files(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "x.png"
    path.write_bytes(data)
    with pytest.raises(FileError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_truncated_jpeg(tmp_path: Path) -> None:
    save(_random(3, 64, 64), tmp_path / "x.jpg")
    data = (tmp_path / "x.jpg").read_bytes()
    (tmp_path / "x.jpg").write_bytes(data[: len(data) // 2])
    with pytest.raises(FileError, match="truncated"):
        load(tmp_path / "x.jpg")


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="does not exist"):
        load(tmp_path / "none.png")
    with pytest.raises(FileError, match="is a directory"):
        load(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="cannot be read"):
        load(tmp_path / "file" / "x.png")


def test_files_that_are_open(tmp_path: Path) -> None:
    picture = torch.randint(0, 256, (3, 20, 30), dtype=torch.uint8)
    save(picture, tmp_path / "x.png")
    with (tmp_path / "x.png").open("rb") as file:
        assert torch.equal(load(file), picture)
    assert torch.equal(load(io.BytesIO((tmp_path / "x.png").read_bytes())), picture)
    for file, message in (
        (io.BytesIO(b"none"), "the picture is not a PNG"),
        (io.StringIO("text"), "the picture is open as text; open it with 'rb'"),
        ((tmp_path / "x.png").open("rb"), "x.png cannot be read"),
    ):
        if message.endswith("read"):
            file.close()
        with pytest.raises(FileError, match=message):
            load(file)  # type: ignore[arg-type]


def test_file_errors_are_gpu_lod_errors_and_os_errors() -> None:
    assert issubclass(FileError, GpuLodError)
    assert issubclass(FileError, OSError)


def test_saving_makes_the_folder(tmp_path: Path) -> None:
    save(_random(1), tmp_path / "a" / "b" / "x.png")
    assert (tmp_path / "a" / "b" / "x.png").is_file()


def test_what_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="cannot be written"):
        save(_random(1), tmp_path / "file" / "x.png")
    (tmp_path / "x.png").mkdir()
    with pytest.raises(FileError, match="cannot be written"):
        save(_random(1), tmp_path / "x.png")
    with pytest.raises(FileError, match=r"\.gif'; the choices are \.png, \.jpg"):
        save(_random(1), tmp_path / "x.gif")
    with pytest.raises(FileError, match="the choices are"):
        file_format("noextension")
    with pytest.raises(FileError, match="ends at 16383 px"):
        save(torch.zeros(1, 1, 16384, dtype=torch.uint8), tmp_path / "x.webp")


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(5, 2, 2),
        torch.zeros(2, 2),
        torch.zeros(1, 3, 2, 2),
        torch.zeros(3, 0, 2),
        torch.zeros(1, 2, 2, dtype=torch.int64),
        np.zeros((1, 2, 2)),
    ],
    ids=["channels", "rank 2", "rank 4", "empty", "int64", "numpy"],
)
def test_what_is_no_picture(tmp_path: Path, value: Any) -> None:
    with pytest.raises(InputError):
        save(value, tmp_path / "x.png")


def test_convention_atlas() -> None:
    levels = [torch.full((1, h, w), float(i + 1)) for i, (h, w) in enumerate([(5, 6), (2, 3), (1, 1)])]
    assert atlas_offsets(levels) == [(0, 0), (6, 0), (6, 2)]
    found = atlas(levels, background=9)
    assert found.shape == (1, 5, 9)
    assert (found[:, :5, :6] == 1).all()
    assert (found[:, :2, 6:9] == 2).all()
    assert found[0, 2, 6] == 3
    assert (found[0, 2, 7:] == 9).all() and (found[0, 3:, 6:] == 9).all()


def test_an_atlas_of_thin_levels_grows_below_level_0() -> None:
    levels = [torch.ones(1, 1, n) for n in (8, 4, 2, 1)]
    assert atlas(levels).shape == (1, 3, 12)


def tiff(bits: int, photometric: int, sample: int, data: bytes, order: str = "<") -> bytes:
    """A grey one of 2 x 1, of kinds that Pillow does not write."""
    tags = [
        (256, 2),
        (257, 1),
        (258, bits),
        (259, 1),
        (262, photometric),
        (273, 0),
        (277, 1),
        (278, 1),
        (279, len(data)),
    ]
    tags += [(339, sample)]
    at = 8 + 2 + 12 * len(tags) + 4
    entries = b"".join(struct.pack(order + "HHII", tag, 4, 1, at if tag == 273 else value) for tag, value in tags)
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "IH", 8, len(tags))
    return head + entries + bytes(4) + data


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (tiff(16, 1, 1, struct.pack("<HH", 700, 60000)), (700 / 65535, 60000 / 65535)),
        (tiff(16, 0, 1, struct.pack("<HH", 700, 60000)), (1 - 700 / 65535, 1 - 60000 / 65535)),
        (tiff(12, 1, 1, bytes([0xFF, 0xF8, 0x00])), (1.0, 0x800 / 4095)),
    ],
)
def test_grey_of_more_than_8_bits_is_as_bright_as_it_says(
    tmp_path: Path, data: bytes, expected: tuple[float, float]
) -> None:
    (tmp_path / "grey.tif").write_bytes(data)
    assert load(tmp_path / "grey.tif").flatten().tolist() == pytest.approx(expected, abs=1e-6)


def test_signed_bytes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "grey.tif").write_bytes(tiff(8, 1, 2, struct.pack("<bb", -3, 100)))
    with pytest.raises(FileError, match="signed bytes"):
        load(tmp_path / "grey.tif")


@pytest.mark.parametrize("extension", ["png", "webp"])
def test_a_picture_whose_exif_is_none_lies_as_it_is(tmp_path: Path, extension: str) -> None:
    values = torch.randint(256, (3, 5, 7), dtype=torch.uint8)
    picture = Image.fromarray(values.permute(1, 2, 0).numpy())
    picture.save(path := tmp_path / f"junk.{extension}", exif=b"Exif\0\0garbage", lossless=True)
    assert torch.equal(load(path), values)


def test_the_longest_side_of_a_format_is_written(tmp_path: Path) -> None:
    for name, side in (("a.webp", 16383), ("a.jpg", 65500)):
        save(torch.zeros(1, 1, side, dtype=torch.uint8), tmp_path / name)
        assert load(tmp_path / name).shape[-1] == side
        with pytest.raises(FileError, match="ends at"):
            save(torch.zeros(1, 1, side + 1, dtype=torch.uint8), tmp_path / name)


def test_jpeg_keeps_colours_of_single_pixels(tmp_path: Path) -> None:
    """Of columns that are red and blue in turn, where chroma at half the resolution would be purple."""
    image = torch.zeros(3, 32, 32, dtype=torch.uint8)
    image[0, :, 0::2] = image[2, :, 1::2] = 200
    save(image, tmp_path / "a.jpg")
    assert (load(tmp_path / "a.jpg").int() - image.int()).abs().max() < 40


def test_a_damaged_png_is_refused(tmp_path: Path) -> None:
    """Its data may unpack all the same, to other pixels; only its checksum tells."""
    path = tmp_path / "a.png"
    Image.effect_noise((64, 48), 60).save(path)
    whole = path.read_bytes()
    end = whole.index(b"IEND") - 4  # the checksum of the data is before it
    damaged = whole[: end - 1] + bytes([whole[end - 1] ^ 1]) + whole[end:]
    Image.open(io.BytesIO(damaged)).load()  # Pillow does not look
    path.write_bytes(damaged)
    with pytest.raises(FileError, match=r"truncated, damaged.*IDAT"):
        load(path)
    path.write_bytes(whole)
    assert load(path).shape == (1, 48, 64)
