"""Models of Hugging Face's transformers, as they are: the page of the docs, and the laws."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zipfx
from benchmarks.huggingface import row, run
from benchmarks.huggingface_models import ALL, FIRST, MORE
from tests.helpers.laws import unharmed
from zipfx import ZipError

#: slow: exports take seconds each; warnings: of transformers, in many ways
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize(
    ("page", "count", "front"), [("huggingface.md", 3, "export"), ("language-models.md", 1, None)]
)
def test_a_page_runs_as_it_is_printed(page: str, count: int, front: str | None) -> None:
    blocks = re.findall(
        r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL
    )
    assert len(blocks) == count
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
    report = names["merged"].meta["zipfx"]
    assert front in (None, report.front)
    assert report.repair == "refit"


@pytest.mark.sweep
@pytest.mark.parametrize(
    "name",
    [
        "BertForSequenceClassification", "LlamaForCausalLM", "T5ForConditionalGeneration",
        "FalconForCausalLM", "DebertaV2ForSequenceClassification", "SwinForImageClassification",
        "SegformerForSemanticSegmentation", "Wav2Vec2ForCTC", "MixtralForCausalLM",
    ],
)  # fmt: skip
def test_the_laws_hold(name: str) -> None:
    _, holds = row(name, ALL[name])
    assert holds


def test_there_are_as_many_as_the_table_says() -> None:
    assert (len(FIRST), len(ALL)) == (43, len(FIRST) + len(MORE))


def gpt2(count: int = 2) -> list[Any]:
    return [ALL["GPT2LMHeadModel"].build(seed) for seed in range(count)]


@pytest.mark.parametrize("partial", [None, "transformer.h.0"])
def test_nothing_of_the_models_is_changed_also_once_they_have_run(partial: str | None) -> None:
    models, data = gpt2(), ALL["GPT2LMHeadModel"].batches(2, 8)
    for model in models:
        run(model, data[0])
    merged = unharmed(models, lambda: zipfx.zip(models, data, partial=partial, progress=False))
    assert isinstance(merged, nn.Module), merged


def test_a_cut_is_a_module_by_its_name_and_heads_may_differ() -> None:
    bert = ALL["BertForSequenceClassification"]
    models: list[Any] = [bert.build(seed) for seed in (0, 1)]
    models[1].classifier = nn.Linear(32, 5)
    merged: Any = zipfx.zip(models, bert.batches(2, 8), partial="bert.encoder.layer.0",
                            front="export", progress=False)  # fmt: skip
    found = merged(**bert.batch(4, 7, torch.float32))
    assert [tuple(y.logits.shape) for y in found] == [(4, 2), (4, 5)]
    trunk = [n for n, _ in merged.named_parameters() if not n.startswith("task_heads")]
    assert not any("layer.1" in n or "classifier" in n for n in trunk)
    assert any("layer.0" in n for n in trunk)


def test_other_lengths_are_free() -> None:
    models, data = gpt2(), ALL["GPT2LMHeadModel"].batches(2, 8)
    merged: Any = zipfx.zip([models[0], copy.deepcopy(models[0])], data, repair="none",
                            progress=False)  # fmt: skip
    for count, length in ((1, 12), (3, 5), (2, 40)):
        tokens = torch.randint(3, 99, (count, length))
        batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        with torch.no_grad():
            expected = models[0](**batch, use_cache=False).logits
            assert torch.allclose(merged(**batch).logits, expected, atol=1e-5)


def test_what_the_merge_was_not_traced_with_is_refused() -> None:
    models, data = gpt2(), ALL["GPT2LMHeadModel"].batches(2, 8)
    merged: Any = zipfx.zip(models, data, repair="none", progress=False)
    with pytest.raises(ZipError, match="'use_cache' was off when the models were traced"):
        merged(**data[0], use_cache=True)
    with pytest.raises(ZipError, match="'position_ids' was None when the models were traced"):
        merged(**data[0], position_ids=torch.arange(12)[None])


def test_files_come_back(tmp_path: Path) -> None:
    models, data = gpt2(), ALL["GPT2LMHeadModel"].batches(2, 8)
    merged: Any = zipfx.zip(models, data, progress=False)
    zipfx.save(merged, tmp_path / "m")
    loaded: Any = zipfx.load(tmp_path / "m", gpt2())
    assert torch.equal(loaded(**data[0]).logits, merged(**data[0]).logits)
