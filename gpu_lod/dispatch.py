"""Which backend runs a verb, and how gradients pass through the GL one. Verbs register here; this imports none."""

from __future__ import annotations

import functools
import inspect
import math
import typing
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, ParamSpec, TypeVar, cast

import torch
from torch.utils import data

from gpu_lod import calibration, checks, precision
from gpu_lod.context import Context, context_for, why_not
from gpu_lod.errors import (
    CaptureError,
    GpuLodWarning,
    InputError,
    KernelError,
    LimitError,
    OutOfMemoryError,
    ShaderError,
    UnsupportedError,
)
from gpu_lod.kernels import device as kernels
from gpu_lod.pyramid import Pyramid
from gpu_lod.saved_tensors import saved
from gpu_lod.tables import GL, Question

P = ParamSpec("P")
R = TypeVar("R")

Backend = Literal["auto", "gl", "cuda", "torch"]
BACKENDS = ("auto", "gl", "cuda", "torch")


@dataclass(frozen=True)
class Choice:
    """What runs a call, and why."""

    backend: Literal["gl", "cuda", "torch"]
    reason: str
    generator: str | None = None
    figures: dict[str, float] = field(default_factory=dict, hash=False)
    """The measured milliseconds by way ("torch", "gl compute"), where times decided."""

    def __str__(self) -> str:
        name = self.backend if self.generator is None else f"{self.backend} ({self.generator})"
        return f"{name}: {self.reason}"


torch.serialization.add_safe_globals([Choice])  # torch.load's weights_only

_choosers: dict[Callable[..., Any], Callable[..., Choice]] = {}
_with_kernels: list[str] = []


def register(verb: Callable[..., Any], choose: Callable[..., Choice], *, cuda: bool = False) -> None:
    """Let `explain` know how a verb chooses; `choose` takes the verb's own arguments.

    Args:
        cuda: the verb takes backend="cuda".
    """
    _choosers[verb] = choose
    if cuda:
        _with_kernels.append(verb.__name__)


def check_backend(backend: Any, *, cuda: bool = False) -> None:
    """Raises for what is no backend, and for backend="cuda" where the verb has no CUDA kernel.

    Args:
        cuda: it has one.
    """
    checks.choice(backend, "backend", BACKENDS)
    if backend == "cuda" and not cuda:
        raise UnsupportedError(
            f"backend='cuda': there is no CUDA kernel for this verb; {', '.join(sorted(_with_kernels))} have one. Use "
            "backend='gl' or 'torch'."
        )


def explain(verb: Callable[..., Any], *args: Any, **kwargs: Any) -> Choice:
    """What `verb(*args, **kwargs)` would run on, and why. Computes nothing.

    Example:
        >>> print(lod.explain(lod.mipmap, image))
        torch: ...

    Raises:
        InputError: not a verb of gpu_lod, or arguments from which no backend can be chosen (the verb checks more).
    """
    if not callable(verb) or verb not in _choosers:
        known = ", ".join(sorted(function.__name__ for function in _choosers))
        raise InputError(f"{getattr(verb, '__name__', verb)!r} chooses no backend; the verbs that do are {known}.")
    try:
        inspect.signature(verb).bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(f"{verb.__name__}: {error}. Pass explain what the call itself would be passed.") from None
    return _choosers[verb](*args, **kwargs)


def chooser(verb: Callable[..., Any]) -> Callable[..., Choice] | None:
    """What chooses for a verb, if its backends are more than one."""
    return _choosers.get(verb)


@functools.cache
def ways(verb: str, *, cuda: bool = False) -> tuple[str, ...]:
    """What "auto" may take for a verb, by its name: "torch", and backends with their generators.

    Args:
        cuda: for CUDA tensors.
    """
    function = inspect.unwrap(next(known for known in _choosers if known.__name__ == verb))
    generators = typing.get_args(typing.get_type_hints(function).get("generator"))
    result = ["torch"]
    for backend in BACKENDS:
        if backend == "gl" and generators:
            result += [f"gl {name}" for name in generators if name not in _ONLY_BY_NAME]
        elif backend == "gl" or (cuda and backend == "cuda" and verb in _with_kernels):
            result.append(backend)
    return tuple(result)


