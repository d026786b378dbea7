"""CUDA kernels, and what runs them: `backend="cuda"`. Knows nothing of verbs; importing it loads no CUDA.

- *.cu, *.cuh: the kernels. `sources` reads them, `compiler` makes cubins of them with NVRTC, `cubins` keeps those on
  disk.
- `device`: what running a kernel takes of a GPU, and which GPU is a tensor's; `driver` is that over CUDA's driver API.
- `chain`, `textures`, `samplers`: the memory and the launches of each kernel.
"""
