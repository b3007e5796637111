"""How Inductor, the code generator of ``torch.compile``, keeps our operators in their order."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch


def keep_order(lowering: ModuleType) -> None:
    """Have the scheduler heed the order of operators that have effects.

    Lowering notes what comes before such an operator under the name of its buffer. The scheduler
    looks for it under the name of the operation, and so moves saves behind loads (seen in torch
    2.11). Noted under both names, it is found. ``lowering`` is ``torch._inductor.lowering``.
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
                # The second is what later releases use, with the right name.
                for table in ("additional_star_deps", "additional_buffer_deps"):
                    notes = getattr(graph, table, {})
                    if noted := notes.get(operation.get_name()):
                        notes[operation.get_operation_name()].update(noted)
        return result

    lowering.lowerings[target] = with_effects
