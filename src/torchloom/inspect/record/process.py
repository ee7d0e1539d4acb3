"""The process that was watched: versions, device, rank, settings of the compiler."""

from __future__ import annotations

import platform

import torch
import torch.distributed as dist

import torchloom
from torchloom import envs
from torchloom._torch import introspect
from torchloom.records import Session


def describe_process(session: Session) -> None:
    """Write into a record which process made it.

    Raises:
        ConfigError: a launcher's variables make no sense.
    """
    session.torchloom, session.torch = torchloom.__version__, torch.__version__
    session.python, session.platform = platform.python_version(), platform.platform()
    session.device = (
        torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    )
    session.config = introspect.config_changes()
    if dist.is_available() and dist.is_initialized():
        session.rank, session.world_size = dist.get_rank(), dist.get_world_size()
    else:
        launch = envs.launch()
        session.rank, session.world_size = launch.rank, launch.world_size
