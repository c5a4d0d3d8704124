"""200 models of timm, of all of its families: do laws 1 to 3 hold?

    python -m benchmarks.timm_models --rows rows.json --out benchmarks/results/timm_cpu_202611.md
    python -m benchmarks.timm_models --only levit_128s pit_ti_224
    python -m benchmarks.timm_models --choose

A family is what a file of timm has under one leading word (`choose`): of each the member with the
fewest parameters, then of the smallest families the next one, until there are 200; timm's own
models for tests are left out. Nothing is pretrained, and everything random that is constant at
first, as in `architectures`; float64, two images of the smallest size that the model takes. What
has more than 6 million parameters has two layers in each stage, or is narrower, where timm has a
setting for it, so that the sweep takes about an hour of a core. Of each: the front that traced it;
the spaces that `zipfx.analyze` finds by labels alone, without its numeric check; the axes left
fixed that are not at the ends of the network, and why; the relative error after every space is
permuted at random (law 1); the parameters of a full zip of the model and that copy, by
matcher="permute" and with repair="none", relative to one (law 2); on new images the relative error
of that zip (law 3), and of the worse head of a partial zip that is cut in the middle of the
network; where spaces were observed: at the default places, or at all, where too many features are
dead at those to be told apart by so few images; process seconds of everything.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import json
import multiprocessing
import re
import resource
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zipfx
from benchmarks import evaluate
from benchmarks.architectures import EXACT, images, law_1, one_line, smallest
from benchmarks.huggingface import error, pinned
from zipfx.trace.nodes import module_paths

NAMES = """
starnet_s050 starnet_s100 dla46x_c mobilevit_xxs dla46_c edgenext_xx_small mobilevitv2_050
mobilenetv3_small_050 lcnet_035 mobilenetv2_035 lcnet_050 ese_vovnet19b_slim_dw
mobilenetv4_conv_small_035 mobilenetv2_050 mnasnet_small tf_mobilenetv3_small_075 tinynet_e
tf_mobilenetv3_small_minimal_100 semnasnet_050 convnext_zepto_rms convnext_zepto_rms_ols
mnasnet_050 repghostnet_050 mobilevit_xs edgenext_x_small tinynet_d efficientvit_m0 repghostnet_058
ghostnet_050 regnetx_002 cspnext_tiny mobilevitv2_075 iformer_t semnasnet_075 efficientvit_m1
xcit_nano_12_p8_224 xcit_nano_12_p8_384 regnety_002 ese_vovnet19b_slim cs3darknet_focus_s
cs3darknet_s ghostnetv3_050 efficientvit_b0 swiftformer_xs efficientformerv2_s0 pvt_v2_b0
convnextv2_atto fasternet_t0 fastvit_t8 mobilenet_edgetpu_100 lcnetv2_small mixnet_s tf_mixnet_s
inception_next_atto spnasnet_100 efficientnet_lite0 rexnet_100 mobileone_s1 pit_ti_224 rexnetr_100
hardcorenas_b resnet10t repvit_m1 vit_tiny_patch16_dinov3_qkvb coat_tiny eva02_tiny_patch14_224
fbnetc_100 convit_tiny deit_tiny_patch16_224 vit_tiny_patch16_224 gmlp_ti16_224 hgnetv2_b0 shvit_s1
vit_tiny_r_s16_p8_224 cpubone_nano efficientvim_m1 crossvit_tiny_240 regnetz_005 mambaout_femto
maxvit_pico_rw_256 levit_128s densenet121 densenetblur121d halonet_h1 gernet_s fbnetv3_b
nf_regnet_b0 repvgg_a0 dpn48b regnetz_b16 resnext26ts eca_resnext26ts visformer_tiny seresnext26ts
gcresnext26ts eca_botnext26ts_256 resnest14d bat_resnext26ts coatnet_pico_rw_224 lambda_resnet26t
csatv2 haloregnetz_b resnetv2_18 resnetblur18 legacy_seresnet18 seresnet18 poolformerv2_s12
poolformer_s12 cait_xxs24_224 skresnet18 gcvit_xxtiny tiny_vit_5m_224 efficientformer_l1
botnet26t_256 gmixer_12_224 hrnet_w18_small efficientnetv2_rw_t gc_efficientnetv2_rw_t
sehalonet33ts sebotnet33ts_256 lowformer_b0 darknet17 coatnext_nano_rw_224 hgnet_tiny resmlp_12_224
ecaresnext26t_32x4d ecaresnet26t maxxvit_rmlp_nano_rw_256 seresnext26t_32x4d nest_tiny resnet32ts
mixer_s16_224 seresnet33ts gcresnet33ts cspresnext50 regnetv_040 sedarknet21 convmixer_768_32
cspresnet50 resnetaa34d vit_srelpos_small_patch16_224 flexivit_small vitamin_small_224
lamhalobotnet50ts_256 vovnet39a eca_vovnet39b halo2botnet50ts_256 legacy_xception
maxxvitv2_nano_rw_256 tnt_s_legacy_patch16_224 inception_v3 rdnet_tiny twins_svt_small eca_nfnet_l0
mvitv2_tiny res2next50 resnext50_32x4d caformer_s18 volo_d1_224 convformer_s18 sam2_hiera_tiny
xception41p skresnext50_32x4d cspdarknet53 sequencer2d_s hiera_tiny_224 seresnetaa50d
swin_tiny_patch4_window7_224 swinv2_cr_tiny_224 swinv2_tiny_window16_256 davit_tiny
focalnet_tiny_srf ecaresnetlight selecsls42 tresnet_m nextvit_small hieradet_small nfnet_l0
resnetrs50 darknetaa53 inception_v4 inception_resnet_v2 wide_resnet50_2 dm_nfnet_f0
mobilenetv5_base pnasnet5large samvit_base_patch16_224 naflexvit_base_patch16_parfac_gap
beit_base_patch16_224 beitv2_base_patch16_224 beit3_base_patch16_224 qwen3_vit_88m nasnetalarge
seresnextaa101d_32x8d senet154 vgg11 gemma4_vit_167m eva_large_patch14_196 aimv2_large_patch14_224
deepseek_vit_412m
""".split()  # what `--choose` prints, with timm 1.0.31
LARGE = 6e6  # parameters; from there on with fewer layers
FEWER: tuple[dict[str, Any], ...] = (  # two in each stage, as timm spells it
    {"depth": 2}, {"depths": (2, 2, 2, 2)}, {"layers": (2, 2, 2, 2)},
)  # fmt: skip
NARROWER: dict[str, dict[str, Any]] = {
    "nasnetalarge": {"stem_size": 32, "num_features": 1056},
    "vgg11": {"mlp_ratio": 0.1},
    "sam2_hiera_tiny": {"embed_dim": 48, "stages": (1, 1, 2, 1)},
    "hieradet_small": {"embed_dim": 48, "stages": (1, 1, 2, 1)},
    "hiera_tiny_224": {"embed_dim": 48, "stages": (1, 1, 2, 1)},
    "davit_tiny": {"embed_dims": (48, 96, 192, 384), "depths": (1, 1, 1, 1)},
    "swin_tiny_patch4_window7_224": {"embed_dim": 48, "depths": (2, 2, 2, 2)},
    "swinv2_cr_tiny_224": {"embed_dim": 48, "depths": (2, 2, 2, 2)},
    "swinv2_tiny_window16_256": {"embed_dim": 48, "depths": (2, 2, 2, 2)},
    "rdnet_tiny": {"growth_rates": (32, 52, 64, 64, 64, 64, 112)},
}
SAMPLES = 16  # images to match with
MEMORY = 12  # GiB of addresses that a model may take
COARSE = 1e-5  # exact to rounding, where a model computes in float32 in between
_COORDINATES = re.compile(r": it meets fixed coordinates \(.*?\)")  # what "unlike any other" means


# ------------------------------------------------------------------ which models
def family(module: str, name: str) -> tuple[str, str]:
    """A file of timm, and the word that a name begins with.

    >>> family("efficientnet", "mobilenetv2_050"), family("byobnet", "repvgg_a0")
    (('efficientnet', 'mobilenetv'), ('byobnet', 'repvgg'))
    """
    word = re.match("[a-z]+", name)
    return module, word.group() if word else name


def size(name: str, settings: Mapping[str, Any]) -> int:
    """The number of parameters, without making any."""
    import timm

    with torch.device("meta"):
        return evaluate.parameters([timm.create_model(name, pretrained=False, **settings)])


def smaller(name: str) -> dict[str, Any]:
    """Settings by which a large model has fewer parameters, if timm takes any of those known."""
    full = size(name, {})
    for settings in (NARROWER.get(name, {}), *FEWER) if full > LARGE else ():
        with contextlib.suppress(Exception):  # settings are refused in many ways
            if size(name, settings) < full:
                return settings
    return {}


def choose(count: int = 200) -> list[str]:
    """The smallest member of each family, then the next ones of the smallest; by size."""
    import timm

    members: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for module in timm.list_modules():
        for name in timm.list_models(module=module, exclude_filters="test_*"):
            members.setdefault(family(module, name), []).append((size(name, {}), name))
    ranked = [sorted(of) for of in members.values()]
    rounds = [sorted(of[k] for of in ranked if k < len(of)) for k in range(2)]
    return [name for _, name in sorted((rounds[0] + rounds[1])[:count])]


# ------------------------------------------------------------------ one model
@dataclass
class Row:
    """What is known of a model; None where a stage has failed, and then `failures` says why.

    places: where spaces were observed; cut: the last module that the partial zip merges; heads: the
    error of law 3 there; rounded: whether the model takes float64 to float32 in between.
    """

    model: str
    settings: str = ""
    pixels: int | None = None
    parameters: int | None = None
    front: str = "-"
    spaces: int | None = None
    blocks: int | None = None
    features: int | None = None
    pinned: str = "-"
    law_1: float | None = None
    law_2: float | None = None
    law_3: float | None = None
    places: str = "-"
    cut: str = "-"
    heads: float | None = None
    rounded: bool = False
    seconds: float | None = None
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Laws 1 to 3."""
        errors = (self.law_1, self.law_3, self.heads)
        most = COARSE if self.rounded else EXACT
        return self.law_2 == 1.0 and all(e is not None and e < most for e in errors)

    def cells(self) -> tuple[str, ...]:
        def show(value: float | None, form: str) -> str:
            return "-" if value is None else format(value, form)

        millions = None if self.parameters is None else self.parameters / 1e6
        return (
            self.model + (f" ({self.settings})" if self.settings else ""),
            self.front + (" (float32 inside)" if self.rounded else ""),
            show(self.pixels, "d"), show(millions, ".1f"),
            show(self.spaces, "d") + (f" ({self.blocks})" if self.blocks else ""),
            show(self.features, "d"), _COORDINATES.sub("", self.pinned), show(self.law_1, ".0e"),
            show(self.law_2, ".3f"), show(self.law_3, ".0e"), show(self.heads, ".0e"),
            self.places, f"`{self.cut}`", show(self.seconds, ".0f"),
        )  # fmt: skip


