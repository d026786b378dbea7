"""Verbs, and other functions that look at values, as custom ops: what torch.compile and torch.export put into a graph
where eager code runs them.

An op runs the eager verb, so values, backends and contexts are looked at when the graph runs. Its fake tells shapes and
dtypes alone, and its backward is an op too: the vector-Jacobian product of the verb in plain torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, ParamSpec, TypeVar

import numpy as np
import torch
from torch.autograd import forward_ad
from torch.utils import _pytree

from gpu_lod import checks, dispatch, heap, precision
from gpu_lod.adjoints import without_values
from gpu_lod.errors import UnsupportedError
from gpu_lod.pyramid import OWN_LEVEL_0, Pyramid
from gpu_lod.saved_tensors import saved, watched
from gpu_lod.uncompiled import apart, in_one_piece, of_its_own, would_compile

P = ParamSpec("P")
R = TypeVar("R")

_library = torch.library.Library("gpu_lod", "FRAGMENT")
_TORCH = {"backend": "torch", "generator": "auto"}
_CONVERSION = ("mean", "std", "dtype")
"""Parameters that make level 0 of a pyramid something else than the source."""
_SAVED = object()
_TYPES = {
    int: "SymInt",
    float: "float",
    str: "str",
    bool: "bool",
    torch.dtype: "ScalarType",
    Sequence[float]: "float[]",
    Sequence[int]: "SymInt[]",
}
_PLAIN = (int, float, str, torch.dtype, torch.SymInt, torch.SymFloat, torch.SymBool)
"""Python's own numbers, and those that a graph does not know yet."""
operators: dict[str, Operator] = {}
"""By the names of the verbs."""
functions: dict[str, Operator] = {}
"""Of functions that are no verbs, by their names."""


