"""An optimizer step that raises on the way, and is caught: ranks go on with the weights that were stepped."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.pool import run_ranks
from support.runs import SGD, sharded

WIDTH = 7


class StopError(Exception):
    """Raised by a hook."""


def gathered(tensor: Tensor) -> list[Tensor]:
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor)
    return found


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_hook_that_raises(stage, backend):
    def fn(rank: int) -> tuple[Tensor, Tensor]:
        outputs = []
        for is_interrupted in (True, False):
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 3))
            engine = sharded(net, stage, optimizer=SGD, backend=backend)

            def stop(*_args: object) -> None:
                raise StopError

            x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(rank))
            engine.backward(engine(x).square().sum())
            if is_interrupted:
                hook = engine.optimizer.register_step_post_hook(stop)
                with pytest.raises(StopError):
                    engine.step()
                hook.remove()
            else:
                engine.step()
            outputs.append(engine(torch.ones(3, WIDTH)).detach())
        return torch.stack(gathered(outputs[0])), outputs[1]

    for everywhere, wanted in run_ranks(2, fn):
        for found in everywhere:
            torch.testing.assert_close(found, wanted)
