"""Custom operators: functions that a compiler calls as they are, with the schema and fake that it needs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from torchloom._torch.operators import keep_calls
from torchloom.errors import OpError


class CustomOp:
    """An operator, called like the function that it was made of.

    What torch's own object can do (`register_kernel`, `register_autograd`, `register_vmap`,
    `register_autocast`, `register_torch_dispatch`, `set_kernel_enabled`) this one can as well; a fake
    and a backward are checked against the operator's arguments when they are registered.
    """

    def __init__(self, defined: Any, fn: Callable[..., Any]) -> None:
        self.defined = defined
        """torch's object, a `torch.library.CustomOpDef`."""
        self.fn = fn
        """The function that it was made of."""
        self.__doc__ = fn.__doc__
        self.__name__ = fn.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the operator."""
        return self.defined(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.defined, name)

    def __repr__(self) -> str:
        return f"<operator {self.schema}>"

    @property
    def overload(self) -> Any:
        """The operator as graphs hold it."""
        return self.defined._opoverload

    @property
    def schema(self) -> str:
        """Name, arguments and results."""
        return str(self.overload._schema)

    @property
    def needs_fake(self) -> bool:
        """Whether compilers must be told what it returns: it returns something."""
        return bool(self.overload._schema.returns)

    def register_fake(self, fn: Callable[..., Any], /) -> Callable[..., Any]:
        """Register what it returns on tensors without data; also as a decorator.

        Raises:
            OpError: `fn` is no function, or takes other arguments.
        """
        if not callable(fn):
            raise OpError(f"the fake of {self.schema} is a function of its arguments, not {fn!r}")
        arguments = self.overload._schema.arguments
        by_place = [each.name for each in arguments if not each.kwarg_only]
        by_name = {each.name: None for each in arguments if each.kwarg_only}
        try:
            signature = inspect.signature(fn)
        except ValueError:  # one in C, like torch.empty_like, does not say what it takes
            return self.defined.register_fake(fn)
        try:
            signature.bind(*by_place, **by_name)
        except TypeError as error:
            raise OpError(
                f"the fake of {self.schema} takes other arguments than the operator, {signature}: {error}"
            ) from None
        return self.defined.register_fake(fn)

    def _demand_fake(self) -> None:
        if not self.needs_fake:
            # torch would ask for one where an operator neither returns nor writes anything, and would
            # then leave the call out, as nothing depends on it.
            self.defined.register_fake(lambda *args, **kwargs: None)
            if not self.overload._schema.is_mutable:
                keep_calls(self.overload)
            return
        given = ", ".join(each.name for each in self.overload._schema.arguments)
        message = (
            f"{self.schema} returns something and has no fake, so it cannot be compiled: decorate a "
            f"function that makes such results of shapes alone with @{self.__name__}.register_fake, such "
            f"as `lambda {given}: torch.empty_like({given.partition(',')[0]})`"
        )

        def missing(*args: Any, **kwargs: Any) -> Any:
            raise OpError(message)

        self.defined.register_fake(missing)


def custom_op(
    name: str,
    fn: Callable[..., Any] | None = None,
    /,
    *,
    mutates_args: str | Iterable[str] = (),
    fake: Callable[..., Any] | None = None,
    device_types: str | Sequence[str] | None = None,
    schema: str | None = None,
    tags: Any = None,
) -> Any:
    """Make a function an operator that compilers call and do not look into.

    A branch on a size, a kernel of one's own, a call into another library: whatever must not be
    traced. The schema follows from the annotations.

    Args:
        name: "namespace::name".
        fn: the function; without it a decorator is returned.
        mutates_args: names of the arguments that it writes to, or "unknown" for all.
        fake: what it returns, computed without data: a function of the same arguments. Needed by operators
            that return something, here or by `register_fake`, before they are compiled.
        device_types: devices that `fn` is for, e.g. "cpu"; all of them by default.
        schema: instead of annotations.
        tags: see `torch.library.custom_op`.

    Raises:
        OpError: no name with a namespace, an annotation that is none of a schema, an argument in
            `mutates_args` that does not exist, or a fake that takes other arguments.

    Example:
        >>> @custom_op("docs::scale", fake=lambda x, by: torch.empty_like(x))
        ... def scale(x: torch.Tensor, by: float) -> torch.Tensor:
        ...     return x * by if x.shape[0] < 4 else by * x
        >>> torch.compile(scale, backend="eager", fullgraph=True)(torch.ones(2), 3.0)
        tensor([3., 3.])
    """

    def make(function: Callable[..., Any]) -> CustomOp:
        _check_name(name)
        known = inspect.signature(function).parameters
        wanted = [mutates_args] if isinstance(mutates_args, str) else list(mutates_args)
        unknown = [each for each in wanted if each not in known and each != "unknown"]
        if unknown:
            raise OpError(
                f"{name}: mutates_args names {unknown[0]!r}, its arguments are {', '.join(known)}"
            )
        try:
            defined = torch.library.custom_op(
                name,
                function,
                mutates_args="unknown" if wanted == ["unknown"] else wanted,
                device_types=device_types,
                schema=schema,
                tags=tags,
            )
        except (ValueError, NotImplementedError, RuntimeError) as error:
            raise OpError(f"{name} cannot become an operator: {error}") from error
        made = CustomOp(defined, function)
        made._demand_fake()
        if fake is not None:
            made.register_fake(fake)
        return made

    return make if fn is None else make(fn)


def _check_name(name: str) -> None:
    namespace, colons, rest = name.partition("::")
    if not (colons and namespace.isidentifier() and rest.isidentifier()):
        raise OpError(
            f"{name!r} is no operator's name: give namespace and name, e.g. 'mylib::{rest or name}'"
        )
    if namespace in ("aten", "prim", "prims", "torchloom"):
        raise OpError(f"the namespace {namespace!r} is taken: use one of your own for {name!r}")
