"""Are the models of torchvision and timm analysed exactly, and completely?

    python -m benchmarks.architectures --out benchmarks/results/architectures_cpu_202611.md
    python -m benchmarks.architectures --source timm --only levit_128s pit_ti_224

All classifiers and segmenters of torchvision, and timm models of as many families as possible
(`pip install timm`), randomly initialised and with everything random that is constant then (norm
statistics and affines, biases, layer scales, position tables), in float64, at the smallest input
that the model takes. Of each: the spaces that `zipfx.analyze` finds; the parameter axes that are
left fixed, and why; the relative error after every space is permuted at random (law 1); the
parameters of a full zip of two copies relative to one model (law 2); the relative error of a fresh
instance into which the state of a full zip of two that differ was loaded, strictly (law 7);
seconds. Every model has a process of its own, so that none can end the sweep.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves
from torchvision.models import get_model, list_models

import zipfx
from benchmarks import evaluate
from zipfx.text import summary

SOURCES = ("torchvision", "segmentation", "timm")
TIMM = """
resnetv2_50d_gn resnet26t ecaresnet26t seresnext26t_32x4d skresnet18 resnest14d res2net50_14w_8s
regnetz_b16 nf_regnet_b0 eca_nfnet_l0 cspresnet50 dla34 dpn68 rdnet_tiny xception41
inception_resnet_v2 inception_next_atto selecsls42 ese_vovnet19b_slim hrnet_w18_small hgnetv2_b0
tresnet_m lambda_resnet26t efficientnetv2_rw_t tf_efficientnet_b0 mixnet_s mobilenetv4_conv_small
hardcorenas_a fbnetv3_b rexnet_100 mobileone_s0 repvgg_a0 ghostnetv2_100 starnet_s050 fasternet_t0
convnextv2_atto convmixer_768_32 poolformer_s12 caformer_s18 edgenext_xx_small focalnet_tiny_srf
vit_tiny_patch16_224 deit3_small_patch16_224 beit_base_patch16_224 eva02_tiny_patch14_224
cait_xxs24_224 xcit_nano_12_p16_224 pit_ti_224 volo_d1_224 swin_tiny_patch4_window7_224
swinv2_cr_tiny_ns_224 twins_pcpvt_small pvt_v2_b0 coat_lite_tiny nest_tiny levit_128s
mobilevit_xxs tiny_vit_5m_224 coatnet_nano_rw_224 mixer_s32_224
""".split()  # one per family as far as possible, the smallest first
SIZES = (64, 96, 128, 192, 224, 240, 256)  # pixels to try
AUXILIARY = "+aux"  # a segmenter with its auxiliary head
EXACT = 1e-12
UNLIKE = "unlike any other"  # channels of the input, positions; but also what depends on them alone
_POSITIONS = re.compile(r"(^|_)(pos|position|token)(s|_|$)")  # in names of parameters
AT_THE_ENDS = (UNLIKE, "output of the network")


# ------------------------------------------------------------------ models
def names(source: str) -> list[str]:
    """The models of a source that are measured."""
    if source == "timm":
        return TIMM
    if source == "segmentation":
        found = list_models(module=torchvision.models.segmentation)
        return [*found, "fcn_resnet50" + AUXILIARY]
    return list_models(module=torchvision.models)


def _create(
    name: str, source: str, pixels: int | None, settings: Mapping[str, Any] | None = None
) -> nn.Module:
    options = dict(settings or {})
    if source == "timm":
        import timm

        if pixels is not None:
            try:
                sized: nn.Module = timm.create_model(
                    name, pretrained=False, img_size=pixels, **options
                )
                return sized
            except TypeError:  # has no fixed size
                pass
        free: nn.Module = timm.create_model(name, pretrained=False, **options)
        return free
    if source == "segmentation":
        base = name.removesuffix(AUXILIARY)
        options["weights_backbone"] = None
        if not base.startswith("lraspp"):
            options["aux_loss"] = base != name
        name = base
    elif name in ("googlenet", "inception_v3"):
        options |= {"aux_logits": False, "init_weights": False}
    elif name.startswith("vit_") and pixels is not None:
        patch = int(name.rpartition("_")[2])
        options["image_size"] = pixels - pixels % patch
    model: nn.Module = get_model(name, weights=None, **options)
    return model


def build(
    name: str,
    dtype: torch.dtype = torch.float64,
    source: str = "torchvision",
    pixels: int | None = None,
    settings: Mapping[str, Any] | None = None,
) -> nn.Module:
    """A model in eval mode, with everything random that is constant after initialisation.

    pixels: the size of its images, where its constructor wants to know; settings: what else it is
    to be told.
    """
    torch.manual_seed(0)
    model = _create(name, source, pixels, settings).to(dtype).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, t in model.named_parameters():
            _scramble(key, t, generator)
        for key, t in model.named_buffers():
            if key.endswith(("running_mean", "running_var")):
                _scramble(key, t, generator)
    return model


def _scramble(name: str, t: Tensor, generator: torch.Generator) -> None:
    """Fill what is constant, a vector, or a table of positions: with both signs, or around 1."""
    owner, _, last = name.rpartition(".")
    learned = not last.startswith(("weight", "running"))
    table = learned and bool(_POSITIONS.search(f"{owner.rpartition('.')[2]}_{last}"))
    constant = t.numel() > 0 and bool((t == t.flatten()[0]).all())
    if not (t.ndim < 2 or constant or table or "bias" in last):
        return
    zero = t.ndim > 1 and not t.any()
    if table or zero or "bias" in last or last == "running_mean":
        t.copy_(0.3 * torch.randn(t.shape, generator=generator))
    else:
        t.copy_(0.5 + torch.rand(t.shape, generator=generator))


def images(name: str, count: int, size: int = 64, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random images (count, 3, size, size); Inception needs at least 75 pixels."""
    pixels = 96 if name == "inception_v3" and size < 96 else size
    if name == "vit_h_14":
        pixels -= pixels % 14
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 3, pixels, pixels, generator=generator).to(dtype)


