"""One architecture in several ways to write it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Reference(nn.Module):
    """A convolutional block with a shortcut, a normed linear layer, attention by hand, a head."""

    eps = 1e-5

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8, eps=self.eps)
        self.act, self.pool = nn.ReLU(inplace=True), nn.MaxPool2d(2)
        self.block, self.norm = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8, eps=self.eps, affine=False)
        self.drop, self.fc, self.ln = nn.Dropout(0.5), nn.Linear(8, 6), nn.LayerNorm(6)
        self.h = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.pool(self.act(self.bn(self.conv(x))))
        y = y + self.norm(self.block(y))
        y = self.drop(y.mean((2, 3)))
        return self.h(F.gelu(self.ln(self.fc(y))))


class Functions(Reference):
    """Functions in place of modules, other forms of the same, in another place."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool2d(F.relu(self.bn(self.conv(x))), kernel_size=2)
        y += self.norm(self.block(y))
        y = F.dropout(torch.flatten(F.adaptive_avg_pool2d(y, 1), 1), training=self.training)
        return self.h(F.gelu(self.ln(self.fc(y))))


class OtherNames(nn.Module):
    """Containers and names of its own, one activation for all, no-ops here and there."""

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.stem = nn.Sequential(
            nn.Identity(), nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8, eps, 0.3),
        )  # fmt: skip
        norm = nn.BatchNorm2d(8, eps, affine=False)
        self.body = nn.ModuleDict({"a": nn.Conv2d(8, 8, 1), "n": norm})
        self.head = nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.GELU(), nn.Dropout(0.1))
        self.last = nn.Linear(6, 4)

    def forward(self, images: Tensor) -> Tensor:
        y = torch.clone(self.relu(self.stem(images)))
        y = F.max_pool2d(y, (2, 2), stride=(2, 2))
        y = self.body["n"](self.body["a"](y)).add_(y)
        y = y.mean(dim=[-1, -2], keepdim=True).squeeze(-1).squeeze(-1)
        return self.last(self.head(y.contiguous()))


class OtherEps(OtherNames):
    def __init__(self) -> None:
        super().__init__(eps=1e-2)


def randomised(model: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for m in model.modules():
            if isinstance(m, nn.BatchNorm2d):
                for t in (m.running_mean, m.running_var, m.weight, m.bias):
                    if t is not None:
                        t.copy_(torch.rand(t.shape, generator=generator) + 0.5)
    return model.double().eval()


def built(net: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return randomised(net(), seed)


def with_weights_of(net: Callable[[], nn.Module], model: nn.Module) -> nn.Module:
    """Another implementation, with the same weights in the order in which they are registered."""
    twin = built(net, 9)
    pairs = zip(sorted_state(twin), sorted_state(model), strict=True)
    with torch.no_grad():
        for ours, theirs in pairs:
            ours.copy_(theirs)
    return twin


def sorted_state(model: nn.Module) -> list[Tensor]:
    return [t for t in model.state_dict().values() if t.is_floating_point()]


IMAGES = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(3)).double()
DATA = [(torch.randn(32, 3, 8, 8).double(),) for _ in range(6)]
WAYS = [Reference, Functions, OtherNames, OtherEps]
