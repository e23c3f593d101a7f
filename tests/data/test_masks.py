"""Loss masks: labels are masked, and the step counts the remaining targets in every layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep.config.corpus import TokenizerSection
from data_prep.formats.maskfile import MASK, open_mask
from data_prep.tokenizer.train import train
from foundation.errors import ConfigError, DataError
from pipeline.config.batch import BatchSizes
from pipeline.config.sections.data import DataSection
from pipeline.data import files as files_module
from pipeline.data.dataset import TokenDataset
from pipeline.data.loader import StepLoader, heldout_batches
from pipeline.data.micro_batch import IGNORE
from pipeline.data.mixture import DataMixture, open_mixture
from tests import warm

T = 32
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens of 200 conversations, packed for samples of T tokens, too."""
    work = tmp_path_factory.mktemp("talks")
    (work / "tokenizer").mkdir()
    section = TokenizerSection(train="bpe", vocab_size=400, special_tokens=["<|im_start|>", "<|im_end|>"])
    train(["the miller said to the user that the wheel turns"] * 20, work / "tokenizer", section)
    (work / "template.jinja").write_text(TEMPLATE)
    talks = [
        [
            {"role": "user", "content": f"what of wheel {i}"},
            {"role": "assistant", "content": f"it turns {'on ' * (i % 7)}{i}"},
        ]
        for i in range(200)
    ]
    (work / "a.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    config = {
        "output": "tokens",
        "sources": [{"path": "a.jsonl", "messages_field": "messages"}],
        "tokenizer": {"path": "tokenizer", "chat_template": "template.jinja"},
        "heldout_fraction": 0.2,
    }
    (work / "corpus.json").write_text(json.dumps(config))
    for words in (["--config", "corpus.json"], ["pack", "tokens", "--length", str(T)]):
        warm.run("-m", "data_prep", *words, cwd=work, imported="data_prep").check_returncode()
    return work / "tokens"


def mixture_of(talks: Path, **fields: object) -> DataMixture:
    return open_mixture(DataSection(sources=[{"path": str(talks)}], sequence_length=T, **fields), seed=3)


