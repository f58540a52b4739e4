"""The strategies by name, for programs that must not wait for torch to be imported."""

STRATEGY_NAMES: tuple[str, ...] = ("deepspeed-zero3", "deepspeed-hpz", "fsdp2", "fcdp")
