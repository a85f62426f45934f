"""Selection: which finished rollouts the teacher is asked about, ``select(count) -> indices`` into the step's rollouts.

So far there is only ``all``; the trainer has no step yet that leaves rollouts out.
"""

from __future__ import annotations

from opd_recipes.registry import Registry

SELECTIONS = Registry("opd.selection")


@SELECTIONS.register("all")
def every(count: int) -> list[int]:
    """All of them."""
    return list(range(count))