@pytest.mark.parametrize("packing", ["contiguous", "best_fit"])
@pytest.mark.parametrize("mask_documents", [False, True])
@pytest.mark.parametrize(
    ("dp", "cp", "zigzag"), [(1, 1, False), (2, 1, False), (3, 1, False), (1, 2, False), (1, 2, True)]
)
def test_all_ranks_together_have_the_targets_of_the_loss_mask_and_their_count(
    talks: Path, packing: str, mask_documents: bool, dp: int, cp: int, zigzag: bool
) -> None:
    mixture = mixture_of(talks, packing=packing)
    batch = BatchSizes(samples=6, micro=6 // dp, accumulation=1, dp=dp, sequence_length=T)
    found, promised = 0, set()
    for dp_rank in range(dp):
        for cp_rank in range(cp):
            location = {"dp_rank": dp_rank, "cp": cp, "cp_rank": cp_rank, "zigzag": zigzag}
            loader = StepLoader(mixture, batch, steps=(1, 3), mask_documents=mask_documents, **location)
            for step in loader:
                promised.add((step.step, step.targets))
                found += sum(int((micro.labels != IGNORE).sum()) for micro in step.micro_batches)
    assert len(promised) == 3
    assert found == sum(targets for _, targets in promised)
    assert found < 3 * 6 * T


@pytest.mark.integration
@pytest.mark.parametrize(("packing", "mask_documents"), [("contiguous", True), ("best_fit", False), ("best_fit", True)])
@pytest.mark.parametrize("samples", [6, 7], ids=["", "with padding rows"])
def test_ranks_that_count_their_own_targets_and_add_them_up_have_those_of_the_whole_step(
    talks: Path, packing: str, mask_documents: bool, samples: int
) -> None:
    mixture, steps = mixture_of(talks, packing=packing), (2, 41)  # over two windows of steps that are counted ahead
    batch = BatchSizes(samples=samples, micro=3, accumulation=1, dp=3, sequence_length=T)
    added = np.zeros(40, dtype=np.int64)
    for dp_rank in range(3):
        about = {"dp_rank": dp_rank, "steps": steps, "mask_documents": mask_documents}
        whole = list(StepLoader(mixture, batch, **about))
        own = list(StepLoader(mixture, batch, **about, target_sum=lambda counts: lambda: counts))
        added += [step.targets if step.has_targets else 0 for step in own]
        for one, other in zip(whole, own, strict=True):
            assert all(a.labels.equal(b.labels) for a, b in zip(one.micro_batches, other.micro_batches, strict=True))
    assert added.tolist() == [step.targets for step in whole]


def test_a_rank_whose_targets_are_added_up_opens_the_files_of_its_own_samples(
    talks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture, asked = mixture_of(talks), set[int]()
    looked_up = mixture.boundaries

    def noted(samples: Any) -> Any:
        asked.update(samples.tolist())
        return looked_up(samples)

    monkeypatch.setattr(mixture, "boundaries", noted)
    batch = BatchSizes(samples=6, micro=2, accumulation=1, dp=3, sequence_length=T)
    list(StepLoader(mixture, batch, dp_rank=1, steps=(1, 4), mask_documents=True, target_sum=lambda own: lambda: own))
    assert asked == {6 * step + row for step in range(4) for row in (2, 3)}


def test_the_loss_mask_covers_the_tokens_of_the_assistant(talks: Path) -> None:
    from tokenizers import Tokenizer  # noqa: PLC0415

    tokenizer = Tokenizer.from_file(str(talks / "tokenizer" / "tokenizer.json"))
    mixture = mixture_of(talks)
    batch = BatchSizes(samples=4, micro=4, accumulation=1, dp=1, sequence_length=T)
    for step in StepLoader(mixture, batch, dp_rank=0, steps=(1, 4)):
        for micro in step.micro_batches:
            labels = micro.labels.numpy()
            for row in labels:
                text = tokenizer.decode(row[row != IGNORE].tolist(), skip_special_tokens=False)
                assert "user" not in text
                assert "what of" not in text
                assert "<|endoftext|>" not in text


def test_held_out_batches_have_only_the_targets_of_the_loss_mask(talks: Path) -> None:
    dataset = TokenDataset.open(talks, split="heldout", sequence_length=T)
    assert dataset.masked
    windows = np.arange(dataset.windows)
    expected = int(dataset.loss_mask(windows)[:, 1:].sum())
    for cp in (1, 2):
        found = 0
        for cp_rank in range(cp):
            batches = heldout_batches(dataset, batch_size=3, dp=1, dp_rank=0, cp=cp, cp_rank=cp_rank)
            found += sum(int((batch.labels != IGNORE).sum()) for batch in batches)
        assert found == expected
    assert 0 < expected < dataset.windows * T


@pytest.mark.parametrize("packing", ["contiguous", "best_fit"])
def test_every_rank_reads_ahead_the_masks_of_a_step(talks: Path, packing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mixture = mixture_of(talks, packing=packing)
    (dataset,) = mixture.sources
    assert isinstance(dataset.files, files_module.OpenFiles)
    hinted: list[tuple[int, int]] = []
    monkeypatch.setattr(files_module, "will_need", lambda address, size: hinted.append((address, size)))
    batch = BatchSizes(samples=6, micro=1, accumulation=1, dp=6, sequence_length=T)
    for step in StepLoader(mixture, batch, dp_rank=1, steps=(1, 4), prefetch=1):
        spans = dataset.spans(mixture.order.locate(np.arange(6) + 6 * (step.step - 1)).window)
        for each in dataset._shard_spans(spans):
            mask = dataset.files.mask(each.prefix, each.tokens)
            assert (mask.address + each.start, each.length) in hinted


def test_a_missing_loss_mask_or_one_of_another_length_is_refused(talks: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(talks, tmp_path / "copy")
    dataset = TokenDataset.open(copy, split="train", sequence_length=T)
    path = copy / f"train/shard-00000{MASK}"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=rf"has {len(whole) - 1} bytes for {len(whole)} tokens"):
        dataset.loss_mask([0])
    path.unlink()
    with pytest.raises(DataError, match=r"shard-00000\.mask is missing"):
        dataset.loss_mask([0])
    assert open_mask(copy / "train/shard-00000", tokens=len(whole)) is None


def test_fim_on_a_source_with_a_loss_mask_is_refused(talks: Path) -> None:
    fim = {"rate": 0.5, "prefix": "a", "middle": "b", "suffix": "c"}
    with pytest.raises(ConfigError, match="loss mask"):
        mixture_of(talks, fim=fim)


def test_a_step_without_targets_is_marked_and_its_divisor_is_one(talks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mixture, batch = mixture_of(talks), BatchSizes(4, 4, 1, 1, T)
    assert StepLoader(mixture, batch, dp_rank=0, steps=(1, 1)).gather(1).has_targets
    none = np.zeros((4, T + 1), dtype=np.bool_)
    monkeypatch.setattr(mixture, "loss_mask", lambda _location: none.copy())
    step = StepLoader(mixture, batch, dp_rank=0, steps=(1, 1)).gather(1)
    assert (step.has_targets, step.targets) == (False, 1)
