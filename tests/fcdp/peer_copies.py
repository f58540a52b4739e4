"""An all-gather inside the node that is no collective: copies out of the other ranks' memory."""

import pickle
from multiprocessing.reduction import ForkingPickler

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from tests.fcdp.stand_ins import OwnAllGather


class PeerCopies(OwnAllGather):
    """Each rank copies its input to memory that all can read, and the others' out of theirs.

    On a GPU the copy engines do so, through CUDA's handles for other processes; on the CPU memory
    is shared by files. Ranks tell each other on the host when memory is filled, and when read.
    """

    def __init__(self) -> None:
        super().__init__()
        self._shared: dict[int, list[torch.Tensor]] = {}

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.groups.add(group.size())
        shared = self._shared_by_all(input_tensor, group)
        shared[group.rank()].copy_(_bytes_of(input_tensor))
        _meet(group)
        rows = output_tensor.view(group.size(), -1)
        for row, theirs in zip(rows, shared, strict=True):
            _bytes_of(row).copy_(theirs)
        _meet(group)
        return None

    def _shared_by_all(self, like: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
        """Memory of each rank, as large as its input; what another rank holds, opened here."""
        if like.nbytes not in self._shared:
            mine = torch.empty(like.nbytes, dtype=torch.uint8, device=like.device)
            strategy = multiprocessing.get_sharing_strategy()
            multiprocessing.set_sharing_strategy("file_system")  # handles that a message can hold
            handles: list[bytes] = [b""] * group.size()
            dist.all_gather_object(handles, bytes(ForkingPickler.dumps(mine)), group=group)
            opened = [pickle.loads(handle) for handle in handles]
            opened[group.rank()] = mine
            multiprocessing.set_sharing_strategy(strategy)
            self._shared[like.nbytes] = opened
        return self._shared[like.nbytes]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _meet(group: dist.ProcessGroup) -> None:
    """Wait on the host until all ranks of the group have done what they have queued."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()
    dist.barrier(group=group)
