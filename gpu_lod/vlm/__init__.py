"""From a picture to the tokens of a vision encoder, and what tells which tokens to take."""

from gpu_lod.vlm.merging import Merged, bipartite_merge
from gpu_lod.vlm.relevance import ContextualizedRelevance, Relevance, query_similarity, saliency_relevance
from gpu_lod.vlm.selection import GumbelTopK, Selection, gumbel_top_k, straight_through_top_k

__all__ = [
    "ContextualizedRelevance",
    "GumbelTopK",
    "Merged",
    "Relevance",
    "Selection",
    "bipartite_merge",
    "gumbel_top_k",
    "query_similarity",
    "saliency_relevance",
    "straight_through_top_k",
]
