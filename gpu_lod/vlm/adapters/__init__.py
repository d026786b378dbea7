"""Adapters: how a token set enters an encoder. Each family of models is one; importing them imports no model."""

from gpu_lod.vlm.adapters.base import Adapter, adapter_for, adapters, register_adapter
from gpu_lod.vlm.adapters.clip import Clip
from gpu_lod.vlm.adapters.encoded import Encoded
from gpu_lod.vlm.adapters.llava import Llava
from gpu_lod.vlm.adapters.qwen import Qwen3, Qwen25
from gpu_lod.vlm.adapters.siglip import Siglip, Siglip2
from gpu_lod.vlm.adapters.timm_vit import TimmEva, TimmViT
from gpu_lod.vlm.adapters.vit import Dinov2, Dinov2WithRegisters, Vit

__all__ = [
    "Adapter",
    "Clip",
    "Dinov2",
    "Dinov2WithRegisters",
    "Encoded",
    "Llava",
    "Qwen3",
    "Qwen25",
    "Siglip",
    "Siglip2",
    "TimmEva",
    "TimmViT",
    "Vit",
    "adapter_for",
    "adapters",
    "register_adapter",
]
