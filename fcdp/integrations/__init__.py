"""Other people's trainers: one call before the trainer is made, and they shard by ``fcdp.shard``.

Each module imports its client, and nothing else here does:
:mod:`~fcdp.integrations.hugging_face` (accelerate, the Trainer, TRL),
:mod:`~fcdp.integrations.lightning` (Lightning and Fabric), :mod:`~fcdp.integrations.torchtitan`.
"""
