"""Every error that the library raises on purpose.

    * TorchloomError
      + ConfigError          the settings contradict each other or the machine
      + ShardError           a model cannot be sharded, or is already
      + PassError            a pass left a graph wrong; names pass and node
        - PassOrderError     a pass runs before what it needs
      + RegionError          equal parts of a graph cannot be compiled as one
      + BackendError         a compiler backend cannot be registered, found or used
        - BackendConflictError  two backends claim one name
        - BackendLoadError   an entry point names a backend that cannot be imported
        - BackendMismatchError  a backend computes something else than eager
      + CompileError         a module cannot be compiled as asked, or is compiled already
      + RecordError          a file is not a record, or one that this version cannot read
      + InspectError         nothing can be said about this function
      + ExpectationError     more was compiled than a test allows
      + OpError              an operator cannot be defined, or lacks what compilers need of it
        - OpCheckError       an operator breaks what it promises
      + MoveError            tensors cannot be moved between the device and host memory
      + PlanError            nothing can be planned from what was given
      + ServeError           a program cannot be built, loaded or run as asked
        - ContractError      a call, or the contract itself, breaks what was promised about inputs
        - ProofError         a model does not hold for all sizes of its contract
        - ArtifactError      what was stored cannot be used: it says why
      + EngineError          the engine was called in an order that has no meaning
        - EngineAttributeError  neither the engine nor its model has an attribute
        - NonFiniteError     gradients are not finite, and the run is to end by this
      + AgreementError       the ranks are about to run different programs
      + NoMemoryError        memory ran out, on the host or on a device
      + PeerLostError        a rank that others wait for has ended or does not come
      + CheckpointError      a checkpoint does not fit the model, or is damaged
      + DataError            the training data is missing or too small

Each message says what is wrong, where, and what to do. Classes also derive from the builtin
that a caller would expect to catch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class TorchloomError(Exception):
    """Base of every error raised on purpose by torchloom."""


class ConfigError(TorchloomError, ValueError):
    """A setting is unknown, unsupported, or contradicts another one."""


class ShardError(TorchloomError, ValueError):
    """A model or parameter cannot be sharded as asked."""


class PassError(TorchloomError, RuntimeError):
    """A pass failed or left the graph in a state that cannot run."""


class RegionError(TorchloomError, RuntimeError):
    """Equal parts of a graph cannot be compiled as one body; they are then compiled one by one."""


class PassOrderError(PassError, ValueError):
    """A list of passes runs a pass before what it needs, or names an unknown pass."""


PassContractError = PassOrderError
"""DeepSpeed's name for an error in the order of passes."""


class BackendError(TorchloomError, RuntimeError):
    """A compiler backend cannot be registered, found or used."""


class UnnamedBackendError(BackendError, AttributeError):
    """A backend has no name of its own and was given none."""


class BackendConflictError(BackendError, ValueError):
    """Two backends claim one name."""


class BackendLoadError(BackendError, ImportError):
    """An entry point names a backend that cannot be imported."""


class BackendMismatchError(BackendError, AssertionError):
    """A backend computes something else than eager."""


class CompileError(TorchloomError, RuntimeError):
    """A module cannot be compiled as asked, or is compiled already."""


class RecordError(TorchloomError, ValueError):
    """A file is not a record, or one that this version cannot read."""


class InspectError(TorchloomError, RuntimeError):
    """Nothing can be said about a function, e.g. because nothing compiled it."""


class ExpectationError(TorchloomError, AssertionError):
    """More was compiled, broken or recompiled than a test allows."""


class OpError(TorchloomError, RuntimeError):
    """An operator cannot be defined as asked, or lacks what compilers need of it."""


class OpCheckError(OpError, AssertionError):
    """An operator breaks what it promises: its fake, its aliases, what it writes, its gradient."""


class MoveError(TorchloomError, RuntimeError):
    """Tensors cannot be moved between the device and host memory."""


class PlanError(TorchloomError, ValueError):
    """Nothing can be planned or costed from what was given."""


class ServeError(TorchloomError, RuntimeError):
    """A program cannot be built, loaded or run as asked."""


class ContractError(ServeError, ValueError):
    """A contract contradicts itself, or a call breaks it."""


class ProofError(ServeError):
    """A model does something else for some sizes of its contract."""


class ArtifactError(ServeError):
    """What was stored cannot be used here."""


class EngineError(TorchloomError, RuntimeError):
    """An engine method was called at a point of the step where it has no meaning."""


class EngineAttributeError(EngineError, AttributeError):
    """Neither the engine nor its model has an attribute, or it is one of DeepSpeed's that is refused."""


class NonFiniteError(EngineError):
    """Gradients are not finite, and the settings end the run; weights are as before the step."""


class AgreementError(TorchloomError, RuntimeError):
    """The ranks hold different plans or programs."""


class NoMemoryError(TorchloomError, MemoryError):
    """Memory ran out, on the host or on a device."""


class PeerLostError(TorchloomError, RuntimeError):
    """A rank that others wait for has ended, or did not come in time."""


class CheckpointError(TorchloomError, RuntimeError):
    """A checkpoint is missing, damaged, or belongs to another model."""


class DataError(TorchloomError, ValueError):
    """The training data cannot be read or is too small for the run."""


@contextmanager
def unwrapped() -> Iterator[None]:
    """Raise torchloom's own error from inside the errors that a compiler wrapped around it.

    Compilers wrap what their backends raise in several layers with advice of their own; the innermost
    message says what the user has to do.

    Raises:
        TorchloomError: the innermost error of this module, where the one that was raised wraps it.
    """
    try:
        yield
    except TorchloomError:
        raise
    except Exception as error:  # raised on, or as the error inside it
        own = own_error(error)
        if own is None:
            raise
        raise own from None


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those that it wraps, the outermost first."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__


def own_error(error: BaseException | None) -> TorchloomError | None:
    """Return the torchloom error that another error wraps, or None."""
    return next((each for each in causes(error) if isinstance(each, TorchloomError)), None)


def program_error(error: BaseException) -> BaseException:
    """Return the error of the program that Dynamo met while it traced; Dynamo's own say only where."""
    while type(error).__module__ == "torch._dynamo.exc":
        inner = error.__cause__ or error.__context__
        if inner is None:
            break
        error = inner
    return error


def first_line(error: BaseException) -> str:
    """Return the beginning of an error's message; of one without a message, the name of its class."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
