"""Adapters: how a token set enters an encoder. Each family of models is one; importing them imports no model."""

from gpu_lod.vlm.adapters.base import Adapter, Encoded, adapter_for, adapters, register_adapter
from gpu_lod.vlm.adapters.clip import Clip
from gpu_lod.vlm.adapters.qwen import Qwen3, Qwen25
from gpu_lod.vlm.adapters.siglip import Siglip, Siglip2
from gpu_lod.vlm.adapters.timm_vit import TimmEva, TimmViT

__all__ = [
    "Adapter",
    "Clip",
    "Encoded",
    "Qwen3",
    "Qwen25",
    "Siglip",
    "Siglip2",
    "TimmEva",
    "TimmViT",
    "adapter_for",
    "adapters",
    "register_adapter",
]
