"""The check that a device makes of a step's shapes before it starts it."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from executor_svc.devices.base import GraphKey, StepInputs
from holdback.buckets import blocks_for
from holdback.types import ExecutorLimits, Phase


def check_shapes(inputs: StepInputs, graphs: Collection[GraphKey], limits: ExecutorLimits, max_model_len: int) -> None:
    """Raises ValueError for a graph that is not declared, or an array that has not its shape.

    Args:
        inputs: of the step.
        graphs: the declared ones.
        limits: of the device.
        max_model_len: of the model, which decides how wide block tables are.
    """
    key = inputs.key
    if key not in graphs:
        raise ValueError(f"graph is {key}; allowed: one of the {len(graphs)} declared")
    num_rows = 1 if key.phase is Phase.PREFILL else key.size
    is_prefill = key.phase is Phase.PREFILL
    if is_prefill is (inputs.input_ids is None):
        raise ValueError("input_ids goes with a prefill and with nothing else")
    expected: dict[str, tuple[int, ...]] = {
        "positions": (key.size,),
        "slot_mapping": (key.size,),
        "block_tables": (num_rows, blocks_for(max_model_len, limits.block_size)),
        "context_lens": (num_rows,),
        "slots": (num_rows,),
    }
    if is_prefill:
        expected["input_ids"] = (key.size,)
    for name, shape in expected.items():
        found = getattr(inputs, name)
        if found.shape != shape:
            raise ValueError(f"{name} of a {key.phase.value} of {key.size} has shape {found.shape}; allowed: {shape}")
        if found.dtype != np.int32:
            raise ValueError(f"{name} of a {key.phase.value} of {key.size} is {found.dtype}; allowed: int32")
