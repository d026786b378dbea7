"""A small trainer whose runs survive being killed."""

from __future__ import annotations

import copy
import inspect
import json
import os
import pickle
import random
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from gpu_lod import checks
from gpu_lod.errors import CheckpointError, InputError, UnsupportedError

FILE, LOCK = "checkpoint.pt", "checkpoint.lock"


class Trainer:
    """Steps of an optimiser, checkpointed so that a killed run goes on as if it had never stopped.

        trainer = Trainer(scorer, optimizer, "runs/a", config={"lr": 1e-3, "budget": 64})
        losses = trainer.fit(lambda step: loss_of(scorer, batch(step)), steps=1000)

    A checkpoint holds module, optimizer, scheduler, step, losses, and the state of torch's (CUDA's too), numpy's and
    Python's random numbers. It is written to a new file that then takes the old one's name, so that there is always a
    whole one. A run that is made again with the same folder goes on from it, with losses bit-identical to those of an
    uninterrupted run where the device computes the same twice; what came after the last checkpoint is done again. A
    folder is one process's at a time: of several that train together, the first one's, or each has its own.

    Args:
        module: what is trained, all of it; what is frozen need not be in it.
        optimizer: one whose step needs no closure.
        folder: of the checkpoint and the log; made if need be.
        config: what makes this run this run, as JSON can hold it; a checkpoint of another is refused.
        scheduler: stepped after each step; `ReduceLROnPlateau` is told the loss.
        every: steps from checkpoint to checkpoint; the last step is one.
        log: write the loss and the learning rate to the folder for TensorBoard.

    Raises:
        CheckpointError: a checkpoint of another configuration or optimizer, of other parameters, or that cannot be
            read, and then module, optimizer and scheduler are as they were; a folder that cannot be made, or that
            another process trains in.
        InputError: arguments of other kinds, parameters to train that are not the module's, or an optimizer that needs
            a closure, as L-BFGS does.
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
        given: Any = scheduler
        schedules = hasattr(given, "step") and hasattr(given, "state_dict")
        if given is not None and (not schedules or isinstance(given, torch.optim.Optimizer)):
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
        if any(name is None for group in self._names() for name in group):
            raise InputError(
                "the optimizer trains parameters that are not the module's, and a checkpoint would be without them. "
                "Put all that is trained into one module, such as torch.nn.ModuleList([scorer, allocator])."
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
            there = self.path.exists()
        except (OSError, ValueError) as error:  # ValueError: of characters that no path has
            reason = getattr(error, "strerror", None) or error
            raise CheckpointError(f"{str(self.folder)!r} cannot be made a folder: {reason}. Use another.") from None
        self._lock = _locked(self.folder)
        self.losses: list[float] = []
        self._random: Mapping[str, Any] | None = None
        self._begun: tuple[int, Mapping[str, Any]] | None = None
        """A step, and the random numbers as it found them."""
        self._changing = -1
        """The step that changes the weights, or did so last."""
        self._loads = False
        """Whether a checkpoint of this run was read already."""
        self._unset = {name for name, values in module.named_buffers() if _holds_nan(values)}
        if there:
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
                weights nor the last checkpoint know of them (what the module keeps of its inputs does, as BatchNorm).
            CheckpointError: as `save`.
        """
        steps = checks.integer(steps, "steps", at_least=0)
        if not callable(loss):
            raise InputError(f"loss is {checks.shown(loss)}; expected a function of the step's number.")
        if self._random is not None:  # not before: what is made between may draw too
            _restore_random(self._random)
            self._random = None
        while self.step < steps:
            self._begun = self.step, _random_state()
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
            number, rate = float(value.detach()), self.optimizer.param_groups[0]["lr"]
            self._changing = self.step
            self.optimizer.step()
            if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                self.scheduler.step(number)
            elif self.scheduler is not None:
                self.scheduler.step()
            self.losses.append(number)
            if self._log is not None:
                self._log.add_scalar("loss", number, self.step - 1)
                self._log.add_scalar("learning rate", rate, self.step - 1)
            if self.step % self.every == 0 or self.step == steps:
                self.save()
        return list(self.losses)

    def _names(self) -> list[list[str | None]]:
        """Of what the optimizer trains, by its groups."""
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        return [[names.get(id(one)) for one in group["params"]] for group in self.optimizer.param_groups]

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
        """Write a checkpoint, all of it or nothing. What a step had begun, when it was cut off, is done again.

        Raises:
            CheckpointError: it cannot be written, or not be read again; weights are not finite, or buffers NaN; a step
                was cut off while it changed the weights. The one before it stays.
        """
        if self._changing == self.step:
            raise CheckpointError(
                f"step {self.step} was cut off while it changed the weights, and {self.path} is left as it is. Make "
                "the Trainer again to go on from it."
            )
        if not _finite([parameter.detach() for parameter in self._trained()]):
            raise CheckpointError(
                f"after step {self.step} the weights hold NaN or infinities, and {self.path} is left as it is. Go on "
                "from it at a lower learning rate."
            )
        buffers = self.module.named_buffers()
        if lost := [name for name, values in buffers if name not in self._unset and _holds_nan(values)]:
            raise CheckpointError(
                f"after step {self.step} {', '.join(lost)} of the module hold NaN, and {self.path} is left as it is. "
                "Go on from it without the data that made it."
            )
        noise = self._random  # which nothing was drawn from yet
        if noise is None:
            noise = self._begun[1] if self._begun and self._begun[0] == self.step else _random_state()
        state = {
            "config": self.config,
            "losses": self.losses,
            "module": self.module.state_dict(),
            "optimizer": _plain(self.optimizer.state_dict()),
            "kind": type(self.optimizer).__name__,
            "names": self._names(),
            "scheduler": None if self.scheduler is None else _plain(self.scheduler.state_dict()),
            "schedule": type(self.scheduler).__name__,
            "random": noise,
        }
        unfinished = self.path.with_suffix(".unfinished")
        try:
            with open(unfinished, "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())  # or the name may reach the disk before the content
            if not self._loads:
                _read(unfinished)
            os.replace(unfinished, self.path)
        # RuntimeError: torch's, of a full disk. The others: of what no file can hold.
        except (OSError, RuntimeError, pickle.PickleError, AttributeError, TypeError) as error:
            reason = getattr(error, "strerror", None) or error
            if isinstance(error, pickle.UnpicklingError):
                reason = (
                    "it could not be read again, as the module, the optimizer or the scheduler keeps what is neither a "
                    "tensor nor plain Python, such as numpy arrays, in its state_dict()"
                )
            raise CheckpointError(f"{self.path} cannot be written: {reason}. What was there is still there.") from None
        self._loads = True

    def close(self) -> None:
        """Finish the log. More may be trained after it, but is not logged."""
        if self._log is not None:
            self._log.close()
            self._log = None

    def _load(self) -> None:
        way_out = "Use another folder, or delete the file to begin anew."
        try:
            state = _read(self.path)
            config, scheduler, kind = state["config"], state["scheduler"], state["kind"]
            losses, noise = list(state["losses"]), state["random"]
        except Exception as error:  # unpickling raises what it likes
            raise CheckpointError(f"{self.path} cannot be read as a checkpoint ({error}). {way_out}") from None
        if config != self.config:
            texts = (
                {key: json.dumps(value) for key, value in json.loads(text).items()} for text in (config, self.config)
            )
            then, now = texts
            apart = [
                f"{key} was {then.get(key, 'not there')} and is {now.get(key, 'not there')}"
                for key in sorted({*then, *now})
                if then.get(key) != now.get(key)
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
        if state.get("names", self._names()) != self._names():
            raise CheckpointError(
                f"{self.path} is of a run whose optimizer has other parameters, or has them in another order. {way_out}"
            )
        parts: list[Any] = [self.module, self.optimizer, *([] if self.scheduler is None else [self.scheduler])]
        before = [copy.deepcopy(part.state_dict()) for part in parts]
        try:
            for part, held in zip(parts, (state["module"], state["optimizer"], scheduler), strict=False):
                part.load_state_dict(held)
        except Exception as error:  # schedulers raise what they like
            for part, held in zip(parts, before, strict=True):
                part.load_state_dict(held)
            raise CheckpointError(f"{self.path} is of other parameters ({error}). {way_out}") from None
        self.losses, self._random = losses, noise


class _Lock:
    """Of a folder, as long as somebody refers to it."""

    def __init__(self, folder: Path) -> None:
        import fcntl

        self._file = None
        try:
            self._file = open(folder / LOCK, "a+")  # noqa: SIM115
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            if self._file is not None:
                raise CheckpointError(
                    f"another process trains in {folder} ({folder / LOCK} is locked). Use another folder, or wait for "
                    "it. Of processes that train together only one may have a Trainer."
                ) from None
        except OSError:  # a file system that has no locks, or is read only
            pass

    def __del__(self) -> None:
        if self._file is not None:
            self._file.close()


_locks: weakref.WeakValueDictionary[tuple[int, str], _Lock] = weakref.WeakValueDictionary()


def _locked(folder: Path) -> _Lock:
    """A process has it once, however many Trainers it makes."""
    key = os.getpid(), os.path.realpath(folder)
    lock = _locks.get(key)
    if lock is None:
        lock = _locks[key] = _Lock(folder)
    return lock


def _read(path: Path) -> Any:
    """Tensors and plain values only: a checkpoint cannot run code."""
    return torch.load(path, map_location="cpu", weights_only=True)


def _plain(state: Any) -> Any:
    """A state with Python's numbers for numpy's, which a checkpoint would not be read with again."""
    if isinstance(state, np.generic):
        return state.item()
    if type(state) is dict:
        return {_plain(key): _plain(value) for key, value in state.items()}
    return type(state)(map(_plain, state)) if type(state) in (list, tuple) else state


def _holds_nan(values: torch.Tensor) -> bool:
    if nn.parameter.is_lazy(values) or not values.is_floating_point() or values.dtype.itemsize == 1:
        return False
    return bool(values.isnan().any())


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
    for device, numbers in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
        torch.cuda.set_rng_state(numbers, device)
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