def named(way: str) -> dict[str, str]:
    """The keyword arguments by which a verb takes a way: "gl compute" is backend "gl" with generator "compute"."""
    backend, _, generator = way.partition(" ")
    return {"backend": backend, **({"generator": generator} if generator else {})}


_ONLY_BY_NAME = ("auto", "driver", "sampler", "single-pass-texture")
"""The driver rounds at every level and leaves odd sides open, the min/max filter takes no NaN, and bilinear fetches are
as precise as the texture unit places them."""


_IN_THE_WAY = (LimitError, UnsupportedError, ShaderError, KernelError, CaptureError)
"""What a backend raises for what it cannot do on this device, though torch might."""


def with_way_on(verb: Callable[P, R]) -> Callable[P, R]:
    """A verb that goes on where "auto" took a backend that cannot do this: in plain torch if its limits are reached; by
    the next backend that measures fastest, or torch, if its driver refuses the shader, which is told once. What was
    asked for by name raises."""
    signature = inspect.signature(verb)

    @functools.wraps(verb)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return within_memory(verb, *args, **kwargs)
        except _IN_THE_WAY as error:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            if bound.arguments.get("backend") != "auto":
                raise
            choose = next(choose for known, choose in _choosers.items() if known.__name__ == verb.__name__)
            chosen = choose(*bound.args, **bound.kwargs)
            if chosen.backend == "torch":
                raise
            problem = error
        with calibration.hearing() as questions:  # a verb may ask under another one's name
            choose(*bound.args, **bound.kwargs)
        # None was asked where a generator, or a texture, was asked for by name.
        refuses = bool(questions) and isinstance(problem, (ShaderError, KernelError))
        following = "torch"
        if refuses:
            job = questions[0].verb, _first_tensor(bound.arguments.values()).device
            calibration.refuse(job, chosen.backend, f"backend={chosen.backend!r} failed before: {problem}")
            following = choose(*bound.args, **bound.kwargs).backend
        try:
            if following == "torch":
                bound.arguments["backend"] = "torch"
                result = within_memory(verb, *bound.args, **bound.kwargs)
            else:
                result = call(*args, **kwargs)
        except _IN_THE_WAY:
            if refuses:
                calibration.forgive(job, chosen.backend)
            raise problem from None  # it is nothing for the others either
        if refuses:
            now = choose(*bound.args, **bound.kwargs).backend
            how = "in plain torch" if now == "torch" else f"with backend={now!r}"
            warnings.warn(
                f"{job[0]} goes on {how} for tensors on {job[1]}; backend={chosen.backend!r} failed: {problem}",
                GpuLodWarning,
                stacklevel=3,
            )
        return result

    return call


_NO_ROOM = "DefaultCPUAllocator", "Storage size calculation overflowed"


def within_memory(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """A call, with a name for what torch has none for: that a CPU's memory does not suffice. CUDA's has one."""
    try:
        return function(*args, **kwargs)
    except RuntimeError as error:
        if not any(words in str(error) for words in _NO_ROOM):
            raise
        raise OutOfMemoryError(
            f"the result, or what plain torch makes on the way, does not fit memory ({error}). Ask for less, or pass "
            "fewer images at once."
        ) from None


def _first_tensor(values: Iterable[Any]) -> torch.Tensor:
    tensors = (value.levels[0] if isinstance(value, Pyramid) else value for value in values)
    return next(value for value in tensors if isinstance(value, torch.Tensor))


def barred(*values: Any) -> Choice | None:
    """Why "auto" takes torch for these tensors whatever the times are, or None."""
    if torch.compiler.is_compiling():
        return Choice("torch", "asked again when the graph runs")
    for value in values:
        if isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "cuda"):
            return Choice(
                "torch", f"the tensor is on {value.device}, and OpenGL shares memory with CPU and CUDA tensors only"
            )
    if any(map(checks.transformed, values)):
        return Choice("torch", "torch.func transforms what torch computes, and no shader")
    if any(map(checks.memoryless, values)) or checks.faked():
        return Choice("torch", "the tensor has no memory of its own, and shaders need it")
    if checks.traced():
        return Choice("torch", "the call is traced, and shaders leave no trace")
    return None


