"""Two networks that know five digits each become one that knows all ten, without training.

Model a is trained on the digits 0-4, model b on 5-9 (scikit-learn's 8 x 8 images), from different
initialisations. Both have ten outputs, one detector per digit, so their output spaces agree.
`zipfx.zip` merges them in several ways; each row of the printed table is one way, measured on
images that no model has seen:

    joint     all ten digits at once
    0-4, 5-9  one task, among its own five digits
    size      parameters, in networks
    FLOPs     operations per image, in networks

Run it with `python examples/digits.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, one_hot, relu
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

import zipfx

TASKS = (range(0, 5), range(5, 10))


class Residual(nn.Module):
    """(B, width, H, W) -> (B, width, H / stride, W / stride)."""

    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(width, width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = relu(self.bn1(self.conv1(x)))
        return relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class Network(nn.Module):
    """Images (B, 1, 8, 8) -> one logit per digit (B, 10)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        convolution = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.stem = nn.Sequential(convolution, nn.BatchNorm2d(width), nn.ReLU())
        self.layer1 = Residual(width, stride=2)
        self.layer2 = Residual(width, stride=1)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layer2(self.layer1(self.stem(x))).mean((2, 3)))
        return logits


def train(images: Tensor, labels: Tensor, seed: int, epochs: int = 20, batch: int = 64) -> Network:
    """A network for the digits in ``labels`` (N,) of ``images`` (N, 1, 8, 8), in eval mode."""
    torch.manual_seed(seed)
    network = Network()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    steps = epochs * (len(images) // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=steps)
    targets = one_hot(labels, 10).float()
    for _ in range(steps):
        chosen = torch.randint(len(images), (batch,))
        loss = binary_cross_entropy_with_logits(network(images[chosen]), targets[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return network.eval()


def split(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """1200 images (N, 1, 8, 8) to train on and their labels (N,), and the other 597 and theirs."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(seed))
    images = torch.tensor(data.images, dtype=torch.float32)[order, None] / 16
    labels = torch.tensor(data.target)[order]
    return images[:1200], labels[:1200], images[1200:], labels[1200:]


@torch.no_grad()
def heads(
    modules: Sequence[nn.Module], images: Tensor, tasks: Sequence[range] = TASKS
) -> list[Tensor]:
    """The outputs (N, 10), one per task: of a model each, or of the heads of a partial zip."""
    outputs = [module(images) for module in modules]
    if isinstance(outputs[0], tuple):
        outputs = list(outputs[0])
    return outputs if len(outputs) == len(tasks) else outputs * len(tasks)


def accuracy(logits: Tensor, labels: Tensor, digits: Sequence[int]) -> float:
    """Percent right among ``digits``, on the images that show one of them."""
    columns = torch.tensor(digits)
    shown = torch.isin(labels, columns)
    predicted = columns[logits[shown][:, columns].argmax(1)]
    return 100 * (predicted == labels[shown]).double().mean().item()


def cost(modules: Sequence[nn.Module], image: Tensor) -> tuple[int, int]:
    """Parameters, and floating-point operations for one ``image`` (1, 1, 8, 8)."""
    with FlopCounterMode(display=False) as counter:
        heads(modules, image)
    size = sum(p.numel() for module in modules for p in module.parameters())
    return size, counter.get_total_flops()


def main() -> None:
    start = time.perf_counter()
    torch.set_num_threads(1)  # networks this small gain nothing from more
    train_x, train_y, test_x, test_y = split()

    own = [torch.isin(train_y, torch.tensor(digits)) for digits in TASKS]
    a, b = (train(train_x[rows], train_y[rows], seed) for seed, rows in enumerate(own))
    loaders = [DataLoader(train_x[rows], batch_size=100) for rows in own]  # of each task; no labels

    def merge(matcher: str, repair: str, partial: str | None = None) -> list[nn.Module]:
        options = {"matcher": matcher, "repair": repair, "partial": partial}
        return [zipfx.zip([a, b], loaders, **options, progress=False)]

    rows: dict[str, list[nn.Module]] = {
        "model a": [a],
        "model b": [b],
        "ensemble": [a, b],
        "weight averaging": merge("identity", "bn"),
        "permute": merge("permute", "bn"),
        "zip": merge("zip", "bn"),
        "zip to layer1": merge("zip", "bn", "layer1"),
        "zip, refitted": merge("zip", "refit"),
        "zip to layer1, refitted": merge("zip", "refit", "layer1"),
    }
    size, flops = cost([a], test_x[:1])
    print(f"{'':24}{'joint':>8}{'0-4':>8}{'5-9':>8}{'size':>8}{'FLOPs':>8}")
    for name, modules in rows.items():
        outputs = heads(modules, test_x)
        joint = accuracy(torch.stack(outputs).mean(0), test_y, range(10))
        tasks = [accuracy(logits, test_y, d) for logits, d in zip(outputs, TASKS, strict=True)]
        row_size, row_flops = cost(modules, test_x[:1])
        print(
            f"{name:24}{joint:8.1f}{tasks[0]:8.1f}{tasks[1]:8.1f}"
            f"{row_size / size:8.2f}{row_flops / flops:8.2f}"
        )
    print(f"{time.perf_counter() - start:.0f} seconds")


if __name__ == "__main__":
    main()
