"""What the ranks of a model that is spread over several devices verify together."""

from typing import Protocol

import torch
from torch.distributed import ProcessGroup

from decoder.engines.sglang.corpus import Share
from decoder.engines.sglang.trees import Nodes


class Group(Protocol):
    """What is read of SGLang's groups of ranks.

    Attributes:
        world_size: ranks in it.
        ranks: their numbers among all.
        cpu_group: for what is not on a device.
    """

    world_size: int
    ranks: list[int]
    cpu_group: ProcessGroup


def sharing(group: Group) -> Share | None:
    """Return what gives all ranks of a group the nodes of its first; None where it is alone."""
    if group.world_size == 1:
        return None

    def share(nodes: Nodes) -> None:
        torch.distributed.broadcast(
            torch.from_numpy(nodes), src=group.ranks[0], group=group.cpu_group
        )

    return share
