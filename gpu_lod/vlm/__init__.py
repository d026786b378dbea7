"""From a picture to the tokens of a vision encoder, and what tells which tokens to take.

    saccades = lod.vlm.Saccades(lod.allocate.FoveatedPyramid(273, patch=16))   # 256 over the whole picture, 273 closer
    encoded = lod.vlm.encode(model, image, saccades, processor=processor)      # SigLIP, CLIP, Qwen-VL, timm
    encoded.features, encoded.tokens.sites                                     # [B, 529, D], [B, 529, 3]

`adapters()` lists the models, `register_adapter` adds one of your own. Nothing here imports transformers or timm.
"""

from gpu_lod.vlm.adapters import Adapter, Encoded, adapter_for, adapters, register_adapter
from gpu_lod.vlm.attention import VisionAttention, attention_received, vision_attention
from gpu_lod.vlm.encode import encode
from gpu_lod.vlm.generate import generate, inputs_for
from gpu_lod.vlm.glances import Glanced, Glances, attention_entropy, glances
from gpu_lod.vlm.merging import Merged, bipartite_merge
from gpu_lod.vlm.position_table import sample_position_table
from gpu_lod.vlm.positions import axial_frequencies, grid_positions, mrope_extent, mrope_positions, rotary_embedding
from gpu_lod.vlm.pruning import sparse_vlm, vision_zip
from gpu_lod.vlm.relevance import (
    ContextualizedRelevance,
    Relevance,
    query_similarity,
    relevance_map,
    saliency_relevance,
)
from gpu_lod.vlm.saccades import Saccades
from gpu_lod.vlm.selection import GumbelTopK, Selection, gumbel_top_k, straight_through_top_k
from gpu_lod.vlm.streaming import Streamed, TokenMemory
from gpu_lod.vlm.training import Trainer

__all__ = [
    "Adapter",
    "ContextualizedRelevance",
    "Encoded",
    "Glanced",
    "Glances",
    "GumbelTopK",
    "Merged",
    "Relevance",
    "Saccades",
    "Selection",
    "Streamed",
    "TokenMemory",
    "Trainer",
    "VisionAttention",
    "adapter_for",
    "adapters",
    "attention_entropy",
    "attention_received",
    "axial_frequencies",
    "bipartite_merge",
    "encode",
    "generate",
    "glances",
    "grid_positions",
    "gumbel_top_k",
    "inputs_for",
    "mrope_extent",
    "mrope_positions",
    "query_similarity",
    "register_adapter",
    "relevance_map",
    "rotary_embedding",
    "saliency_relevance",
    "sample_position_table",
    "sparse_vlm",
    "straight_through_top_k",
    "vision_attention",
    "vision_zip",
]


def __dir__() -> list[str]:
    return sorted(__all__)
