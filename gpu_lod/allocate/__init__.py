"""Allocators: relevance, and where they say so a picture or a fixation, to exactly K sites for every image of a batch.

    tokens = lod.allocate.FoveatedPyramid(budget=273)(image, fixation=(0.4, 0.6))
    tokens.patches, tokens.sites, tokens.scores  # [B, K, C, P, P], [B, K, 3], [B, K]

`names()` lists them, `make(name, ...)` makes one, and `register` adds one of your own.
"""

from gpu_lod.allocate.adaptive_stratified import AdaptiveStratified
from gpu_lod.allocate.base import Allocator, make, names, register
from gpu_lod.allocate.downsample import Downsample
from gpu_lod.allocate.fixations import find_fixations
from gpu_lod.allocate.foveated_pyramid import FoveatedPyramid
from gpu_lod.allocate.frequency_aware import FrequencyAware
from gpu_lod.allocate.grid_top_k import GridTopK
from gpu_lod.allocate.heat_diffusion import HeatDiffusion
from gpu_lod.allocate.hexagonal import Hexagonal
from gpu_lod.allocate.hybrid_atlas import HybridAtlas, labels_of
from gpu_lod.allocate.learned import Learned, soft_top_k
from gpu_lod.allocate.log_polar import LogPolar
from gpu_lod.allocate.losses import coverage_loss, dead_bin_loss, repulsion_loss
from gpu_lod.allocate.pseudo_log_polar import PseudoLogPolar
from gpu_lod.allocate.pyramid_top_k import PyramidTopK
from gpu_lod.allocate.random import Random
from gpu_lod.allocate.residual import Residual
from gpu_lod.allocate.scene import Scene
from gpu_lod.allocate.soft_top_k_coverage import SoftTopKCoverage
from gpu_lod.allocate.soft_vortex import SoftVortex
from gpu_lod.allocate.spiral import Spiral
from gpu_lod.allocate.stratified import Stratified
from gpu_lod.allocate.token_bank import PackedTokens, TokenBank
from gpu_lod.allocate.token_dag import TokenDAG
from gpu_lod.allocate.tree_cut import Cut, tree_cut
from gpu_lod.allocate.voronoi import Voronoi
from gpu_lod.allocate.vortex_field import VortexField
from gpu_lod.allocate.vortex_learned import VortexLearned
from gpu_lod.allocate.wavelet import Wavelet
from gpu_lod.allocate.whirlwind import Whirlwind

__all__ = [
    "AdaptiveStratified",
    "Allocator",
    "Cut",
    "Downsample",
    "FoveatedPyramid",
    "FrequencyAware",
    "GridTopK",
    "HeatDiffusion",
    "Hexagonal",
    "HybridAtlas",
    "Learned",
    "LogPolar",
    "PackedTokens",
    "PseudoLogPolar",
    "PyramidTopK",
    "Random",
    "Residual",
    "Scene",
    "SoftTopKCoverage",
    "SoftVortex",
    "Spiral",
    "Stratified",
    "TokenBank",
    "TokenDAG",
    "Voronoi",
    "VortexField",
    "VortexLearned",
    "Wavelet",
    "Whirlwind",
    "coverage_loss",
    "dead_bin_loss",
    "find_fixations",
    "labels_of",
    "make",
    "names",
    "register",
    "repulsion_loss",
    "soft_top_k",
    "tree_cut",
]


def __dir__() -> list[str]:
    return sorted(__all__)
