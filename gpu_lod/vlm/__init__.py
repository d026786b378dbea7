"""From a picture to the tokens of a vision encoder, and what tells which tokens to take."""

from gpu_lod.vlm.attention import VisionAttention, attention_received, vision_attention
from gpu_lod.vlm.glances import Glanced, Glances, attention_entropy, glances
from gpu_lod.vlm.merging import Merged, bipartite_merge
from gpu_lod.vlm.pruning import sparse_vlm, vision_zip
from gpu_lod.vlm.relevance import ContextualizedRelevance, Relevance, query_similarity, saliency_relevance
from gpu_lod.vlm.selection import GumbelTopK, Selection, gumbel_top_k, straight_through_top_k
from gpu_lod.vlm.streaming import Streamed, TokenMemory
from gpu_lod.vlm.training import Trainer

__all__ = [
    "ContextualizedRelevance",
    "Glanced",
    "Glances",
    "GumbelTopK",
    "Merged",
    "Relevance",
    "Selection",
    "Streamed",
    "TokenMemory",
    "Trainer",
    "VisionAttention",
    "attention_entropy",
    "attention_received",
    "bipartite_merge",
    "glances",
    "gumbel_top_k",
    "query_similarity",
    "saliency_relevance",
    "sparse_vlm",
    "straight_through_top_k",
    "vision_attention",
    "vision_zip",
]
