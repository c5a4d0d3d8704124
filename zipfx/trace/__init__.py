"""Trace, the first stage: models become graphs.

Takes K modules and example inputs. Gives K graph modules that keep the names of the models, and
(`align`) whose nodes correspond one by one up to the cut.
"""

from zipfx.trace.align.alignment import aligned
from zipfx.trace.align.correspond import check_constants, check_outputs, counterparts, same_graph
from zipfx.trace.by_example import ExampleTracer, with_tensors
from zipfx.trace.cut import first_name, last_node, unpacked
from zipfx.trace.symbolic import Tracer
from zipfx.trace.tracing import EXPECTS, NOTES, trace, ways
from zipfx.trace.tree import Tree, ValueOf, own_tensors, plant, plant_unused

__all__ = [
    "EXPECTS",
    "NOTES",
    "ExampleTracer",
    "Tracer",
    "Tree",
    "ValueOf",
    "aligned",
    "check_constants",
    "check_outputs",
    "counterparts",
    "first_name",
    "last_node",
    "own_tensors",
    "plant",
    "plant_unused",
    "same_graph",
    "trace",
    "unpacked",
    "ways",
    "with_tensors",
]
