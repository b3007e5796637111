"""Makes Inductor, the code generator of ``torch.compile``, keep our operators in order."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch


def keep_order(lowering: ModuleType) -> None:
    """Make the scheduler respect the order of operators that have effects.

    Lowering records what comes before such an operator under the name of its buffer. The scheduler
    looks it up under the name of the operation, and so moves saves behind loads (seen in torch
    2.11). This records it under both names. ``lowering`` is ``torch._inductor.lowering``.
    """
    target = torch.ops.higher_order.with_effects
    original = lowering.lowerings[target]

    @functools.wraps(original)
    def with_effects(token: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        graph: Any = torch._inductor.virtualized.V.graph
        before = len(graph.operations)
        result = original(token, op, *args, **kwargs)
        if getattr(op, "namespace", None) == "tensorizer":
            for operation in graph.operations[before:]:
                # Later releases use the second table, with the right name.
                for table in ("additional_star_deps", "additional_buffer_deps"):
                    notes = getattr(graph, table, {})
                    if noted := notes.get(operation.get_name()):
                        notes[operation.get_operation_name()].update(noted)
        return result

    lowering.lowerings[target] = with_effects
