"""Cases of PyTorch's own FSDP2 tests, rewritten: what passes without FCDP passes with it.

They follow ``test/distributed/_composable/fsdp`` of PyTorch, as far as gloo on CPUs can run it.
Each case shards a model by ``fully_shard`` itself, runs once as it is and once with
``fcdp.cache_parameters`` on top, and must see the same.
"""
