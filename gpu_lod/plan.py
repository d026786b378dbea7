"""Plans: a function of tensors, made of verbs, run again without looking anything up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.utils import _pytree

from gpu_lod import checks, recording
from gpu_lod.bridge.pool import storage_start
from gpu_lod.context import Context, context_for
from gpu_lod.copies import put
from gpu_lod.errors import BufferMovedError, ContextClosedError, InputError, PyramidChangedError, UnsupportedError
from gpu_lod.kernels import device
from gpu_lod.kernels.graphs import captured
from gpu_lod.pyramid import Pyramid
from gpu_lod.uncompiled import apart

_IN_GL = (torch.uint8, torch.float16, torch.bfloat16, torch.float32)


def plan(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Plan:
    """Run a verb, or any function made of verbs, thrice, and get a `Plan` that runs it again at the least cost.

    The first runs decide and prepare everything: backends, programs, buffers, textures, tables. Where all the work is
    OpenGL's, its commands are recorded, and a call of the plan does nothing but copy the new inputs in, give these
    commands again and wait: it allocates nothing, compiles nothing, looks nothing up, and enters the context once for
    all verbs in the function. Where it is not, as with torch operations between verbs, backend="torch", or a verb that
    works on the host (`cull`; on software renderers `foveate` with a fixation that may change), a call of the plan
    calls the function: `replays` and `reason` say so. Where OpenGL has no part in a function of CUDA tensors, as with
    backend="cuda" or torch's own operations, it is captured in a CUDA graph if it can be: it must not wait for the GPU.

    Args:
        function: a verb, or a function of tensors that calls verbs.
        args, kwargs: what a call is passed. Its tensors may change from call to call, in values alone; everything else
            stays as it is, a `Pyramid` or a NumPy array too, and what the function finds elsewhere: to build a pyramid
            from each new image, plan a function that does; of arrays, pass torch.from_numpy(array). The function does
            all its work on this thread.

    Example:
        >>> def retina(image, fixation):
        ...     pyramid = lod.mipmap(image, backend="gl").upload()
        ...     return lod.log_polar(pyramid, fixation, 64, 128, backend="gl")
        >>> see = lod.plan(retina, image, fixation)
        >>> polar = see(next_image, next_fixation)

    Raises:
        InputError: no function, no tensor among the arguments, or one that asks for gradients.
        GpuLodError: what the function raises.
    """
    return Plan(function, args, kwargs)


class Plan:
    """Made by `plan`."""

    inputs: tuple[torch.Tensor, ...]
    """The tensors that the function reads, in the order in which `plan` was passed them, those by name last: in GL
    memory where they are images. Calls copy into them; write into them and pass nothing to save that copy."""
    replays: bool
    """True if a call repeats recorded GL commands or a CUDA graph, False if it calls the function."""
    reason: str
    """Why."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        if not callable(function):
            raise InputError(f"function is a {type(function).__name__}; expected a verb, or a function of tensors.")
        self._function = function
        leaves, self._spec = _pytree.tree_flatten((args, kwargs), is_leaf=lambda leaf: isinstance(leaf, Pyramid))
        self._places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        given = [leaves[place] for place in self._places]
        if not given:
            raise InputError("no argument is a tensor, so nothing could change between calls; pass what does as one.")
        for tensor in given:
            checks.ordinary(tensor, "an argument of the plan")
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
            raise InputError("a plan gives no gradients, and an argument asks for them: pass tensor.detach().")
        self._pyramids = [leaf for leaf in leaves if isinstance(leaf, Pyramid)]
        self._leaves = leaves
        self._ctx: Context | None = None
        self._graph: Callable[[], None] | None = None
        self.replays = False
        with torch.no_grad():
            self._prepare(given)

    def _prepare(self, given: list[torch.Tensor]) -> None:
        recording.decides("it makes a plan")
        results = self._call(given)  # raises what the function raises, before anything else
        # Only results tell of a pyramid that the function finds elsewhere.
        devices = [one.device for one in (*given, *self._pyramids, *_tensors_and_pyramids(results))]
        self._device = next((device for device in devices if device.type != "cpu"), devices[0])
        del results
        self.inputs = tuple(self._home(None, tensor) for tensor in given)
        if recording.current() is not None:
            self.reason = "a plan that is made while another one is recorded runs the function"
            return
        if self._device.type not in ("cpu", "cuda"):
            self.reason = f"its tensors are on {self._device}, and OpenGL shares memory with CPU and CUDA tensors"
            return
        if not self._record(given) and self._device.type == device.KIND:
            self._capture()

    def _record(self, given: list[torch.Tensor]) -> bool:
        """GL commands. False if there are none."""
        try:
            uploaded = next((c for p in self._pyramids if (c := p.texture_context())), None)
            ctx = uploaded or context_for(*given, device=self._device)
            homes = tuple(self._home(ctx, tensor) for tensor in given)
            with ctx.active(self._device):  # which it may share no memory with
                pass
        except Exception as error:
            self.reason = f"OpenGL cannot be used here ({type(error).__name__}: {error})"
            return False
        self._call(homes)  # programs and tables that only these inputs need
        with ctx.active(self._device):
            # What hardware makes is there once it was waited for.
            found = recording.Recording(homes, ctx.bridge.coherent and ctx.software)
            try:
                with found.running(ctx.gl):
                    results = self._call(homes)
            except recording.AbandonedError:
                pass
            except Exception as error:  # it ran twice before: what stands in its way is being recorded
                found.stop(f"recording it ended with {type(error).__name__}: {error}")
            self._shared = ctx.bridge.taken()
            if found.obstacle is not None:
                found.mend()
        if not found.tape:
            found.stop("OpenGL has no part in it")
        if found.obstacle is not None:
            self.reason = f"each call runs the function: {found.obstacle}"
            return bool(found.tape)
        self._ctx, self._recorded, self.inputs = ctx, found, homes
        reason = f"{len(found.tape)} GL commands are repeated on {ctx.renderer}"
        self._repeats(results, found.pyramids, reason, found.elsewhere())
        return True

    def _capture(self) -> None:
        """A CUDA graph: of torch's own operations and of backend="cuda"."""
        elsewhere = next((home.device for home in self.inputs if home.device != self._device), None)
        if elsewhere is not None:
            self.reason = (
                f"each call runs the function: an input is on {elsewhere}, and a CUDA graph would keep its first values"
            )
            return
        try:
            with recording.pyramids_noted() as noted:
                self._call(self.inputs)
            graph, results = captured(lambda: self._call(self.inputs), self._device)
        except Exception as error:  # it ran before: what stands in its way is being captured
            self.reason = f"each call runs the function: capturing it ended with {type(error).__name__}: {error}"
            return
        # Those that the function did not build itself are still there.
        read = [(pyramid, pyramid.state[0]) for one in noted if (pyramid := one()) is not None]
        self._graph = graph
        self._repeats(results, read, f"a CUDA graph is repeated on {self._device}")

    def _repeats(
        self,
        results: Any,
        read: list[tuple[Any, Any]],
        reason: str,
        elsewhere: Sequence[torch.Tensor] = (),
    ) -> None:
        self._results, self._read = results, read
        leaves = _tensors_and_pyramids(results)
        self._outputs = [(leaf, leaf.state[1]) for leaf in leaves if isinstance(leaf, Pyramid)]
        self._tensors = [leaf for leaf in _pytree.tree_leaves(leaves) if isinstance(leaf, torch.Tensor)]
        seen = [tensor for tensor in (*self.inputs, *self._tensors, *elsewhere) if tensor.layout == torch.strided]
        one_each = {storage_start(tensor): tensor for tensor in seen}  # all levels of a chain lie in one storage
        self._starts = [(tensor, start) for start, tensor in one_each.items()]
        self._tensors = [tensor for tensor in self._tensors if not tensor.is_inference()]
        self.replays, self.reason = True, reason

    @staticmethod
    def _home(ctx: Context | None, tensor: torch.Tensor) -> torch.Tensor:
        """A copy that stays: of an image in GL memory, of small tables where they are."""
        with torch.inference_mode(False):
            if ctx is not None and tensor.ndim >= 3 and tensor.dtype in _IN_GL:
                home = ctx.empty(tuple(tensor.shape), dtype=tensor.dtype, device=tensor.device)
            else:
                home = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            return home.copy_(tensor)

    def _call(self, tensors: Sequence[torch.Tensor]) -> Any:
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = _pytree.tree_unflatten(leaves, self._spec)
        return self._function(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            "a Plan holds commands and memory of this process and cannot be copied or pickled: plan the function where "
            "it is to run."
        )

    def __repr__(self) -> str:
        name = getattr(self._function, "__name__", repr(self._function))
        shapes = ", ".join(f"{str(t.dtype)[6:]} {tuple(t.shape)}" for t in self.inputs)
        return f"<gpu_lod.Plan of {name}({shapes}): {self.reason}>"

    def __call__(self, *tensors: torch.Tensor, **named: Any) -> Any:
        """Run it on new values.

        Args:
            tensors: as many as there are `inputs`, in their order, of their shapes, dtypes and devices; or none, for
                what `inputs` hold.
            named: nothing; tensors that the plan was made with by name are passed by position too.

        Returns:
            What the function returns. Where the plan replays, these are the same tensors at each call, overwritten by
            the next one, which counts as a change in place: clone what must last. Another thread's call is a next one
            too: make a plan for each thread, or clone inside `with gpu_lod.Context():`, as the call itself.

        Raises:
            InputError: other tensors than it was planned for.
            PyramidChangedError: a pyramid that the function did not build itself was written to.
            BufferMovedError: a tensor that it reads or returned was given other memory.
            ContextClosedError: the OpenGL context that it was recorded on was closed.
            UnsupportedError: a tensor of torch.func or of forward mode.
            GpuLodError: what the function's verbs raise for bad values.
        """
        if named:
            raise InputError(
                f"{', '.join(named)} came by name, and a plan takes tensors alone, by position, in the order in which "
                f"it was passed them: {len(self.inputs)}, or none for what its inputs hold. Other arguments stay as "
                "they were: make another plan for others."
            )
        # Compiled code is left for the call: what is traced has no memory to copy from.
        return _alone(self, tensors) if torch.compiler.is_compiling() else self._run(tensors)

    def _run(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        if tensors:
            self._check(tensors)
        if recording.current() is not None:  # another plan records: it wants the commands, not a repetition
            return self._call(tensors or self.inputs)
        if not self.replays:
            with torch.no_grad():
                # What came, not the copies, which another thread's call writes to meanwhile, and which results may be.
                apart = bool(tensors) and self._apart(tensors)
                self._copy(tensors)
                return self._call(tensors if apart else self.inputs)
        for pyramid, versions in self._read:
            if pyramid.state[0] != versions:
                raise PyramidChangedError(
                    "a pyramid that this plan reads was written to since it was planned. Plan again, or plan a "
                    "function that builds the pyramid."
                )
        if any(storage_start(tensor) != start for tensor, start in self._starts):
            raise BufferMovedError(
                "a tensor that this plan reads or returns has other memory than when it was planned, as tensors get by "
                "share_memory_() and on their way through a queue to another process, and its commands know the old "
                "one alone. Plan the function again, and share or send a clone()."
            )
        with torch.no_grad():
            if self._graph is None:
                self._give_commands(tensors)
            else:
                self._copy(tensors)
                self._graph()
        increment_version(self._tensors)  # torch did not see that they were written to
        for pyramid, made in self._outputs:
            pyramid.renew(made)
        return self._results

    def _give_commands(self, tensors: tuple[torch.Tensor, ...]) -> None:
        ctx, found = self._ctx, self._recorded
        assert ctx is not None
        if ctx.closed:
            raise ContextClosedError("the context that this plan was recorded on was closed: plan the function again.")
        with ctx.active(self._device):
            self._copy(tensors)
            for converted, source in found.conversions:
                converted.copy_(source)
            for check, values in found.checks:
                check(values)
            try:
                for write, arguments in found.writes:
                    write(*arguments)
                ctx.bridge.hand_over(self._shared)
                for command, arguments in found.tape:
                    command(*arguments)
            except BaseException:
                found.mend()
                raise

    def _homes(self) -> set[int]:
        return {storage_start(home) for home in self.inputs}

    def _apart(self, tensors: tuple[torch.Tensor, ...]) -> bool:
        """Whether none of these is in an input's memory."""
        homes = self._homes()
        return not any(storage_start(tensor) in homes for tensor in tensors)

    def _copy(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """New values into the inputs, all at once where they are inputs themselves."""
        homes = self._homes()
        fresh = [
            tensor.clone() if tensor is not home and storage_start(tensor) in homes else tensor
            for home, tensor in zip(self.inputs, tensors, strict=False)
        ]
        for home, tensor in zip(self.inputs, fresh, strict=False):
            if tensor is not home:
                if self._ctx is not None:
                    put(self._ctx, home, tensor)
                else:
                    home.copy_(tensor)

    def _check(self, tensors: tuple[Any, ...]) -> None:
        if len(tensors) != len(self.inputs):
            raise InputError(
                f"{len(tensors)} tensors came; this plan takes {len(self.inputs)}, those among the arguments it was "
                "made with, or none for what its inputs hold."
            )
        for tensor, home in zip(tensors, self.inputs, strict=True):
            if (
                not isinstance(tensor, torch.Tensor)
                or tensor.shape != home.shape
                or tensor.dtype != home.dtype
                or tensor.device != home.device
            ):
                came = (
                    f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
                    if isinstance(tensor, torch.Tensor)
                    else type(tensor).__name__
                )
                raise InputError(
                    f"a tensor is {came}; it was planned for {home.dtype} {tuple(home.shape)} on {home.device}. Make "
                    "another plan for other shapes."
                )
            checks.ordinary(tensor, "a tensor")
            if checks.transformed(tensor):
                raise UnsupportedError(
                    "a plan repeats work on memory of its own, and knows no forward mode, no torch.func.grad, jvp or "
                    "vmap. Call the function itself there, with backend='torch'."
                )
            if tensor.requires_grad and torch.is_grad_enabled():
                raise InputError("a plan gives no gradients, and an input asks for them: pass tensor.detach().")


def _tensors_and_pyramids(results: Any) -> list[Any]:
    return [leaf for leaf in _leaves(results) if isinstance(leaf, (torch.Tensor, Pyramid))]


def _leaves(results: Any) -> Iterator[Any]:
    """What is in nested containers, dataclasses too, which torch takes for leaves; a pyramid is one."""
    for leaf in _pytree.tree_leaves(results, is_leaf=lambda leaf: isinstance(leaf, Pyramid)):
        if is_dataclass(leaf) and not isinstance(leaf, (type, Pyramid)):
            for field in fields(leaf):
                yield from _leaves(getattr(leaf, field.name, None))
        else:
            yield leaf


_alone = apart(Plan._run)
