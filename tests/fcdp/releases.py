"""Marks of tests of what FSDP2 has from some release of torch on; results/versions shows them."""

import pytest
import torch.distributed.fsdp
from torch.distributed.fsdp import FSDPModule

#: A parameter without gradients may be of whole numbers.
since_2_12 = pytest.mark.skipif(
    not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"),
    reason="FSDP2 can do so from torch 2.12 on",
)

#: A failed pass can be dropped, a forward run part of a group, ranks use different parameters.
since_2_13 = pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="FSDP2 can do so from torch 2.13 on"
)
