"""Are merges the same, to the bit, as those of another version of the code?

    python -m benchmarks.digests --out before.json          # in one checkout
    python -m benchmarks.digests --against before.json      # in the other

Merges of the real pairs of ../shared and of architectures of torchvision and timm (randomly
initialised), by all matchers, repairs, and several cuts; of each merge the SHA-256 of its tensors,
its outputs, and what its report says (without seconds and bytes). Only the public interface of
zipfx is used, so the file can be copied beside an older version. One thread: sums in another order
would differ.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import zipfx
from benchmarks import architectures, checkpoints, data

PAIRS = {
    "ce_w1": [
        {},
        {"partial": "layer2"},
        {"partial": "layer1", "repair": "bn"},
        {"partial": "layer1.0.conv1", "repair": "affine"},
        {"matcher": "permute"},
        {"matcher": "permute", "repair": "none", "places": "all"},
        {"matcher": "optimal", "repair": "none"},
        {"matcher": "kmeans", "repair": "bn"},
        {"matcher": "weights", "repair": "none"},
        {"matcher": "identity", "repair": "bn"},
        {"matcher": zipfx.Zip(alpha=0.1, beta=0.5), "repair": "none", "places": "last"},
    ],
    "text_w2": [{}, {"partial": "layer2", "repair": "bn"}],
    "resnet20": [{}, {"matcher": "permute", "repair": "bn"}],
    "resnet20_abd": [{"partial": "layer2"}, {"matcher": "optimal", "repair": "bn"}],
}
ARCHITECTURES = {
    "torchvision": """alexnet vgg11_bn squeezenet1_0 densenet121 googlenet mobilenet_v2
        mobilenet_v3_small mnasnet0_5 efficientnet_b0 regnet_y_400mf shufflenet_v2_x0_5
        convnext_tiny resnet18 resnext50_32x4d swin_t swin_v2_t maxvit_t""".split(),
    "segmentation": ["lraspp_mobilenet_v3_large"],
    "timm": """vit_tiny_patch16_224 mixer_s32_224 levit_128s convnextv2_atto res2net50_14w_8s
        eva02_tiny_patch14_224""".split(),
}


def digest(value: Any) -> str:
    """Of tensors by dtype, shape and bytes, and of all else by its text."""
    found = hashlib.sha256()
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            t = leaf.detach().cpu().contiguous()
            found.update(f"{t.dtype} {tuple(t.shape)}".encode())
            found.update(t.reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            found.update(str(leaf).encode())
    return found.hexdigest()[:16]


def of_merge(merged: nn.Module, inputs: Tensor) -> dict[str, str]:
    """Digests of a merge: its tensors by name, its outputs, its report without measured costs."""
    report = dataclasses.replace(merged.meta["zipfx"], seconds={}, bytes={})
    with torch.no_grad():
        outputs = merged.eval()(inputs)
    return {
        "tensors": digest(sorted(merged.state_dict().items(), key=lambda item: item[0])),
        "outputs": digest(outputs),
        "report": digest(repr(report)),
    }


def pairs() -> Iterator[tuple[str, Callable[[], dict[str, str]]]]:
    images = data.read()
    for name, settings in PAIRS.items():
        chosen = checkpoints.named(name)
        batches = list(
            data.calibration(
                images["train"], chosen.tasks, 60, chosen.normalise, seed=0, batch_size=40
            )
        )
        for options in settings:
            yield (
                f"{name} {options}",
                lambda m=chosen.models, b=batches, o=options: of_merge(
                    zipfx.zip(m, b, progress=False, **o), b[0][:8]
                ),
            )


def strangers(source: str, name: str) -> dict[str, str]:
    """Two models of one architecture whose weights have nothing in common, with the repair that
    each can bear."""
    model, x = architectures.smallest(name, source)
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in other.parameters():
            flat = parameter.flatten()
            order = torch.randperm(len(flat), generator=generator)
            parameter.copy_(flat[order].view_as(parameter))
    models = [model.float(), other.float()]
    batches = [x.float(), x.flip(0).mul(0.7).float()]
    return of_merge(zipfx.zip(models, batches, progress=False), batches[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="write the digests to this file")
    parser.add_argument("--against", type=Path, help="compare with the digests of this file")
    parser.add_argument("--only", help="those whose name contains this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    jobs = [
        *pairs(),
        *(
            (f"{source} {name}", lambda s=source, n=name: strangers(s, n))
            for source, listed in ARCHITECTURES.items()
            for name in listed
        ),
    ]
    before = json.loads(options.against.read_text()) if options.against else {}
    found: dict[str, dict[str, str]] = {}
    differing = []
    for name, job in jobs:
        if options.only and options.only not in name:
            continue
        start = time.perf_counter()
        try:
            found[name] = job()
        except zipfx.ZipError as error:  # an error is a result: it must stay the same one
            found[name] = {"error": digest(str(error)), "text": str(error)[:100]}
        said = found[name].get("text", "")
        if options.against:
            same = before.get(name) == found[name]
            differing += [] if same else [name]
            said = "same" if same else f"DIFFERS from {before.get(name)}: {found[name]}"
        print(f"{time.perf_counter() - start:6.1f} s  {name}  {said}", flush=True)
        if options.out:
            options.out.write_text(json.dumps(found, indent=1))
    if options.against:
        print(f"{len(found) - len(differing)} of {len(found)} merges are the same to the bit")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
