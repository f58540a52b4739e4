"""Random walks of FCDP beside FSDP2: what users do between passes, in any order.

Each rank holds two copies of one small model, one sharded by ``fully_shard`` alone and one with
FCDP, and does the same to both. After each event losses, parameters, gradients and optimizer states
must be equal bit for bit, or FCDP must have refused with an error that the event expects.
"""