SURE_SIDE = 2**14
"""What textures of every device with OpenGL 4.3 hold."""


def barred_texture(src: torch.Tensor | Pyramid) -> Choice | None:
    """Why "auto" makes no texture of a source that is none yet, or None."""
    there = isinstance(src, Pyramid) and src.is_texture
    size = (src.levels[0] if isinstance(src, Pyramid) else src).shape[-2:]
    if not there and max(size) > SURE_SIDE:
        return Choice("torch", f"a side of {max(size)} may be more than a texture holds; backend='gl' tries")
    return None


def sampler(src: torch.Tensor | Pyramid, place: Any, name: str, *, once: bool = False) -> Choice | None:
    """What "auto" takes for a verb that samples an image or a pyramid at a place (`name`: fixation or sites), wherever
    GL could not gain; None where the times decide.

    Args:
        once: they do so also for pyramids that are no texture yet; without it, only where kernels run, which need none.
    """
    top = src.levels[0] if isinstance(src, Pyramid) else src
    found = barred(top, place)
    if found is not None:
        return found
    if isinstance(place, torch.Tensor) and place.requires_grad:
        return Choice("torch", f"gradients are asked for in the {name}")
    if by_kernels(top):
        return None
    if once:
        return barred_texture(src)
    if isinstance(src, Pyramid) and not src.is_texture:
        return Choice("torch", "the pyramid is no texture yet; pyramid.upload() pays when it is sampled several times")
    return None


def by_kernels(image: torch.Tensor) -> bool:
    """Whether "auto" may take CUDA kernels for a sampler of it, which read any pyramid as fast."""
    return image.device.type == kernels.KIND and kernels.usable(image.device)


NO_TEXTURE = "no texture yet"
"""State of a source that OpenGL makes a texture first."""


def textured(there: bool, *states: str) -> str:
    """What the times of a sampler depend on beside sizes: whether its source is a texture, and other states."""
    return ", ".join(filter(None, (*states, "" if there else NO_TEXTURE)))


def measured(
    verb: str,
    image: torch.Tensor,
    work: int,
    *,
    state: str = "",
    channels: int = 0,
    batch: int = 1,
    dtype: torch.dtype | None = None,
    context: Context | None = None,
    adjoint: bool = False,
) -> Choice:
    """What "auto" takes by the times in force, once nothing is in the way of the shaders (`barred`). Opens a context
    only where OpenGL may be fastest.

    Args:
        adjoint: whether its backward is an adjoint of its own, and no forward in plain torch.
        work, state, channels, batch, dtype: what the times depend on, as in `tables.Question`; dtype None is the
            image's.
        context: where the call would run, if that is known.
    """
    device, dtype = image.device, dtype or image.dtype
    threads = torch.get_num_threads()
    # Half octaves: sizes between are decided alike.
    key: tuple[Any, ...] = (verb, state, channels, dtype, batch, round(2 * math.log2(max(work, 1))), device, threads)
    hear = calibration.listener()
    if hear is not None:
        hear(_question(key, work))
        return Choice("torch", "only the question was asked for")
    refused = calibration.refused.get((verb, device), {})
    if "gl" in refused:
        return _without_gl(key, "; ".join(refused.values()))
    chosen = calibration.decided.get(key, _UNDECIDED)
    if chosen is _UNDECIDED:
        chosen = calibration.decided[key] = _decide(key, None)
    if chosen is not None:
        return _where_it_runs(cast(Choice, chosen), image, adjoint)
    try:
        context = context or context_for(image)
    except Exception as error:  # whatever a driver or a library raises, and after a fork
        return _without_gl(key, f"OpenGL cannot be used here: {error}")
    if not context.usable_here():
        return _without_gl(key, "the context that would be used belongs to another process or thread, or was closed")
    key = (*key, context.renderer, context.driver)
    chosen = calibration.decided.get(key)
    if chosen is None:
        chosen = calibration.decided[key] = _decide(key, (context.renderer, context.driver, context.software))
    return _where_it_runs(cast(Choice, chosen), image, adjoint)


