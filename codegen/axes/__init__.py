"""What can vary between kernels: one class an axis, one record a value. Code reads a record's facts, never its name."""

from codegen.axes.change import Change
from codegen.axes.kind import Kind, Mask
from codegen.axes.operands import Number, Operand, Out
from codegen.axes.scaling import Granularity, Scaling
from codegen.axes.schedule import Cluster, Schedule
from codegen.axes.softmax import Precision, Softmax
from codegen.axes.tile import Tile
from codegen.axes.walk import Walk

__all__ = [
    "Change",
    "Cluster",
    "Granularity",
    "Kind",
    "Mask",
    "Number",
    "Operand",
    "Out",
    "Precision",
    "Scaling",
    "Schedule",
    "Softmax",
    "Tile",
    "Walk",
]