def verb(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a verb: compiled code calls its op, everything else the function itself, in full precision and with an
    eye on what torch keeps of it."""
    full = precision.in_full(dispatch.with_way_on(function))

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            result: R = operators[function.__name__].traced(*args, **kwargs)
            return result
        if would_compile():
            return alone(*args, **kwargs)
        heap.keep_freed()
        with watched((*args, *kwargs.values())):
            return full(*args, **kwargs)

    alone = apart(call)
    return functools.wraps(function)(of_its_own(call, function))


def register(verb: Callable[..., Any], fake: Callable[..., Any], *, differentiable: bool = True) -> None:
    """Make a verb an op, `torch.ops.gpu_lod.<verb>`. After `dispatch.register`, whose chooser refuses while tracing; of
    a verb that has none the fake does.

    Args:
        verb: decorated; its annotations give the op's schema.
        fake: takes the verb's arguments and returns what it returns, made of `new_empty`: dense tensors, which differ
            from the arguments but for level 0 of a pyramid that holds its source.
        differentiable: False for a verb that gives no gradients.
    """
    operator = operators[verb.__name__] = Operator(verb, fake, differentiable, dispatch.chooser(verb) or fake)
    operator.is_verb = True


def function(fake: Callable[..., Any], *, differentiable: bool = True) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function of tensors that is no verb, and looks at values, which a graph has not: compiled code calls
    its op, everything else the function itself.

    Args:
        fake: as of a verb; it refuses what the function does of shapes, dtypes and numbers.
        differentiable: False for a function that gives no gradients.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        operator = functions[function.__name__] = Operator(function, fake, differentiable, fake)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if torch.compiler.is_compiling():
                result: R = operator.traced(*args, **kwargs)
                return result
            return function(*args, **kwargs)

        return in_one_piece(call)

    return decorate


class Operator:
    """A verb's op and the op of its backward.

    A Pyramid among the arguments becomes two arguments, its levels and what they hold: `Tensor[] src, str? src_holds`
    (None for an image, and no levels for nothing). A Pyramid that is returned becomes the levels that are not the
    source, and another dataclass or a named tuple its fields, whole numbers as tensors.

    Args:
        refuses: what raises for arguments that are wrong whatever their values.
    """

    is_verb = False

    def __init__(
        self,
        verb: Callable[..., Any],
        fake: Callable[..., Any],
        differentiable: bool,
        refuses: Callable[..., Any] | None = None,
    ) -> None:
        self.verb = inspect.unwrap(verb)
        self.eager = precision.in_full(dispatch.with_way_on(self.verb))
        self.fake = fake
        self.differentiable = differentiable
        self.refuses = refuses
        self.signature = inspect.signature(self.verb)
        parameters = self.signature.parameters
        self.defaults = {name: parameter.default for name, parameter in parameters.items()}
        self.placed = sum(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters.values())
        self.needed = sum(default is inspect.Parameter.empty for default in self.defaults.values())
        hints = typing.get_type_hints(self.verb)
        self.returns = hints["return"]
        # A texture, which feature_maps may return too, is refused in compiled code.
        self.returns_tensor = torch.Tensor in (typing.get_args(self.returns) or (self.returns,))
        if typing.get_origin(self.returns) is tuple:
            self.returns_tensor = False
        self.whole = None
        if dataclasses.is_dataclass(self.returns) and self.returns is not Pyramid:
            self.whole = [field.type == "int" for field in dataclasses.fields(self.returns)]
        elif hasattr(self.returns, "_fields"):
            self.whole = [False] * len(self.returns._fields)
        written = [_parameter(name, hints[name], parameter.default) for name, parameter in parameters.items()]
        # Numbers become tensors where a verb takes either: a fixation, a threshold.
        self.numbers = tuple(
            hints[name] is Any or {float, torch.Tensor} <= {*typing.get_args(hints[name])} for name in parameters
        )
        # Whole numbers, too, but tensors and arrays of them keep their dtype: where positions start.
        self.integers = tuple({int, torch.Tensor} <= {*typing.get_args(hints[name])} for name in parameters)
        self.tensors = tuple(parameter.startswith("Tensor") for parameter in written)
        self.pyramids = tuple("_holds" in parameter for parameter in written)
        # Without defaults: torch would leave out arguments that are equal to them.
        arguments = ", ".join(written)
        returns = "Tensor" if self.returns_tensor else "Tensor[]"
        name = f"gpu_lod::{self.verb.__name__}"
        op = torch.library.custom_op(name, self._run, mutates_args=(), schema=f"({arguments}) -> {returns}")
        op.register_fake(self._fake)
        self.op = op._opoverload
        if not differentiable:
            return
        op.register_autograd(self._backward, setup_context=self._setup_context)
        # Not by custom_op, whose own gradient this one would have to give.
        back = f"{self.verb.__name__}_backward"
        _library.define(f"{back}(Tensor[] gradients, int[] of, bool[] wanted, {arguments}) -> Tensor[]")
        _library.impl(back, self._run_backward, "CompositeExplicitAutograd")
        torch.library.register_fake(f"gpu_lod::{back}", self._fake_backward, lib=_library)
        self.adjoint = getattr(torch.ops.gpu_lod, back).default

    def traced(self, *args: Any, **kwargs: Any) -> Any:
        """What stands in a graph for a call of the verb."""
        if forward_ad._current_level >= 0:  # torch would drop the tangent
            raise UnsupportedError("compiled verbs have no forward-mode gradients. Call the function uncompiled.")
        if checks.transforming():
            raise UnsupportedError("compiled verbs know no torch.func. Call the function uncompiled.")
        flat = self.arguments(*args, **kwargs)
        if not self.differentiable:
            flat = [_detached(value) for value in flat]
        given = self._unflatten(flat)
        if self.refuses is not None:
            self.refuses(*given)
        if self.returns is not Pyramid:
            return self._record(self.op(*flat))
        like = self.fake(*given)
        source = 0 if self._owns_level_0(like, given) else 1
        levels = self.op(*flat) if len(like) > source else []
        return Pyramid((*like.levels[:source], *levels), like.reduce, "compiled")

    # -- the verb's arguments and the op's --------------------------------------------------------------------------

    def arguments(self, *args: Any, **kwargs: Any) -> list[Any]:
        """The op's arguments for a call of the verb."""
        flat: list[Any] = []
        values = self._values(args, kwargs)
        for place, value in enumerate(values):
            if isinstance(value, Pyramid):
                flat += [list(value.levels), value.reduce]
            elif self.pyramids[place]:
                flat += [[] if value is None else [value], None]
            elif not self.tensors[place]:
                flat.append(_plain(value))
            elif value is None or isinstance(value, torch.Tensor):
                flat.append(value)
            elif self.numbers[place] or (self.integers[place] and isinstance(value, (int, float))):
                flat.append(_numbers(value))
            else:
                flat.append(torch.as_tensor(value) if isinstance(value, np.ndarray) else value)
        return flat

    def _values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Of each parameter. As `inspect` binds them, but that takes a fifth of the time in which a call is traced."""
        names, count = tuple(self.defaults), len(args)
        values = {**self.defaults, **dict(zip(names, args, strict=False)), **kwargs}
        wrong = len(values) > len(names) or count > self.placed
        for place, name in enumerate(names[: max(count, self.needed)]):
            wrong = wrong or (name in kwargs) == (place < count)  # twice, or not at all
        if wrong:
            self.signature.bind(*args, **kwargs)  # says what is wrong
        return list(values.values())

    def _unflatten(self, flat: Sequence[Any]) -> list[Any]:
        values = iter(flat)
        return [self._pyramid(next(values), next(values)) if pyramid else next(values) for pyramid in self.pyramids]

    @staticmethod
    def _pyramid(levels: list[torch.Tensor], holds: Any) -> Any:
        if not levels:
            return None
        return levels[0] if holds is None else Pyramid(tuple(levels), holds)

    def _record(self, outputs: Any) -> Any:
        """What a verb returns, if that is a dataclass of tensors and whole numbers."""
        if self.whole is None:
            return outputs if self.returns_tensor else tuple(outputs)
        return self.returns(*[out.item() if whole else out for out, whole in zip(outputs, self.whole, strict=True)])

    def _owns_level_0(self, result: Pyramid, given: Sequence[Any]) -> bool:
        """Whether level 0 of what these arguments give is something else than the source."""
        named = zip(self.signature.parameters, given, strict=True)
        return result.reduce in OWN_LEVEL_0 or any(name in _CONVERSION and value is not None for name, value in named)

    def _outputs(self, result: Any, given: Sequence[Any]) -> list[torch.Tensor]:
        if isinstance(result, Pyramid):
            return list(result.levels if self._owns_level_0(result, given) else result.levels[1:])
        if dataclasses.is_dataclass(result):
            values = [getattr(result, field.name) for field in dataclasses.fields(result)]
            return [value if isinstance(value, torch.Tensor) else torch.tensor(value, device="cpu") for value in values]
        return [result] if isinstance(result, torch.Tensor) else list(result)

    def _packed(self, outputs: list[torch.Tensor]) -> Any:
        return outputs[0] if self.returns_tensor else outputs

    # -- the kernels ------------------------------------------------------------------------------------------------

    def _run(self, *flat: Any) -> Any:
        given = self._unflatten(flat)
        found = self.eager(**dict(zip(self.defaults, given, strict=True)))
        return self._packed(_apart(self._outputs(found, given), flat))

    def _fake(self, *flat: Any) -> Any:
        given = self._unflatten(flat)
        return self._packed(self._outputs(self.fake(*given), given))

    def _run_backward(
        self, gradients: list[torch.Tensor], of: list[int], wanted: list[bool], *flat: Any
    ) -> list[torch.Tensor]:
        """Gradients of some outputs, which are named: of zeros in a level that nobody used NaN makes NaN."""
        leaves, spec = _leaves(flat)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        places = [i for i, want in zip(places, wanted, strict=True) if want]

        alone = without_values() if self._needs_no_values(flat, wanted) else contextlib.nullcontext()
        with _autograd(), precision.full():
            asked = [leaves[place].detach().requires_grad_() for place in places]
            for place, leaf in zip(places, asked, strict=True):
                leaves[place] = leaf
            values = self._unflatten(_pytree.tree_unflatten(leaves, spec))
            given = {
                name: _TORCH.get(name, value) for name, value in zip(self.signature.parameters, values, strict=True)
            }
            with alone:
                outputs = self._outputs(self.verb(**given), values)
            found = dispatch.pull([outputs[place] for place in of], asked, gradients)
        pairs = zip(found, asked, strict=True)
        return _apart([torch.zeros_like(leaf) if one is None else one for one, leaf in pairs], (gradients, *flat))

    def _needs_no_values(self, flat: Sequence[Any], wanted: Sequence[bool]) -> bool:
        """Whether gradients are wanted only in what a verb has a backward of its own for: all but places, whose are a
        graph's, which reads what the verb makes on the way. Functions are graphs about verbs."""
        values, wants = iter(flat), iter(wanted)
        for place, pyramid in zip(self.numbers, self.pyramids, strict=True):
            given = [next(values), next(values)] if pyramid else [next(values)]
            asked = [next(wants) for _ in _tensors(given)]
            if place and any(asked):
                return False
        return self.is_verb

    def _fake_backward(
        self, gradients: list[torch.Tensor], of: list[int], wanted: list[bool], *flat: Any
    ) -> list[torch.Tensor]:
        return [t.new_empty(t.shape) for t, want in zip(_tensors(flat), wanted, strict=True) if want]

    @staticmethod
    def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        leaves, ctx.spec = _leaves(inputs)
        ctx.save_for_backward(*_tensors(leaves))
        ctx.leaves = [_SAVED if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def _backward(self, ctx: Any, gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "gradients of gradients do not pass through compiled verbs. Call the function without torch.compile."
            )
        asked, _ = _leaves(ctx.needs_input_grad)
        tensors = iter(saved(ctx))
        leaves = [next(tensors) if leaf is _SAVED else leaf for leaf in ctx.leaves]
        wanted = [want for want, leaf in zip(asked, ctx.leaves, strict=True) if leaf is _SAVED]
        flat = _pytree.tree_unflatten(leaves, ctx.spec)
        gradients = [gradients] if self.returns_tensor else gradients
        of = [place for place, gradient in enumerate(gradients) if gradient is not None]
        found = iter(self.adjoint([gradients[place] for place in of], of, wanted, *flat))
        return tuple(_pytree.tree_unflatten([next(found) if want else None for want in asked], ctx.spec))


@contextlib.contextmanager
def _autograd() -> Iterator[None]:
    """Autograd inside a kernel, where torch has it switched off."""
    with torch.enable_grad(), torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False):
        yield


def _parameter(name: str, hint: Any, default: Any) -> str:
    """A parameter of a verb as the schema of an op says it."""
    kinds: set[Any] = {str} if typing.get_origin(hint) is Literal else set(typing.get_args(hint)) or {hint}
    if hint in _TYPES or typing.get_origin(hint) is tuple:
        kinds = {hint}
    if Pyramid in kinds:
        return f"Tensor[] {name}, str? {name}_holds"
    if typing.get_origin(hint) is list:
        return f"Tensor[] {name}"
    optional = "?" if type(None) in kinds or default is None else ""
    if torch.Tensor in kinds or Any in kinds:  # Any: a fixation, which may be numbers
        kind = "Tensor"
    else:
        [plain] = kinds - {type(None)}
        kind = "SymInt[]" if typing.get_origin(plain) is tuple else _TYPES[plain]
    return f"{kind}{optional} {name}"


def _leaves(flat: Sequence[Any]) -> tuple[list[Any], Any]:
    """An op's arguments with lists of tensors taken apart, but not lists of numbers."""

    def numbers(value: Any) -> bool:
        return (
            isinstance(value, list)
            and value is not flat
            and bool(value)
            and not isinstance(value[0], (torch.Tensor, bool))
        )

    return _pytree.tree_flatten(flat, is_leaf=numbers)


def _numbers(value: Any) -> torch.Tensor:
    """Numbers as Python holds them, some of which may be tensors."""
    if isinstance(value, (list, tuple)):
        return torch.stack([_numbers(item) for item in value])
    if isinstance(value, torch.Tensor):
        return value.to("cpu", torch.float64)
    if not isinstance(value, (int, float)):
        return torch.as_tensor(value, dtype=torch.float64, device="cpu")  # an array, which torch traces as its own
    return torch.scalar_tensor(value, dtype=torch.float64, device="cpu")


def _plain(value: Any) -> Any:
    """A setting as Python holds it."""
    for item in value if isinstance(value, (list, tuple)) else (value,):
        if item is not None and not isinstance(item, _PLAIN):
            raise UnsupportedError(
                f"a {type(item).__name__} came where compiled code holds numbers; expected Python's own. Make it one "
                "with .item(), or call the function uncompiled."
            )
    return value


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _detached(value: Any) -> Any:
    if isinstance(value, list):
        return [_detached(item) for item in value]
    return value.detach() if isinstance(value, torch.Tensor) else value


def _apart(outputs: Sequence[torch.Tensor], inputs: Sequence[Any]) -> list[torch.Tensor]:
    """Dense outputs with memory of their own, as an op must return them; levels that a shader made share a buffer."""
    taken = {tensor.untyped_storage().data_ptr() for tensor in _tensors(inputs)}
    result = []
    for output in outputs:
        tensor = output.detach().contiguous()
        memory = tensor.untyped_storage()
        result.append(tensor.clone() if memory.nbytes() != tensor.nbytes or memory.data_ptr() in taken else tensor)
    return result
