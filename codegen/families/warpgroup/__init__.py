"""Kernels with warpgroup matrix instructions (`wgmma`), tensor maps and warp specialisation."""

from codegen.families.base import Family
from codegen.families.warpgroup.cost import cost
from codegen.families.warpgroup.derive import SMEM_PER_BLOCK, SMEM_PER_SM, derive
from codegen.families.warpgroup.rules import RULES
from codegen.families.warpgroup.view import kernel_view

WARPGROUP = Family(
    name="sm90a",
    template="sm90a_forward.cu.j2",
    smem_per_block=SMEM_PER_BLOCK,
    smem_per_sm=SMEM_PER_SM,
    model_card="H200",
    derive=derive,
    rules=RULES,
    cost=cost,
    view=kernel_view,
)
