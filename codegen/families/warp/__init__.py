"""Kernels with warp-level matrix instructions (`mma.sync`) and `cp.async`."""

from codegen.families.base import Family
from codegen.families.warp.cost import cost
from codegen.families.warp.derive import SMEM_PER_BLOCK, SMEM_PER_SM, derive
from codegen.families.warp.rules import RULES
from codegen.families.warp.view import kernel_view

WARP = Family(
    name="sm89",
    template="sm89_forward.cu.j2",
    smem_per_block=SMEM_PER_BLOCK,
    smem_per_sm=SMEM_PER_SM,
    model_card="L4",
    derive=derive,
    rules=RULES,
    cost=cost,
    view=kernel_view,
)
