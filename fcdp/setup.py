"""The arguments that FCDP is set up with on a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from fcdp.cache.cache import Safety
from fcdp.cache.policy import CachePolicy
from fcdp.codec import Codecs
from fcdp.exchange import Exchanges
from fcdp.partial_gradients import PartialsPlace


@dataclass(frozen=True)
class Options:
    """Arguments of ``fcdp.cache_parameters`` beside the policy.

    Raises ``ValueError`` for what cannot be.
    """

    look_ahead: int
    partials: PartialsPlace
    safety: Safety
    codecs: Codecs
    exchanges: Exchanges = "hierarchical"

    def __post_init__(self) -> None:
        if type(self.look_ahead) is not int or self.look_ahead < 0:
            raise ValueError(f"look_ahead = {self.look_ahead!r}: must be a count, 0 or more")
        if self.partials not in get_args(PartialsPlace):
            allowed = ", ".join(get_args(PartialsPlace))
            raise ValueError(f"partial_gradients = {self.partials!r}: must be one of {allowed}")
        if self.exchanges not in get_args(Exchanges):
            allowed = ", ".join(get_args(Exchanges))
            raise ValueError(f"exchanges = {self.exchanges!r}: must be one of {allowed}")
        if self.exchanges == "flat":
            self._check_flat()

    def _check_flat(self) -> None:
        """Raise ``ValueError`` for what goes with exchanges inside the node and across apart."""
        plain = (
            ("partial_gradients", self.partials, "device"),
            ("gather_codec", self.codecs.gather, None),
            ("reduce_codec", self.codecs.reduce, None),
        )
        for name, given, allowed in plain:
            if given != allowed:
                raise ValueError(
                    f"{name} = {given!r}: must be {allowed!r} with exchanges = 'flat', which "
                    "carry values as they are, and gradients of each micro-batch"
                )


@dataclass(frozen=True)
class Setup:
    """All that an engine was asked for: setting up again with the same changes nothing."""

    #: Nodes, and ranks per node.
    ranks: tuple[int, int]
    policy: CachePolicy
    options: Options
    #: Arguments of ``fcdp.shard`` beside these; ``None`` after ``cache_parameters``.
    sharding: Mapping[str, Any] | None = None

    def differences(self, other: Setup) -> str:
        """The arguments that are others in ``other``, as a user gives them, and both values."""
        theirs = other._arguments()
        different = [
            f"other {name}"
            if name in ("units", "ignored_params")  # modules, which are long to show
            else f"{name} = {value!r} (now {theirs.get(name)!r})"
            for name, value in self._arguments().items()
            if value != theirs.get(name)
        ]
        return ", ".join(different) or "fcdp.cache_parameters"

    def _arguments(self) -> dict[str, Any]:
        codecs = self.options.codecs
        return {
            "topology": "{} nodes × {} ranks".format(*self.ranks),
            "policy": self.policy,
            "look_ahead": self.options.look_ahead,
            "partial_gradients": self.options.partials,
            **vars(self.options.safety),
            "gather_codec": codecs.gather,
            "reduce_codec": codecs.reduce,
            "error_feedback": codecs.error_feedback,
            "exchanges": self.options.exchanges,
            **(self.sharding or {}),
        }
