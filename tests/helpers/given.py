"""Modules with a forward of one's own, of which some ask Python about their inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn


# ------------------------------------------------------------------ what example inputs can answer
class Given(nn.Module):
    """forward is a function of (module, *inputs); `net` has 4 inputs and 4 outputs."""

    flag: Tensor

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.body, self.net = forward, nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.rand(1, 4))
        self.register_buffer("flag", torch.tensor(1))
        self.table = torch.rand(1, 4)

    def forward(self, x: Any, mask: Any = None) -> Any:
        return self.body(self, x) if mask is None else self.body(self, x) * mask


def filled(m: Any, x: Tensor) -> Tensor:
    b, n = x.shape
    y = torch.zeros(b, n, dtype=x.dtype, device=x.device)
    y[:, : n // 2] = m.net(x)[:, : n // 2]
    y[x > 0] = 1
    return y + torch.arange(n) + torch.full((b, 1), 2.0)


def by_name(m: Any, d: dict[str, Tensor]) -> Tensor:
    y = sum(m.net(v) * len(k) for k, v in d.items())
    y = y + sum(d[k] for k in d) + sum(d.values()) + dict(**d)["u"]
    return y * 2 if "u" in d and "w" not in d and d.get("w") is None else y


ROWS = torch.randn(2, 4)


class Even(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] % 2 == 0 and x.dim() == 2:
            x = x * 2
        return x


class Odd(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


class Leaves(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, name: str) -> bool:
        return isinstance(m, Odd) or super().is_leaf_module(m, name)


def plain(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return plain(x)
