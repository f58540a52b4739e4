"""Marks of tests of what FSDP2 has from some release of torch on; results/versions shows them."""

import pytest
from torch.distributed.fsdp import FSDPModule

#: A failed pass can be dropped, a forward run part of a group, ranks use different parameters.
since_2_13 = pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="FSDP2 can do so from torch 2.13 on"
)
