"""What LuWu needs of a worker's device and of a node's host memory; the server's files apart."""

from __future__ import annotations

from baselines.luwu import LAYERS
from simulation import activations
from simulation.hardware import Hardware
from simulation.luwu.traffic import units
from simulation.memory import Footprint
from simulation.workload import Workload


def footprint(workload: Workload, hardware: Hardware) -> Footprint:
    """The most that a step takes, in backward: no state of the model stays on a device.

    Raises ``ValueError`` for what LuWu does not train: several micro-batches, four bits.
    """
    if workload.accumulation != 1:
        raise ValueError(
            f"accumulation = {workload.accumulation}: allowed with luwu is 1, as each pass's "
            "gradients are pushed and applied"
        )
    if workload.lora is not None and workload.frozen_dtype == "nf4":
        raise ValueError("frozen_dtype = 'nf4': luwu sends and computes in one type")
    root, *blocks = units(workload)
    element, tokens = workload.element_bytes, workload.tokens
    sizes = sorted((unit.held(workload) for unit in (root, *blocks)), reverse=True)
    # Those of the layer are put together while they are there; the root's wait for backward's end.
    trained = max(unit.pushed(workload) for unit in (root, *blocks))
    gradients = root.pushed(workload) + LAYERS * trained
    block = tokens * activations.block_bytes(workload)
    left_by = tokens * activations.kept_bytes(workload)
    kept = workload.recomputed * left_by + (1 - workload.recomputed) * block
    model, full = workload.model, workload.lora is None
    # As in ``simulation.memory``: a block that is computed again, and gradients inside its MLP; the
    # last norm's input and output, and what the loss writes.
    in_block = (block if workload.recomputed else 0.0) + 3 * tokens * element * model.inner
    at_loss = tokens * activations.loss_bytes(workload) * model.vocabulary
    at_loss += (2 if full else 1) * tokens * element * model.width
    device = {
        "gathered": sum(sizes[:LAYERS]),
        "gradients": gradients,
        "activations": model.layers * kept + max(in_block, at_loss),
    }
    host = {}
    if workload.cached and workload.frozen:
        host["cache"] = float(element * workload.frozen * hardware.ranks_per_node)
    forward = {name: device[name] for name in ("gathered", "activations")}
    return Footprint(device, forward, host, {})
