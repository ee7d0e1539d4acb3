"""The choices of a user for a build, checked against model and contract."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from torchloom.errors import ContractError, ServeError
from torchloom.serve.builder.pieces.inductor_options import spelled
from torchloom.serve.call.cuda_graphs import CudaGraphs
from torchloom.serve.contract.contract import Contract
from torchloom.serve.model.target import Target

if TYPE_CHECKING:
    from torchloom.serve.builder.pieces.lower import Backend

Shapes = Literal["prove", "split", "unbacked", "bucket"]
Sizes = Sequence[int] | Mapping[str, Sequence[int]]
Ranges = Sequence[tuple[int, int]] | Mapping[str, Sequence[tuple[int, int]]]


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """How programs are built."""

    sizes: Sizes = ()
    """Sizes that get a program of their own."""
    ranges: Ranges | None = None
    """Parts of the contract that get a program each; the whole contract if None."""
    shapes: Shapes = "split"
    unbacked: tuple[str, ...] = ()
    """Dims that nothing may branch on, by name; all of them with shapes="unbacked"."""
    backend: Backend = "inductor"
    splitting_ops: tuple[str, ...] = ()
    layers: bool = True
    """Whether layers that repeat are compiled once."""
    patches: Mapping[str, Any] = field(default_factory=dict)
    """Inductor's options."""
    check: Literal["edges", "off"] = "edges"
    cuda_graphs: CudaGraphs = "off"
    level: int = 2

    def to_json(self) -> dict[str, Any]:
        """Return what of them enters a key."""
        its = {name: _plain(value) for name, value in vars(self).items() if name != "check"}
        backend = self.backend if isinstance(self.backend, str) else "a function"
        return {**its, "backend": backend, "patches": spelled(self.patches)}


def check_options(options: BuildOptions, contract: Contract, target: Target) -> None:
    """Refuse choices that contradict one another, the contract or the model.

    Args:
        options: the choices.
        contract: what arguments look like.
        target: the model.

    Raises:
        ServeError: a choice is none.
        ContractError: names are not of the contract, or the contract's not of the model.
    """
    for name, allowed in (("shapes", Shapes), ("cuda_graphs", CudaGraphs)):
        if (value := getattr(options, name)) not in get_args(allowed):
            raise ServeError(f"{name} is one of {', '.join(get_args(allowed))}, not {value!r}")
    for name in options.unbacked:
        if name not in contract.dims:
            raise ContractError(
                f"unbacked names {name!r}, the contract has {', '.join(contract.dims) or 'no dims'}"
            )
    module = target.module
    if module is not None and module.training is not contract.training:
        wanted = "train()" if contract.training else "eval()"
        raise ContractError(
            f"the model is in {'training' if module.training else 'evaluation'} mode, the contract wants "
            f"the other: call model.{wanted}"
        )
    names = {parameter.name for parameter in target.parameters}
    takes_any = target.rest is not None
    for name in (*contract.args, *contract.fixed):
        if name not in names and not takes_any:
            raise ContractError(
                f"the contract names {name!r}, {target.name} takes {', '.join(sorted(names))}"
            )
    _check_parameters(contract, target)


def _check_parameters(contract: Contract, target: Target) -> None:
    """Refuse parameters that contracts cannot name, or that this one leaves out."""
    named = {*contract.args, *contract.fixed}
    for parameter in target.parameters:
        name, kind = parameter.name, parameter.kind
        if kind is parameter.VAR_POSITIONAL and name in named:
            raise ContractError(
                f"the contract names {name!r}, which {target.name} takes as *{name}: arguments without names are in no "
                "contract"
            )
        if kind is parameter.POSITIONAL_ONLY and name not in target.by_position and name in named:
            raise ContractError(
                f"{target.name} takes {name!r} by position only, and programs pass arguments by name: take the '/' out "
                "of its signature"
            )
        is_several = kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not is_several and name not in named:
            raise ContractError(
                f"{target.name} takes {name!r}, which has no default: name it in the contract"
            )


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value
