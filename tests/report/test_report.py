"""What a merge says of itself in numbers."""

from __future__ import annotations

import pytest

from tests.helpers.laws import merge
from tests.helpers.models import NETS


def test_the_report_counts() -> None:
    net = NETS["Hierarchy"]
    models = [net.build(s) for s in (0, 1)]
    report = merge(models, net.batches(2), partial="stages.0.1").meta["zipfx"]
    assert report.models == 2
    assert report.partial == "stages.0.1"
    assert report.layers == (5, 10)
    assert report.model_parameters == tuple(sum(p.numel() for p in m.parameters()) for m in models)
    assert report.model_flops[0] < report.flops < sum(report.model_flops)
    assert all(0 <= s.within + s.across <= s.size for s in report.spaces)
    assert all(s.within + s.across == s.size for s in report.spaces)
    assert set(report.seconds) >= {"trace", "analyze", "observe", "match", "fuse", "repair"}
    with pytest.raises(AttributeError):
        report.models = 3
