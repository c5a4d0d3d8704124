"""The models run side by side, and every space is observed where it is read."""

from __future__ import annotations

import torch
from torch import nn

from zipfx.analysis.analysis import run_analysis
from zipfx.observe.choose_places import PLACES
from zipfx.observe.data import calibration
from zipfx.observe.joint_graph import observe
from zipfx.trace.tracing import trace


def test_every_space_of_a_network_is_observed_where_it_is_read() -> None:
    torch.manual_seed(0)
    layers = [
        (nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)) for _ in range(2)
    ]
    nets = [nn.Sequential(*modules).double() for modules in layers]
    data = [torch.randn(20, 3).double() for _ in range(4)]
    modules = [trace(net) for net in nets]
    spaces = run_analysis(modules[0], (data[0],)).spaces
    seen = observe(modules, spaces, calibration(data, 2), choose=PLACES["last"])
    assert seen.batches == 4
    with torch.no_grad():
        for name, last in (("0", 2), ("2", 4)):
            (observer,) = seen.observers(name)
            read = torch.cat([net[:last](torch.cat(data)) for net in nets], 1)
            expected = torch.cov(read.T, correction=0)
            torch.testing.assert_close(observer.statistics().covariance, expected)