def smallest(
    name: str, source: str, settings: Mapping[str, Any] | None = None
) -> tuple[nn.Module, Tensor]:
    """The model for the smallest images that it takes, and two of them."""
    problem: Exception | None = None
    for size in SIZES:
        try:
            x, options = images(name, 2, size), {"pixels": size, "settings": settings}
            tried = build(name, source=source, **options)
            settle(tried, x)
            model = build(name, source=source, **options)  # without caches of that run
            model.load_state_dict(tried.state_dict())
            return model, x
        except Exception as error:  # sizes are refused in many ways
            problem = problem or error
    raise ValueError(f"takes none of {SIZES} pixels: {problem}")


def settle(model: nn.Module, x: Tensor) -> None:
    """Run the model, and scale the random statistics of each BatchNorm to what it receives.

    With unfit ones activations grow from layer to layer, until rounding errors do, too.
    """

    def fit(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if isinstance(norm, _BatchNorm) and norm.running_mean is not None:
            power = inputs[0].square().mean()
            norm.running_mean.mul_(power.sqrt())
            norm.running_var.mul_(power)

    norms = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    hooks = [norm.register_forward_pre_hook(fit) for norm in norms]
    with torch.no_grad():
        model(x)
    for hook in hooks:
        hook.remove()


# ------------------------------------------------------------------ laws
def law_1(model: nn.Module, spaces: zipfx.SpaceMap, x: Tensor, seed: int = 1) -> float:
    """Relative error after every space was permuted at random; of several outputs the worst."""
    with torch.no_grad():
        before = tree_leaves(copy.deepcopy(model)(x))  # a copy: a forward may fill caches
        after = tree_leaves(spaces.permuted(model, spaces.random_permutations(seed))(x))
    return max(
        float((a - b).abs().max() / b.abs().max())
        for a, b in zip(after, before, strict=True)
        if isinstance(b, Tensor)
    )


def law_2(model: nn.Module, x: Tensor) -> float:
    """Parameters of a full zip of two copies, relative to one."""
    merged = zipfx.zip(
        [model, copy.deepcopy(model)], None, matcher="identity", repair="none",
        example_inputs=x, verify=False, progress=False,
    )  # fmt: skip
    return evaluate.parameters([merged]) / evaluate.parameters([model])


def law_7(model: nn.Module, fresh: nn.Module, x: Tensor, seed: int = 2) -> float:
    """Relative error of a fresh instance, into which the state of a full zip of the model and
    another one of its kind was loaded, against what the zip computes.

    Raises:
        RuntimeError: it does not load strictly.
    """
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    learned = [b for n, b in other.named_buffers() if n.endswith(("running_mean", "running_var"))]
    with torch.no_grad():
        for t in (*other.parameters(), *learned):
            t.mul_(1 + 0.1 * torch.rand(t.shape, generator=generator).to(t))
    merged = zipfx.zip(
        [model, other], None, matcher="identity", repair="none", example_inputs=x, verify=False,
        progress=False,
    )  # fmt: skip
    fresh.load_state_dict(merged.state_dict())
    with torch.no_grad():
        pairs = zip(tree_leaves(fresh(x)), tree_leaves(merged(x)), strict=True)
        return max(
            float((a - b).abs().max() / b.abs().max()) for a, b in pairs if isinstance(b, Tensor)
        )


def pinned_axes(spaces: zipfx.SpaceMap) -> set[tuple[str, int]]:
    """Axes left fixed although they are neither the network's input nor its output."""
    return {(p.parameter, p.dim) for p in spaces.pinned if not p.reason.startswith(AT_THE_ENDS)}


def unlike_axes(spaces: zipfx.SpaceMap) -> set[tuple[str, int]]:
    """Axes with features that resemble no other: one, of the input's channels, in a plain CNN."""
    return {(p.parameter, p.dim) for p in spaces.pinned if p.reason.startswith(UNLIKE)}


def in_short(reason: str) -> str:
    """A reason without the place where it applies.

    >>> in_short("aten::x is not understood (node 'a' in module 'b'); teach it with ..., see ...")
    'aten::x is not understood'
    """
    return re.sub(r" ?\(node .*\)|; teach it .*", "", reason)


# ------------------------------------------------------------------ one model
@dataclass
class Row:
    """What is known of a model so far; None where a stage has failed, and then `failures` says why.

    error: of law 1, without numeric verification; verified: with it, where `error` is too large;
    ratio: of law 2; loaded: error of law 7;
    seconds: of the analysis, without verification and with it; reasons: each reason with the axes
    that are pinned for it.
    """

    model: str
    source: str
    pixels: int | None = None
    parameters: int | None = None
    spaces: int | None = None
    blocks: int | None = None
    features: int | None = None
    pinned: int | None = None
    unlike: int | None = None
    error: float | None = None
    verified: float | None = None
    ratio: float | None = None
    loaded: float | None = None
    seconds: tuple[float | None, float | None] = (None, None)
    reasons: dict[str, list[str]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        return self.error is not None and self.error < EXACT

    @property
    def repaired(self) -> bool:
        return self.exact or (self.verified is not None and self.verified < EXACT)

    @property
    def loads(self) -> bool:
        return self.loaded is not None and self.loaded < EXACT

    def cells(self) -> tuple[str, ...]:
        def show(value: float | None, form: str) -> str:
            return "-" if value is None else format(value, form)

        spaces = show(self.spaces, "d") + (f" ({self.blocks})" if self.blocks else "")
        millions = None if self.parameters is None else self.parameters / 1e6
        return (
            self.model, self.source, show(self.pixels, "d"), show(millions, ".1f"), spaces,
            show(self.features, "d"), show(self.pinned, "d"), show(self.unlike, "d"),
            show(self.error, ".0e"), show(self.verified, ".0e"), show(self.ratio, ".3f"),
            show(self.loaded, ".0e"),
            *(show(s, ".1f") for s in self.seconds),
        )  # fmt: skip


HEADER = (
    "model", "source", "pixels", "parameters (M)", "spaces (of blocks)", "features", "pinned axes",
    "unlike axes", "law 1 error", "verified", "law 2 ratio", "law 7 error", "analyze (s)",
    "with verify (s)",
)  # fmt: skip


def _timed(function: Callable[[], zipfx.SpaceMap]) -> tuple[zipfx.SpaceMap, float]:
    start = time.process_time()
    return function(), time.process_time() - start


def _analyse(row: Row, model: nn.Module, x: Tensor) -> zipfx.SpaceMap:
    """The spaces by labels alone, and what the row says of them."""
    spaces, seconds = _timed(lambda: zipfx.analyze(model, x, verify=False))
    row.seconds = seconds, None
    row.spaces, row.blocks = len(spaces), sum(s.of_blocks for s in spaces)
    row.features = sum(s.size for s in spaces)
    row.pinned, row.unlike = len(pinned_axes(spaces)), len(unlike_axes(spaces))
    for p in spaces.pinned:
        row.reasons.setdefault(p.reason, []).append(f"{p.parameter} dim {p.dim}")
    return spaces


def stages(name: str, source: str) -> Iterator[Row]:
    """The row of a model after every stage."""
    row = Row(name, source)
    stage = "build"
    try:
        model, x = smallest(name, source)
        row.pixels, row.parameters = x.shape[-1], evaluate.parameters([model])
        yield row
        stage = "analyze"
        spaces = _analyse(row, model, x)
        yield row
        stage = "law 1"
        row.error = law_1(model, spaces, x)
        yield row
        stage = "verify"
        spaces, slower = _timed(lambda: zipfx.analyze(model, x))
        row.seconds = row.seconds[0], slower
        if not row.exact:
            row.verified = law_1(model, spaces, x)
            for p in spaces.pinned:
                if "numeric check" in p.reason:
                    row.reasons.setdefault(p.reason, []).append(f"{p.parameter} dim {p.dim}")
        yield row
    except Exception as error:  # a row, too
        row.failures[stage] = f"{type(error).__name__}: {error}"
        yield row
    if "build" in row.failures or "analyze" in row.failures:
        return
    for law in (_check_law_7, _check_law_2):  # the second one leaves it in float32
        law(row, model, x)
        yield row


def _check_law_2(row: Row, model: nn.Module, x: Tensor) -> None:
    try:
        row.ratio = law_2(model.float(), x.float())
    except Exception as error:  # a row, too
        row.failures["law 2"] = f"{type(error).__name__}: {error}"


def _check_law_7(row: Row, model: nn.Module, x: Tensor) -> None:
    try:
        fresh = _create(row.model, row.source, row.pixels).to(x.dtype).eval()
        row.loaded = law_7(model, fresh, x)
    except Exception as error:  # a row, too
        row.failures["law 7"] = f"{type(error).__name__}: {error}"


def quick(name: str, source: str, small: float) -> Row:
    """The row of a model in this process, without the numeric check; laws 2 and 7 up to `small`
    parameters."""
    row = Row(name, source)
    try:
        model, x = smallest(name, source)
        row.pixels, row.parameters = x.shape[-1], evaluate.parameters([model])
        spaces = _analyse(row, model, x)
        row.error = law_1(model, spaces, x)
        if row.parameters < small:
            _check_law_7(row, model, x)
            _check_law_2(row, model, x)
    except Exception as error:  # a row, too
        row.failures["analyze" if row.spaces is None else "laws"] = (
            f"{type(error).__name__}: {error}"
        )
    return row


def measure(name: str, source: str, timeout: float, threads: int) -> Row:
    """The row of a model, measured in a process of its own."""
    command = [
        sys.executable, "-W", "ignore", "-m", "benchmarks.architectures", "--source", source,
        "--only", name, "--threads", str(threads), "--child",
    ]  # fmt: skip
    problem = ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
        text = done.stdout
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [""])[-1]
            problem = f"the process ended with code {done.returncode}. {last}"
    except subprocess.TimeoutExpired as late:
        text = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        problem = f"takes longer than {timeout:.0f} s"
    rows = [json.loads(line) for line in text.splitlines() if line.startswith('{"model"')]
    row = Row(**rows[-1]) if rows else Row(name, source)
    if problem:
        row.failures["process"] = problem
    return row


# ------------------------------------------------------------------ the report
def _counts(rows: Sequence[Row]) -> Iterator[str]:
    for source in dict.fromkeys(row.source for row in rows):
        mine = [row for row in rows if row.source == source]
        n = len(mine)
        yield (
            f"- {source}: analysed {sum(r.spaces is not None for r in mine)} of {n}; exact "
            f"{sum(r.exact for r in mine)} of {n} (with verification "
            f"{sum(r.repaired for r in mine)}); law 2 ratio 1.0 in "
            f"{sum(r.ratio == 1.0 for r in mine)} of {n}; loaded into its class with an error "
            f"below 1e-12 (law 7) {sum(r.loads for r in mine)} of {n}; no axis pinned but at the "
            f"ends in {sum(r.pinned == 0 for r in mine)} of {n}"
        )


def _some(models: Iterable[str], most: int = 8) -> str:
    found = list(dict.fromkeys(models))
    return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")


def _pinned_table(rows: Sequence[Row]) -> str:
    axes: dict[str, int] = {}
    models: dict[str, list[str]] = {}
    for row in rows:
        for reason, found in row.reasons.items():
            if not reason.startswith(AT_THE_ENDS):
                short = in_short(reason)
                axes[short] = axes.get(short, 0) + len(found)
                models.setdefault(short, []).append(row.model)
    found = sorted(axes, key=lambda r: -len(set(models[r])))
    return evaluate.table(
        ("pinned because", "axes", "models"), [(r, str(axes[r]), _some(models[r])) for r in found]
    )


def _unlike_table(rows: Sequence[Row]) -> str:
    """Of models where more is unlike any other than the channels of the input."""
    found = []
    for row in rows:
        axes = [a for reason, of in row.reasons.items() if reason.startswith(UNLIKE) for a in of]
        if len(axes) > 1:
            found.append((row.model, str(len(axes)), summary(axes, 150, " (+{} more)")))
    return evaluate.table(("model", "axes", "which"), found)


def one_line(text: str, most: int = 300) -> str:
    """A message for a cell of a table: without line breaks and paths of this machine."""
    text = re.sub(r"/\S*?/site-packages/", "", text).split(". Move the line")[0]
    text = " ".join(text.split()).replace("|", "\\|")
    return text if len(text) <= most else text[: most - 3] + "..."


def report(rows: Sequence[Row]) -> str:
    parts = [
        "# Models of torchvision and timm, analysed",
        evaluate.environment("benchmarks.architectures", ["timm"]),
        "\n".join(_counts(rows)),
        "Exact: the same function (float64, relative error below 1e-12) after a random permutation "
        "of every space, which `zipfx.analyze` found without its numeric check; 'verified' is the "
        "error with it, where it was needed. Norm statistics, affines, biases, layer scales and "
        "position tables are random. Input: two images of the smallest size that the model takes. "
        "Pinned axes: parameter axes left fixed (in whole or in part) though they are not the "
        "network's input or output. Unlike axes: those where a feature resembles no other (input "
        "channels: one axis; positions; what is computed from positions alone). Law 2 ratio: "
        "parameters of a full zip of two copies over those of one. Law 7 error: relative, in "
        "float64, of a fresh instance into which the state of a full zip of two different models "
        "was loaded (strictly), against the zip. Seconds: process time of "
        "`zipfx.analyze`.",
        evaluate.table(HEADER, [row.cells() for row in rows]),
    ]
    if any(row.pinned for row in rows):
        parts += ["## What is pinned", _pinned_table(rows)]
    if any((row.unlike or 0) > 1 for row in rows):
        parts += ["## What is unlike any other, besides one axis of input channels"]
        parts += [_unlike_table(rows)]
    failures = [
        (row.model, stage, one_line(why)) for row in rows for stage, why in row.failures.items()
    ]
    if failures:
        parts += ["## What fails", evaluate.table(("model", "stage", "reason"), failures)]
    return "\n\n".join(parts)


def _chosen(sources: Collection[str], only: Collection[str]) -> Iterator[tuple[str, str]]:
    for source in SOURCES:
        for name in names(source) if source in sources else ():
            if not only or name in only:
                yield name, source


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    evaluate.add_arguments(parser)
    parser.add_argument("--source", nargs="+", choices=SOURCES, default=list(SOURCES))
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these models")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one model")
    parser.add_argument("--quick", action="store_true", help="no numeric check, one process")
    parser.add_argument(
        "--small",
        type=float,
        default=1e12,
        help="parameters up to which --quick looks at laws 2 and 7",
    )
    parser.add_argument(
        "--rows", type=Path, help="file for rows as JSON lines; models in it are not measured again"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    chosen = list(_chosen(options.source, options.only))
    if options.child:
        for row in stages(*chosen[0]):
            print(json.dumps(dataclasses.asdict(row)), flush=True)
        return
    stored = options.rows.read_text().splitlines() if options.rows and options.rows.exists() else []
    known = {(row.model, row.source): row for row in (Row(**json.loads(line)) for line in stored)}
    rows = []
    for name, source in chosen:
        if (name, source) in known:
            rows.append(known[name, source])
            continue
        rows.append(
            quick(name, source, options.small)
            if options.quick
            else measure(name, source, options.timeout, options.threads)
        )
        print(*rows[-1].cells(), *rows[-1].failures, flush=True)
        if options.rows:
            with options.rows.open("a") as file:
                print(json.dumps(dataclasses.asdict(rows[-1])), file=file)
    evaluate.publish(report(rows), options.out)


if __name__ == "__main__":
    main()
