"""A small trainer whose runs survive being killed."""

from __future__ import annotations

import copy
import inspect
import json
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from gpu_lod import checks
from gpu_lod.errors import CheckpointError, InputError, UnsupportedError

FILE = "checkpoint.pt"


class Trainer:
    """Steps of an optimiser, checkpointed so that a killed run goes on as if it had never stopped.

        trainer = Trainer(scorer, optimizer, "runs/a", config={"lr": 1e-3, "budget": 64})
        losses = trainer.fit(lambda step: loss_of(scorer, batch(step)), steps=1000)

    A checkpoint holds module, optimizer, scheduler, step, losses, and the state of torch's (CUDA's too), numpy's and
    Python's random numbers. It is written to a new file that then takes the old one's name, so that there is always a
    whole one. A run that is made again with the same folder goes on from it, with losses bit-identical to those of an
    uninterrupted run where the device computes the same twice; what came after the last checkpoint is done again.

    Args:
        module: what is trained; what is frozen need not be in it.
        optimizer: one whose step needs no closure.
        folder: of the checkpoint and the log; made if need be.
        config: what makes this run this run, as JSON can hold it; a checkpoint of another is refused.
        scheduler: stepped after each step; `ReduceLROnPlateau` is told the loss.
        every: steps from checkpoint to checkpoint; the last step is one.
        log: write the loss and the learning rate to the folder for TensorBoard.

    Raises:
        CheckpointError: a checkpoint of another configuration or optimizer, of other parameters, or that cannot be
            read, and then module and optimizer are as they were; a folder that cannot be made.
        InputError: arguments of other kinds, or an optimizer that needs a closure, as L-BFGS does.
        UnsupportedError: a log without TensorBoard.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        folder: str | os.PathLike[str],
        config: Mapping[str, Any],
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        every: int = 100,
        log: bool = False,
    ) -> None:
        for name, value, kind in (("module", module, nn.Module), ("optimizer", optimizer, torch.optim.Optimizer)):
            if not isinstance(value, kind):
                raise InputError(f"{name} is a {type(value).__name__}; expected a torch {kind.__name__}.")
        if not (scheduler is None or (hasattr(scheduler, "step") and hasattr(scheduler, "state_dict"))):
            raise InputError(
                f"scheduler is a {type(scheduler).__name__}; expected one of torch.optim.lr_scheduler, or None."
            )
        checks.flag(log, "log")
        self.module, self.optimizer, self.scheduler = module, optimizer, scheduler
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise InputError(
                f"{type(optimizer).__name__} takes its steps by a closure, and a Trainer gives none. Use another "
                "optimizer, such as torch.optim.AdamW."
            )
        self.every = checks.integer(every, "every", at_least=1)
        try:
            self.config = json.dumps(dict(config), sort_keys=True)
        except (TypeError, ValueError) as error:
            raise InputError(f"config is not JSON ({error}). Use numbers, strings, lists and dicts.") from None
        try:
            self.folder = Path(folder)
        except TypeError:
            raise InputError(f"folder is {checks.shown(folder)}; expected a path.") from None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{self.folder} cannot be made a folder: {error.strerror}. Use another.") from None
        self.losses: list[float] = []
        self._random: Mapping[str, Any] | None = None
        if self.path.exists():
            self._load()
        self._log = _writer(self.folder, self.step) if log else None

    @property
    def path(self) -> Path:
        """Of the checkpoint."""
        return self.folder / FILE

    @property
    def step(self) -> int:
        """Steps done."""
        return len(self.losses)

    def fit(self, loss: Callable[[int], torch.Tensor], steps: int) -> list[float]:
        """Train until `steps` steps are done, those before a resume among them; all losses.

        Args:
            loss: of step 0, 1, ...: a scalar with gradients. Its data should follow from the step's number, or from
                torch's, numpy's or Python's own random numbers: what another generator holds is not resumed.

        Raises:
            InputError: a loss that is no finite scalar with gradients, or gradients that are not finite: neither
                weights nor the last checkpoint know of them.
            CheckpointError: as `save`.
        """
        steps = checks.integer(steps, "steps", at_least=0)
        if not callable(loss):
            raise InputError(f"loss is {checks.shown(loss)}; expected a function of the step's number.")
        if self._random is not None:  # not before: what is made between may draw too
            _restore_random(self._random)
            self._random = None
        while self.step < steps:
            self.optimizer.zero_grad(set_to_none=True)
            value = loss(self.step)
            if not isinstance(value, torch.Tensor) or not value.requires_grad:
                what = "has no gradients" if isinstance(value, torch.Tensor) else f"is a {type(value).__name__}"
                raise InputError(
                    f"the loss of step {self.step} {what}; expected a tensor of one number that follows from the "
                    "module's parameters."
                )
            if value.numel() != 1 or not torch.isfinite(value.detach()).all():
                raise InputError(
                    f"the loss of step {self.step} is {value.detach()}; expected one finite number. Lower the learning "
                    "rate, or look at that step's data."
                )
            value.backward()
            self._check_gradients()
            self.optimizer.step()
            if self._log is not None:
                self._log.add_scalar("loss", float(value.detach()), self.step)
                self._log.add_scalar("learning rate", self.optimizer.param_groups[0]["lr"], self.step)
            if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                self.scheduler.step(float(value.detach()))
            elif self.scheduler is not None:
                self.scheduler.step()
            self.losses.append(float(value.detach()))
            if self.step % self.every == 0 or self.step == steps:
                self.save()
        return list(self.losses)

    def _trained(self) -> Iterator[nn.Parameter]:
        return (parameter for group in self.optimizer.param_groups for parameter in group["params"])

    def _check_gradients(self) -> None:
        found = [
            p.grad.coalesce().values() if p.grad.is_sparse else p.grad for p in self._trained() if p.grad is not None
        ]
        if not _finite(found):
            raise InputError(
                f"the loss of step {self.step} is finite and its gradients are not. Look for roots, divisions and "
                "logarithms of 0; the weights are as they were before the step."
            )

    def save(self) -> None:
        """Write a checkpoint, all of it or nothing.

        Raises:
            CheckpointError: it cannot be written, or weights are not finite; the one before it stays.
        """
        if not _finite([parameter.detach() for parameter in self._trained()]):
            raise CheckpointError(
                f"after step {self.step} the weights hold NaN or infinities, and {self.path} is left as it is. Go on "
                "from it at a lower learning rate."
            )
        state = {
            "config": self.config,
            "losses": self.losses,
            "module": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "kind": type(self.optimizer).__name__,
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "schedule": type(self.scheduler).__name__,
            "random": _random_state(),
        }
        unfinished = self.path.with_suffix(".unfinished")
        try:
            with open(unfinished, "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())  # or the name may reach the disk before the content
            os.replace(unfinished, self.path)
        except (OSError, RuntimeError) as error:  # RuntimeError: torch's, of a full disk
            reason = getattr(error, "strerror", None) or error
            raise CheckpointError(f"{self.path} cannot be written: {reason}. What was there is still there.") from None

    def close(self) -> None:
        """Finish the log. More may be trained after it, but is not logged."""
        if self._log is not None:
            self._log.close()
            self._log = None

    def _load(self) -> None:
        way_out = "Use another folder, or delete the file to begin anew."
        try:
            # Tensors and plain values only: a checkpoint cannot run code.
            state = torch.load(self.path, map_location="cpu", weights_only=True)
            config, scheduler, kind = state["config"], state["scheduler"], state["kind"]
            losses, noise = list(state["losses"]), state["random"]
        except Exception as error:  # unpickling raises what it likes
            raise CheckpointError(f"{self.path} cannot be read as a checkpoint ({error}). {way_out}") from None
        if config != self.config:
            then, now = json.loads(config), json.loads(self.config)
            apart = [
                f"{key} was {then.get(key)!r} and is {now.get(key)!r}"
                for key in sorted({*then, *now})
                if then.get(key) != now.get(key) or (key in then) != (key in now)
            ]
            raise CheckpointError(f"{self.path} is of another configuration: {'; '.join(apart)}. {way_out}")
        if (scheduler is None) != (self.scheduler is None):
            which = "no scheduler" if scheduler is None else "a scheduler"
            raise CheckpointError(f"{self.path} is of a run with {which}, unlike this one. {way_out}")
        schedule, mine = state.get("schedule"), type(self.scheduler).__name__  # older ones do not say
        if schedule not in (None, mine):
            raise CheckpointError(f"{self.path} is of a run with the scheduler {schedule}, not {mine}. {way_out}")
        if kind != type(self.optimizer).__name__:
            mine = type(self.optimizer).__name__
            raise CheckpointError(f"{self.path} is of a run with the optimizer {kind}, not {mine}. {way_out}")
        before = copy.deepcopy((self.module.state_dict(), self.optimizer.state_dict()))
        try:
            self.module.load_state_dict(state["module"])
            self.optimizer.load_state_dict(state["optimizer"])
            if self.scheduler is not None:
                self.scheduler.load_state_dict(scheduler)
        except (RuntimeError, ValueError, KeyError) as error:
            self.module.load_state_dict(before[0])
            self.optimizer.load_state_dict(before[1])
            raise CheckpointError(f"{self.path} is of other parameters ({error}). {way_out}") from None
        self.losses, self._random = losses, noise


def _finite(tensors: Sequence[torch.Tensor]) -> bool:
    """All of them; a GPU is waited for once."""
    each = [torch.isfinite(values).all().to(tensors[0].device) for values in tensors]
    return not each or bool(torch.stack(each).all())


def _random_state() -> dict[str, Any]:
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "numpy": (name, np.asarray(keys).tolist(), *rest),
        "python": random.getstate(),
    }


def _restore_random(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))


def _writer(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UnsupportedError(
            f"log=True needs TensorBoard ({error}); in the checkout: pip install '.[train]'. Or leave log off."
        ) from None
    # What was logged after the checkpoint is done again.
    return SummaryWriter(str(folder), purge_step=step)