_UNDECIDED = object()

BEFORE_BACKWARD = 2.0
"""How many times faster than torch OpenGL must be in a forward where a backward follows: after that torch's threads
spin on the cores of a software renderer, which takes twice as long for the next one."""

IN_A_WORKER = 1.3
"""The same in a worker of a DataLoader, where torch and a software renderer have one thread each: torch, which a second
one helps less, loses less by having none."""


def _where_it_runs(chosen: Choice, image: torch.Tensor, adjoint: bool) -> Choice:
    """What was chosen by the times of forwards alone on a machine, or torch, where a CPU has more to do."""
    if chosen.backend != "gl" or not checks.on_host(image):
        return chosen
    if needs_grad(image):
        if not adjoint:
            reason = "gradients are asked for, and OpenGL's backward begins with the forward in torch"
            return Choice("torch", reason, figures=chosen.figures)
        gain = BEFORE_BACKWARD
        reason = "gradients are asked for, after whose backward torch's threads are in OpenGL's way; without them"
    elif data.get_worker_info() is not None:
        gain, reason = IN_A_WORKER, "in a DataLoader's worker OpenGL has one core, as torch has; elsewhere"
    else:
        return chosen
    way = f"gl {chosen.generator}" if chosen.generator else "gl"
    if gain * chosen.figures.get(way, 0) > chosen.figures.get("torch", math.inf):
        return Choice("torch", f"{reason} {chosen.reason}", figures=chosen.figures)
    return chosen


def _question(key: tuple[Any, ...], work: int) -> Question:
    verb, state, channels, dtype, batch = key[:5]
    return Question(verb, state, channels, str(dtype).removeprefix("torch."), max(batch, 1), max(work, 1))


def _decide(key: tuple[Any, ...], gl: GL | None) -> Choice | None:
    """By the tables; None if that depends on the context."""
    device = key[6]
    verdict = _verdict(key, ways(key[0], cuda=device.type == "cuda"), gl)
    if device.type == "cuda" and (verdict is None or verdict.way == "torch"):
        problem = why_not(device)
        if problem is not None:
            return _without_gl(key, f"the tensor is on {device}, and OpenGL cannot share memory with it: {problem}")
    return None if verdict is None else _taken(verdict)


def _without_gl(key: tuple[Any, ...], problem: str) -> Choice:
    """By the tables, among the ways that are left where OpenGL is none."""
    known = (*key, problem)
    chosen = calibration.decided.get(known)
    if chosen is None:
        left = [way for way in ways(key[0], cuda=key[6].type == "cuda") if not way.startswith("gl")]
        verdict = _verdict(key, left, None)
        if verdict is None or verdict.way == "torch":
            chosen = Choice("torch", problem)
        else:
            chosen = _taken(replace(verdict, reason=f"{verdict.reason}; {problem}"))
        calibration.decided[known] = chosen
    return cast(Choice, chosen)


def _verdict(key: tuple[Any, ...], among: Sequence[str], gl: GL | None) -> calibration.Verdict | None:
    half_octaves, device, threads = key[5:8]
    refused = calibration.refused.get((key[0], device), {})
    left = [way for way in among if way.partition(" ")[0] not in refused]
    verdict = calibration.decide(_question(key, round(2 ** (half_octaves / 2))), left, device, threads, gl)
    if verdict is not None and refused:
        verdict = replace(verdict, reason="; ".join((verdict.reason, *refused.values())))
    return verdict


def _taken(verdict: calibration.Verdict) -> Choice:
    backend, _, generator = verdict.way.partition(" ")
    return Choice(cast(Any, backend), verdict.reason, generator or None, verdict.figures)


