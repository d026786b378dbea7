"""The doctor's comparison of what every shader and kernel makes with what torch makes, on the machine it is run on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext

import torch

from gpu_lod import agreement
from gpu_lod.context import Context
from gpu_lod.dispatch import named, ways
from gpu_lod.doctor.finding import REPORT, Finding
from gpu_lod.errors import GpuLodError, LimitError, UnsupportedError
from gpu_lod.jobs import Job, small

_SHOWN = 5


def compare(
    name: str, where: int | torch.device | None, device: torch.device, jobs: Iterable[Job] | None = None
) -> Iterator[Finding]:
    """Every way of every verb that the machine can go, on small pictures of all dtypes.

    Args:
        where: what to open a context on; None is none, and what kernels make is compared alone.
        device: where the tensors are.
        jobs: some of them only; None is all.
    """
    wrong: dict[str, list[str]] = {}
    compared: set[str] = set()
    count = 0
    opened = nullcontext() if where is None else Context(where)
    with opened, torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for job in small() if jobs is None else jobs:
            verb = job.verb.__name__
            arguments = job.prepare(device)()
            truth = job.verb(*arguments, backend="torch")
            for way in _ways(verb, where is not None, device):
                try:
                    result = job.verb(*arguments, **named(way))
                    apart = agreement.difference(result, truth, own_filter=job.own_filter)
                except (UnsupportedError, LimitError):  # it says so, and auto goes on
                    continue
                except GpuLodError as error:
                    apart = str(error)
                count += 1
                compared.add(verb)
                if apart:
                    wrong.setdefault(f"{verb} on {way}", []).append(f"{job.at}: {apart}")
    if wrong:
        lines = [f"{by} in {len(those)} ({those[0]})" for by, those in wrong.items()]
        more = f"; and by {len(lines) - _SHOWN} other ways" if len(lines) > _SHOWN else ""
        failed = sum(map(len, wrong.values()))
        found = f"{failed} of {count} results are not torch's: {'; '.join(lines[:_SHOWN])}{more}"
        yield Finding(name, "fail", found, f"update the driver, or use backend='torch' for these; and {REPORT}")
    else:
        yield Finding(name, "ok", f"{count} results of {len(compared)} verbs are torch's, but for rounding")


def _ways(verb: str, opengl: bool, device: torch.device) -> list[str]:
    cuda = device.type == "cuda" or not opengl
    return [way for way in ways(verb, cuda=cuda) if way == "cuda" or (way != "torch" and opengl)]
