"""The commands of `gpu-lod`. Whatever they need that is slow to import, they import themselves."""

from gpu_lod.commands import machine, pyramids, samplers, tokens  # which register, in the order of the help
from gpu_lod.commands.app import app, as_options

__all__ = ["app", "as_options", "machine", "pyramids", "samplers", "tokens"]
