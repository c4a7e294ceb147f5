"""The KernelConfig with which the postprocess kernel repairs NaN gradients: the portable device functions."""

from ..common.device.structs import KernelConfig
from ..common.launch import INTERPRETED
from ..common.shapes import CallShape

STEP = 16  # rows of the other side that a repair takes at a time


def repair_config(size: CallShape, rows: int, block_d: int, block_dv: int) -> KernelConfig:
    """For tiles of `rows` rows."""
    return KernelConfig(
        GROUP=size.heads // size.kv_heads,
        D=size.d,
        DV=size.dv,
        BLOCK_M=rows,
        BLOCK_N=rows,
        BLOCK_D=block_d,
        BLOCK_DV=block_dv,
        FOLD=False,
        PRECISION="ieee",
        CHUNK=512,
        PACKED=size.packed,
        OVERLAP=not INTERPRETED,
    )
