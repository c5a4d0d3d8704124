"""Trace, the first stage: models become graphs.

Takes K modules and example inputs. Gives K graph modules that keep the names of the models, and
(`align`) whose nodes correspond one by one up to the cut.
"""

from zipfx.trace.align.correspond import counterparts, same_graph
from zipfx.trace.align.cut import unpacked
from zipfx.trace.align.models import TracedModels, correspond, trace_all
from zipfx.trace.by_example import ExampleTracer, with_tensors
from zipfx.trace.record import KEY, record_of
from zipfx.trace.symbolic import Tracer
from zipfx.trace.tracing import trace, ways
from zipfx.trace.tree import Tree, ValueOf, own_tensors, plant, plant_unused

__all__ = [
    "KEY",
    "ExampleTracer",
    "TracedModels",
    "Tracer",
    "Tree",
    "ValueOf",
    "correspond",
    "counterparts",
    "own_tensors",
    "plant",
    "plant_unused",
    "record_of",
    "same_graph",
    "trace",
    "trace_all",
    "unpacked",
    "ways",
    "with_tensors",
]