HEADER = (
    "model", "front", "pixels", "parameters (M)", "spaces (of blocks)", "features", "fixed axes",
    "law 1", "law 2", "law 3", "law 3, heads", "places", "cut", "seconds",
)  # fmt: skip


class _Rounding(TorchDispatchMode):
    """Notices where float64 becomes float32."""

    found = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {t.dtype for t in tree_leaves(args) if isinstance(t, Tensor)}
        if torch.float64 in given and isinstance(made, Tensor) and made.dtype == torch.float32:
            self.found = True
        return made


def run(model: nn.Module, x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        keeps = not isinstance(model, torch.fx.GraphModule)  # a forward may fill caches
        found = (copy.deepcopy(model) if keeps else model)(x)
    return [t for t in tree_leaves(found) if isinstance(t, Tensor)]


def middle(merged: torch.fx.GraphModule) -> str:
    """The module in whose call, of those in the order in which they end, half of all have ended."""
    paths = [path for node in reversed(merged.graph.nodes) for path in module_paths(node)]
    ended = [path for path in dict.fromkeys(paths) if path]
    return ended[len(ended) // 2]


def fill(row: Row) -> None:
    """The laws of a model, one after another, into its row."""
    settings = smaller(row.model)
    row.settings = ", ".join(f"{key}={value}" for key, value in settings.items())
    model, x = smallest(row.model, "timm", settings)
    row.pixels, row.parameters = x.shape[-1], evaluate.parameters([model])
    with _Rounding() as rounding:
        run(model, x)
    row.rounded = rounding.found
    spaces = zipfx.analyze(model, x, verify=False)
    row.spaces, row.blocks = len(spaces), sum(s.of_blocks for s in spaces)
    row.features, row.pinned = sum(s.size for s in spaces), pinned(spaces)
    row.law_1 = law_1(model, spaces, x)
    twin = spaces.permuted(model, spaces.random_permutations(1))
    data = [images(row.model, SAMPLES, row.pixels)]
    new = torch.randn(x.shape, generator=torch.Generator().manual_seed(3)).to(x)
    expected = run(model, new)

    def merge(cut: str | None) -> torch.fx.GraphModule:
        return zipfx.zip(
            [model, twin], data, partial=cut, matcher="permute", repair="none", places=row.places,
            verify=False, progress=False,
        )  # fmt: skip

    for row.places in ("source", "all"):
        merged = merge(None)
        row.front = merged.meta["zipfx"].front
        row.law_2 = evaluate.parameters([merged]) / row.parameters
        row.law_3 = error(expected, run(merged, new))
        row.cut = middle(merged)
        del merged
        row.heads = error(expected * 2, run(merge(row.cut), new))
        if row.holds:
            break


def measure(row: Row) -> Row:
    """The row, filled as far as possible."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    start = time.process_time()
    try:
        fill(row)
    except Exception as failure:  # whatever it is, it is a row
        row.failures["laws"] = f"{type(failure).__name__}: {failure}"
    row.seconds = time.process_time() - start
    return row


def apart(name: str, timeout: float) -> Row:
    """The row of a model, measured in a process of its own, which starts with torch loaded."""

    def work(there: Connection) -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY << 30, MEMORY << 30))
        there.send(dataclasses.asdict(measure(Row(name))))

    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(there,))
    process.start()
    there.close()
    row = Row(name, failures={"process": f"takes longer than {timeout:.0f} s"})
    try:
        if here.poll(timeout):
            row = Row(**here.recv())
    except EOFError:
        process.join()
        row.failures["process"] = f"the process ended with code {process.exitcode}"
    process.kill()
    process.join()
    return row


# ------------------------------------------------------------------ the report
def report(rows: Sequence[Row]) -> str:
    fronts = Counter(row.front for row in rows)
    holding = sum(row.holds for row in rows)
    parts = [
        "# Models of timm, of all of its families",
        evaluate.environment("benchmarks.timm_models", ["timm"]),
        f"Laws 1 to 3 hold for {holding} of {len(rows)} models ({holding / len(rows):.1%}). "
        + "Fronts: " + ", ".join(f"{front} {n}" for front, n in fronts.most_common()) + ". "
        "Other work shared the cores.",
        " ".join((__doc__ or "").split("\n\n", 2)[2].split())
        + f" Laws 1 and 3 hold below {EXACT:.0e}, or below {COARSE:.0e} where a model takes "
        "numbers to float32 in between; law 2 where no parameter is kept twice.",
    ]  # fmt: skip
    failing = [row for row in rows if not row.holds]
    if failing:
        parts += ["## What does not hold", evaluate.table(("model", "what"), map(_why, failing))]
    parts += ["## All", evaluate.table(HEADER, [row.cells() for row in rows])]
    unmeasured = [name for name in NAMES if name not in {row.model for row in rows}]
    if unmeasured:
        text = f"Not measured yet, {len(unmeasured)} of {len(NAMES)}: {', '.join(unmeasured)}."
        parts += [text]
    return "\n\n".join(parts)


def _why(row: Row) -> tuple[str, str]:
    cells = dict(zip(HEADER, row.cells(), strict=True))
    laws = [f"{law} {cells[law]}" for law in ("law 1", "law 2", "law 3", "law 3, heads")]
    return row.model, "; ".join([*laws, *map(one_line, row.failures.values())])


def main() -> None:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    evaluate.add_arguments(parser)
    parser.add_argument("--only", nargs="+", default=NAMES, metavar="NAME", help="these models")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one model")
    parser.add_argument("--choose", action="store_true", help="print which models are chosen")
    parser.add_argument(
        "--rows", type=Path, help="file for rows as JSON lines; models in it are not measured again"
    )
    parser.add_argument("--stored", action="store_true", help="only those that are in --rows")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    if options.choose:
        print(*choose())
        return
    stored = options.rows.read_text().splitlines() if options.rows and options.rows.exists() else []
    known = {row.model: row for row in (Row(**json.loads(line)) for line in stored)}
    import timm  # once, before the processes  # noqa: F401

    for name in options.only:
        if name in known or options.stored:
            continue
        row = known[name] = apart(name, options.timeout)
        print(*row.cells(), *row.failures.values(), "" if row.holds else "<- not", flush=True)
        if options.rows:
            with options.rows.open("a") as file:
                print(json.dumps(dataclasses.asdict(row)), file=file)
    found = [known[name] for name in options.only if name in known]
    evaluate.publish(report(found), options.out)


if __name__ == "__main__":
    main()
