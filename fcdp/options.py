"""Options of ``fcdp.shard`` that set-up rarely needs, grouped as FSDP2 groups its policies."""

from dataclasses import dataclass
from typing import Any, get_args

from fcdp.codec import Codec
from fcdp.exchange import ExchangeKind
from fcdp.grouping import PartialsChoice
from fcdp.hooks import LosslessGather, LosslessReduce


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """How entries of the cache are fetched and checked; ``policy`` says where entries lie.

    Args:
        look_ahead: How many entries are fetched from host memory (on CUDA) or disk ahead of their
            gathers, each into device memory of one unit's slice. A count, 0 or more.
        detect_writes: Checksum this rank's shards, so that no write that autograd does not count
            (see ``invalidate``) goes unnoticed: on the CPU before each pass, on an accelerator
            before each pass without gradients, which then gathers anew (the host waits once);
            everywhere at each hit, without waiting for the device, as a ``RuntimeError`` on all
            ranks at most two passes later. With ``False`` frozen units alone are checksummed, as
            they cross nodes, and trained units before a load or while a ``state_dict`` is alive:
            what may have been written then is compared with these checksums.
        verify: Check that every entry is read as it was written and that all ranks count the same
            generations, and stop with a ``RuntimeError`` that names unit, rank and generation.
            Each entry is read once more, and an accelerator's host waits for each check.
        poison: Fill stale entries with NaN, for tests.

    Raises:
        ValueError: For a ``look_ahead`` that is no count.

    Example:
        >>> cache = fcdp.CacheOptions(look_ahead=2, verify=True)
        >>> verified = fcdp.shard(Net(), topology, policy="host", cache=cache)
        >>> verified(torch.ones(1, 8)).sum().backward()
        >>> fcdp.ledger(verified).hits  # each was compared with what had been stored
        2
    """

    look_ahead: int = 1
    detect_writes: bool = True
    verify: bool = False
    poison: bool = False

    def __post_init__(self) -> None:
        if type(self.look_ahead) is not int or self.look_ahead < 0:
            raise ValueError(f"look_ahead = {self.look_ahead!r}: must be a count, 0 or more")


@dataclass(frozen=True, kw_only=True)
class CommOptions:
    """Encodings of gathers and reductions between nodes, and the exchanges that carry them.

    Args:
        gather_codec: Encodes parameters where they cross nodes; on one node nothing is encoded.
            ``Delta`` is lossless. ``BlockInt8`` and ``BlockInt4`` round: training no longer follows
            FSDP2 bit for bit. Gathered weights are rounded, alike on all nodes and whether they
            come from the cache or not; the sharded weights that the optimizer steps, and
            checkpoints, are not.
        reduce_codec: Encodes reductions of gradients between nodes. ``BlockInt8`` and
            ``BlockInt4`` round each gradient once, and sums are added up in fp32 or wider;
            ``Exact`` rounds nothing.
        error_feedback: Add what the last reduction's rounding lost to the next reduction. Each rank
            keeps (n−1)/n of 1/L of the gradients in fp32 for it, with n nodes of L ranks, which no
            checkpoint keeps and ``load_state_dict`` drops. After a change of the loss scale the
            next step's correction is wrong by that change, once.
        exchanges: ``"hierarchical"``: across nodes and inside the node apart. ``"flat"``, as in the
            paper's volumes and ZeRO-3's own: a gather that crosses nodes and each micro-batch's
            reduction are one collective over all ranks, which sends 1 − 1/(n·L) of a unit from each
            node instead of 1 − 1/n, and no gradient waits for the last micro-batch. Without codecs.
        partial_gradients: Where the sums of ``accumulate`` wait for the last micro-batch: in
            ``"device"`` memory, or in an arena of the ``"host"``, at a copy in and out per unit and
            micro-batch. ``"auto"``: on the device if they take at most a tenth of what is free on
            it at set-up, or if a node has too little host memory; else on the host, whose memory is
            then allocated by the first ``accumulate(model, last=False)``. On CPUs that is
            ``"device"``. The choice is the same on all ranks, and the line that rank 0 prints has
            its bytes. ``"each"``: no sums wait, as the gradients of each micro-batch cross nodes.
        intra_node: FSDP2's interface of an all-gather, as ``set_custom_all_gather`` takes it, for
            the half of a gather that stays inside the node. It allocates FSDP2's output (n·L·s) and
            is called for each of n parts of it (L·s) with this rank's input (s) and the group of
            the node's L ranks; on an accelerator in the order of the current stream, on CPUs with
            ``async_op=True``. ``None``: this library's.

    Raises:
        ValueError: For what is no codec, ``error_feedback`` without a ``reduce_codec`` that rounds,
            another value of ``exchanges`` or ``partial_gradients``, an ``intra_node`` of another
            type, and for flat exchanges with a codec or partial gradients on the host.

    Example:
        >>> comm = fcdp.CommOptions(gather_codec=fcdp.BlockInt8(), reduce_codec=fcdp.BlockInt4())
        >>> rounded = fcdp.shard(Net(), topology, comm=comm)
        >>> for each in (model, rounded):
        ...     each(torch.ones(1, 8)).sum().backward()
        >>> sent, coded = (fcdp.ledger(each).total("inter_node") for each in (model, rounded))
        >>> coded < sent / 3  # of fp32, a codec's bytes and a scale per block
        True
    """

    gather_codec: Codec | LosslessGather | None = None
    reduce_codec: Codec | LosslessReduce | None = None
    error_feedback: bool = False
    exchanges: ExchangeKind = "hierarchical"
    partial_gradients: PartialsChoice = "auto"
    intra_node: Any = None

    def __post_init__(self) -> None:
        own = self.intra_node
        if own is not None and not (callable(own) and hasattr(own, "allocate")):
            raise ValueError(
                f"intra_node = {own!r}: must be an all-gather as FSDP2's "
                "set_custom_all_gather takes it, with allocate and __call__"
            )
        for name, codec, lossless, more in (
            ("gather_codec", self.gather_codec, LosslessGather, "fcdp.Delta()"),
            ("reduce_codec", self.reduce_codec, LosslessReduce, "fcdp.Exact()"),
        ):
            if codec is not None and not isinstance(codec, (Codec, lossless)):
                raise ValueError(
                    f"{name} = {codec!r}: must be a fcdp.Codec, such as fcdp.BlockInt8(), or {more}"
                )
        if self.error_feedback and isinstance(self.reduce_codec, LosslessReduce | None):
            raise ValueError(
                "error_feedback = True: needs a reduce_codec that rounds, whose loss it feeds back"
            )
        for name, value, kind in (
            ("exchanges", self.exchanges, ExchangeKind),
            ("partial_gradients", self.partial_gradients, PartialsChoice),
        ):
            if value not in get_args(kind):
                allowed = ", ".join(get_args(kind))
                raise ValueError(f"{name} = {value!r}: must be one of {allowed}")
        # Codecs and partial gradients need exchanges across nodes apart from those inside.
        for name, given, allowed_values in (
            ("partial_gradients", self.partial_gradients, ("auto", "device", "each")),
            ("gather_codec", self.gather_codec, (None,)),
            ("reduce_codec", self.reduce_codec, (None,)),
        ):
            if self.exchanges == "flat" and given not in allowed_values:
                raise ValueError(
                    f"{name} = {given!r}: must be {' or '.join(map(repr, allowed_values))} with "
                    "exchanges = 'flat', which carry values as they are, and gradients of each "
                    "micro-batch"
                )
