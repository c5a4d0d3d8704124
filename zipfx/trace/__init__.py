"""Trace, the first stage: models become graphs.

Takes K modules and example inputs. Gives K graph modules that keep the names of the models, and
(`align`) whose nodes correspond one by one up to the cut.
"""

from zipfx.trace.align.correspond import counterparts, same_graph
from zipfx.trace.align.cut import unpacked
from zipfx.trace.align.models import TracedModels, correspond, trace_all
from zipfx.trace.fronts.by_example import ExampleTracer, with_tensors
from zipfx.trace.fronts.exported import Export, switched_off, unwrapped
from zipfx.trace.fronts.front import Front
from zipfx.trace.fronts.recorded import tracers
from zipfx.trace.fronts.symbolic import Tracer
from zipfx.trace.record import KEY, record_of
from zipfx.trace.tracing import FrontName, front_of, given_of, trace
from zipfx.trace.tree import Tree, ValueOf, own_tensors, plant, plant_unused

__all__ = [
    "KEY",
    "ExampleTracer",
    "Export",
    "Front",
    "FrontName",
    "TracedModels",
    "Tracer",
    "Tree",
    "ValueOf",
    "correspond",
    "counterparts",
    "front_of",
    "given_of",
    "own_tensors",
    "plant",
    "plant_unused",
    "record_of",
    "same_graph",
    "switched_off",
    "trace",
    "trace_all",
    "tracers",
    "unpacked",
    "unwrapped",
    "with_tensors",
]