def needs_grad(*tensors: torch.Tensor) -> bool:
    if torch.is_grad_enabled():
        for tensor in tensors:  # by far quicker than `any` of a generator
            if tensor.requires_grad:
                return True
    return False


def keepable(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same for a graph, which keeps no tensors that were made in inference mode."""
    if torch.compiler.is_compiling():
        return tensors
    with torch.inference_mode(False):
        return tuple(x.clone() if x.is_inference() else x for x in tensors)


def kept(points: torch.Tensor, levels: Sequence[torch.Tensor]) -> torch.Tensor:
    """Values for a backward, which needs them as they are now."""
    return points.detach().clone() if needs_grad(*levels) else points.detach()


def pull(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    *,
    again: bool = False,
) -> Sequence[torch.Tensor | None]:
    """Gradients in the inputs from those in the outputs; None for an input that no output rests on."""
    pairs = [
        (output, gradient)
        for output, gradient in zip(outputs, gradients, strict=True)
        if gradient is not None and output.requires_grad
    ]
    if not pairs:
        return [None] * len(inputs)
    return torch.autograd.grad(
        [output for output, _ in pairs],
        inputs,
        [gradient for _, gradient in pairs],
        allow_unused=True,
        create_graph=again,
    )


def differentiated(
    function: Callable[..., Sequence[torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    wanted: Sequence[bool],
    gradients: Sequence[torch.Tensor | None],
) -> list[torch.Tensor | None]:
    """Inside a backward: the gradients in the inputs of a function in plain torch, which is called again, by torch's
    own graph; None for those that are not wanted."""
    again = torch.is_grad_enabled()  # for gradients of gradients
    with torch.enable_grad():
        # Views, for gradients of gradients: an input may rest on another one, as a level does on the image, and what
        # passes between them is not this function's.
        inputs = [t.view_as(t) if again else t.detach().requires_grad_(w) for t, w in zip(inputs, wanted, strict=True)]
        outputs = function(*inputs)
        found = iter(pull(outputs, [t for t, w in zip(inputs, wanted, strict=True) if w], gradients, again=again))
    return [next(found) if w else None for w in wanted]


def writable(results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """What a custom function returns: torch lets nobody write to a view that one has made, as levels of one buffer are,
    and these are views to torch no more. What is an input's memory is copied: nobody would tell that it was written
    to."""
    if any(map(checks.transformed, (*results, *inputs))):
        return tuple(tensor.data if tensor._is_view() else tensor for tensor in results)
    return tuple(_apart(tensor, inputs) for tensor in results)


def _apart(tensor: torch.Tensor, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    core: Any = torch._C  # its annotations lack this one
    if any(core._is_alias_of(tensor, one) for one in inputs):
        return tensor.clone()
    return tensor.data if tensor._is_view() else tensor


class _WithReferenceGradient(torch.autograd.Function):
    """Forward on GL or CUDA; the backward of the plain-torch reference, which for linear verbs is the exact adjoint."""

    @staticmethod
    def forward(ctx: Any, forward: Any, reference: Any, *inputs: torch.Tensor) -> Any:
        ctx.reference = reference
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)  # of zeros in a level that nobody used NaN makes NaN
        return writable(forward(*inputs), inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        inputs = saved(ctx)
        with precision.full():
            return (None, None, *differentiated(ctx.reference, inputs, ctx.needs_input_grad[2:], gradients))


def with_reference_gradient(
    forward: Callable[..., Any], reference: Callable[..., Any], *inputs: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """`forward(*inputs)`, a sequence of tensors made by shaders or kernels, differentiable if an input asks for it.

    Args:
        forward: shader or kernel path.
        reference: the same in plain torch; called again in the backward.
    """
    if needs_grad(*inputs):
        result: tuple[torch.Tensor, ...] = _WithReferenceGradient.apply(forward, reference, *keepable(*inputs))
        return result
    return tuple(forward(*inputs))
