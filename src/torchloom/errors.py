"""Every error that the library raises on purpose.

* TorchloomError
  + ConfigError          the settings contradict each other or the machine
  + ShardError           a model cannot be sharded, or is already
  + CaptureError         the model did not become a graph that can be woven
  + PassError            a pass left a graph wrong; names pass and node
    - PassOrderError     a pass runs before what it needs
  + BackendError         a compiler backend cannot be registered, found or used
    - BackendConflictError  two backends claim one name
    - BackendLoadError   an entry point names a backend that cannot be imported
    - BackendMismatchError  a backend computes something else than eager
  + CompileError         a module cannot be compiled as asked, or is compiled already
  + RecordError          a file is not a record, or one that this version cannot read
  + InspectError         nothing can be said about this function
  + ExpectationError     more was compiled than a test allows
  + MoveError            tensors cannot be moved between the device and host memory
  + EngineError          the engine was called in an order that has no meaning
  + AgreementError       the ranks are about to run different programs
  + CheckpointError      a checkpoint does not fit the model, or is damaged
  + DataError            the training data is missing or too small

Each message says what is wrong, where, and what to do. Classes also derive from the builtin
that a caller would expect to catch.
"""

from __future__ import annotations


class TorchloomError(Exception):
    """Base of every error raised on purpose by torchloom."""


class ConfigError(TorchloomError, ValueError):
    """A setting is unknown, unsupported, or contradicts another one."""


class ShardError(TorchloomError, ValueError):
    """A model or parameter cannot be sharded as asked."""


class CaptureError(TorchloomError, RuntimeError):
    """The captured graph is not one that can be woven."""


class PassError(TorchloomError, RuntimeError):
    """A pass failed or left the graph in a state that cannot run."""


class PassOrderError(PassError, ValueError):
    """A list of passes runs a pass before what it needs, or names an unknown pass."""


class BackendError(TorchloomError, RuntimeError):
    """A compiler backend cannot be registered, found or used."""


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


class MoveError(TorchloomError, RuntimeError):
    """Tensors cannot be moved between the device and host memory."""


class EngineError(TorchloomError, RuntimeError):
    """An engine method was called at a point of the step where it has no meaning."""


class AgreementError(TorchloomError, RuntimeError):
    """The ranks hold different plans or programs."""


class CheckpointError(TorchloomError, RuntimeError):
    """A checkpoint is missing, damaged, or belongs to another model."""


class DataError(TorchloomError, ValueError):
    """The training data cannot be read or is too small for the run."""
