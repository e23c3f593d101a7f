"""Data mixture: named sources, budgets, limits on repetition, curriculum stages, refusals; bytes of held-out text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.formats.tokenfile import TokenFile, TokenFileWriter
from data_prep.tokenizer.text_bytes import text_bytes
from foundation.directory import read_manifest
from foundation.errors import ConfigError, DataError
from foundation.section import parse
from pipeline.config.batch import BatchSizes
from pipeline.config.load import load_config
from pipeline.config.rules.curve import curve_fields
from pipeline.config.rules.data import check_data
from pipeline.config.rules.resolve import resolve
from pipeline.config.sections.data import DataSection
from pipeline.data.loader import StepLoader
from pipeline.data.mixing_weights import Extent, make_order
from pipeline.data.mixture import DataMixture, open_heldout, open_mixture
from pipeline.data.sample_order import SampleOrder
from pipeline.data.weighted_sources import MixtureStage
from tests.conftest import make_tokens, text_folders, tiny_config, write_config

T = 32


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens of two sources, "json" and "email"."""
    folders = text_folders()
    sources = [{"name": folder.name, "type": "text", "path": str(folder)} for folder in folders]
    return make_tokens(tmp_path_factory.mktemp("two"), folders, sources=sources)


def section(*sources: dict[str, Any], **fields: Any) -> DataSection:
    return parse(DataSection, {"sources": list(sources), "sequence_length": T, **fields}, at="data")


def opened(*sources: dict[str, Any], steps: int = 100, per_step: int = 8, **fields: Any) -> DataMixture:
    data = section(*sources, **fields)
    check_data(data)
    return open_mixture(data, seed=5, extent=Extent(steps, per_step))


def test_a_named_source_has_its_own_shards_only(two: Path) -> None:
    parts = [opened({"path": str(two), "source": name}).sources[0] for name in ("json", "email")]
    whole = opened({"path": str(two)}).sources[0]
    assert sum(part.tokens for part in parts) == whole.tokens
    assert sum(part.windows for part in parts) == whole.windows
    together = np.concatenate([part.read(np.arange(part.windows)) for part in parts])
    assert sorted(map(tuple, together)) == sorted(map(tuple, whole.read(np.arange(whole.windows))))
    sums = whole.manifest.details["splits"]["train"]["sources"]
    assert [part.tokens for part in parts] == [sums[name]["tokens"] for name in ("json", "email")]


def test_held_out_data_is_that_of_the_named_sources(two: Path) -> None:
    data = section({"path": str(two), "source": "json"}, {"path": str(two), "source": "email"})
    mixture = open_mixture(data, seed=5)
    held = open_heldout(data, mixture)
    assert sum(h.tokens for h in held) <= mixture.sources[0].manifest.details["splits"]["heldout"]["tokens"]
    assert {h.source for h in held} <= {"json", "email"}
    assert [h.source for h in held] == list(dict.fromkeys(h.source for h in held))


def test_an_unknown_source_is_refused_with_those_that_exist(two: Path) -> None:
    with pytest.raises(DataError, match="no source 'emial'; it has email, json"):
        opened({"path": str(two), "source": "emial"})


def test_a_run_draws_its_budgets(two: Path) -> None:
    json_, email = ({"path": str(two), "source": name} for name in ("json", "email"))
    mixture = opened(json_ | {"epochs": 2.5}, email, steps=1000)
    drawn = mixture.order.samples_drawn(8000)
    assert drawn.sum() == 8000
    assert drawn[0] == pytest.approx(2.5 * mixture.sources[0].windows, abs=1)
    mixture = opened(json_ | {"tokens": 3200}, email | {"weight": 1.0}, steps=1000)
    assert mixture.order.samples_drawn(8000)[0] == pytest.approx(100, abs=1)


def test_budgets_that_do_not_fit_the_run_are_refused_with_a_length_that_does(two: Path) -> None:
    json_, email = ({"path": str(two), "source": name} for name in ("json", "email"))
    with pytest.raises(ConfigError, match=r"run\.tokens 2,560,000 or more"):
        opened(json_ | {"tokens": 2_560_000}, email)
    with pytest.raises(ConfigError, match=r"run\.tokens 6,400, or give one source a weight"):
        opened(json_ | {"tokens": 3200}, email | {"tokens": 3200})
    with pytest.raises(ConfigError, match=r"data\.sources\.0\.epochs.*\n.*weight and epochs"):
        opened(json_ | {"weight": 2.0, "epochs": 1.0}, email)


def test_a_source_repeated_too_often_is_refused_and_the_remedies_work(two: Path) -> None:
    json_, email = ({"path": str(two), "source": name} for name in ("json", "email"))
    with pytest.raises(ConfigError) as refused:
        opened(json_ | {"max_epochs": 4.0}, email, steps=1000)
    words = str(refused.value).replace(",", "").split()
    steps = int(words[words.index("run.steps") + 1])
    weight = float(words[words.index("data.sources.0.weight") + 1])
    epochs = float(words[words.index("max_epochs", words.index("try:")) + 1])
    assert 100 < steps < 1000
    opened(json_ | {"max_epochs": 4.0}, email, steps=steps)
    opened(json_ | {"max_epochs": 4.0, "weight": weight}, email, steps=1000)
    opened(json_ | {"max_epochs": epochs + 0.01}, email, steps=1000)
    with pytest.raises(ConfigError):
        opened(json_ | {"max_epochs": 4.0}, email, steps=steps + 3)
    with pytest.raises(ConfigError):
        opened(json_ | {"max_epochs": 4.0, "weight": weight * 1.05}, email, steps=1000)


LONG = Extent(steps=476_838, per_step=1024)
"""Of 1T tokens in samples of 2,048: of so many samples, one part in 65,536 is 7,451."""


def order_of(windows: list[int], *sources: dict[str, Any], extent: Extent = LONG, **fields: Any) -> SampleOrder:
    """The sample order of sources with so many windows; the datasets need not exist."""
    data = section(*({"path": f"s{i}", **source} for i, source in enumerate(sources)), **fields)
    check_data(data)
    return make_order(data, windows, seed=5, extent=extent)


@pytest.mark.parametrize("windows", [50, 5000, 10_000, 10**6])
@pytest.mark.parametrize("epochs", [1.0, 2.5])
def test_a_budget_is_met_to_two_samples_however_small_its_weight(windows: int, epochs: float) -> None:
    small, large = {"epochs": epochs, "max_epochs": epochs}, {"tokens": 10**6 * T}
    order = order_of([windows, 10**9, 10**7, 10**9], small, {}, large, {"weight": 7.0})
    drawn = order.samples_drawn(LONG.samples)
    assert drawn[0] == pytest.approx(epochs * windows, abs=2)
    assert drawn[2] == pytest.approx(10**6, abs=2)
    assert drawn[3] == pytest.approx(7 * drawn[1], rel=1e-6)


def test_a_limit_holds_for_a_source_of_few_windows() -> None:
    small, large = {"max_epochs": 1.0}, {"weight": 65_535.0}
    with pytest.raises(ConfigError) as refused:
        order_of([50, 10**9], small, large)
    assert "149.02 epochs: 7,451 samples are drawn from its 50 in 476,838 steps" in str(refused.value)
    words = str(refused.value).replace(",", "").split()
    order_of([50, 10**9], small, large, extent=Extent(int(words[words.index("run.steps") + 1]), LONG.per_step))
    order_of([50, 10**9], small | {"weight": float(words[words.index("data.sources.0.weight") + 1])}, large)
    order_of([50, 10**9], {"max_epochs": float(words[-1])}, large)


def test_a_shorter_run_is_proposed_only_if_the_mixing_weights_would_stay() -> None:
    with pytest.raises(ConfigError, match=r"try: use a smaller budget than epochs 9\.0, or max_epochs 9\.0"):
        order_of([50, 10**9], {"epochs": 9.0, "max_epochs": 4.0}, {})
    curriculum = [{"after_step": at, "weights": {"s0": 1, "s1": 1}} for at in (0, 5)]
    with pytest.raises(ConfigError, match="try: use a smaller weight of 's0'"):
        order_of(
            [50, 10**9], {"max_epochs": 4.0}, {}, curriculum=curriculum
        )  # its 200 samples are drawn in the first stage


def test_a_source_that_would_never_be_drawn_is_refused_and_the_remedy_draws_it() -> None:
    def remedy(error: pytest.ExceptionInfo[ConfigError]) -> float:
        return float(str(error.value).partition("try: use ")[2].split()[0].replace(",", ""))

    with pytest.raises(ConfigError, match=r"data\.sources\.1\.weight = 1e-12\n.*s1 would not be drawn once") as refused:
        order_of([50, 50], {}, {"weight": 1e-12})
    assert order_of([50, 50], {}, {"weight": remedy(refused)}).samples_drawn(LONG.samples)[1] > 0

    with pytest.raises(ConfigError, match=r"data\.sources\.1\.tokens = 5\n.*0\.16 of a sample of 32 tokens") as refused:
        order_of([50, 50], {}, {"tokens": 5})
    assert order_of([50, 50], {}, {"tokens": remedy(refused)}).samples_drawn(LONG.samples)[1] > 0
    with pytest.raises(ConfigError, match=r"data\.sources\.1\.epochs = 0\.001\n") as refused:
        order_of([50, 50], {}, {"epochs": 0.001})
    assert order_of([50, 50], {}, {"epochs": remedy(refused)}).samples_drawn(LONG.samples)[1] > 0
    with pytest.raises(
        ConfigError, match=r"data\.sources\.1\n.*not be drawn once.*\n.*try: use smaller budgets for others"
    ):
        order_of([50, 50], {"tokens": LONG.samples * T - 1}, {})

    def staged(weight: float) -> SampleOrder:
        curriculum = [{"after_step": at, "weights": {"s0": 1, "s1": share}} for at, share in ((0, 1), (9, weight))]
        return order_of([50, 50], {}, {}, curriculum=curriculum, extent=Extent(20, 8))

    with pytest.raises(ConfigError, match=r"data\.curriculum\.1\.weights\.s1 = 1e-05\n.*once in 88 samples") as refused:
        staged(1e-5)
    order = staged(remedy(refused))
    assert order.samples_drawn(160)[1] > order.samples_drawn(72)[1]
    assert staged(0.0).samples_drawn(160)[1] == 36


def test_a_short_trial_of_a_mixture_need_not_draw_from_every_source() -> None:
    assert order_of([50, 50], {}, {"weight": 0.001}, extent=Extent(2, 8)).samples_drawn(16).tolist() == [16, 0]


def test_a_curriculum_stage_that_would_never_begin_is_refused(tmp_path: Path) -> None:
    def run(*sets: str) -> None:
        config = tiny_config(tmp_path / "t", tmp_path / "r", engine="torch", zero_optimization={"stage": 0})
        config["data"]["sources"] = [{"path": "t", "source": "json"}, {"path": "t", "source": "email"}]
        config["data"]["curriculum"] = stages((0, 1, 1), (20, 1, 2))
        resolve(load_config(write_config(tmp_path / "c.json", config), sets), world_size=1)

    with pytest.raises(ConfigError, match=r"curriculum\.1\.after_step = 20\n.*the run has 20 steps.*\n.*run\.steps 21"):
        run("run.steps=20")
    run("run.steps=21")


def stages(*weights: tuple[int, float, float]) -> list[dict[str, Any]]:
    return [{"after_step": at, "weights": {"json": json_, "email": email}} for at, json_, email in weights]


def test_a_curriculum_changes_the_mixing_weights_at_its_steps(two: Path) -> None:
    sources = [{"path": str(two), "source": name} for name in ("json", "email")]
    mixture = opened(*sources, curriculum=stages((0, 1, 0), (3, 1, 1), (5, 0, 1)))
    source = mixture.order.locate(np.arange(10 * 8)).source.reshape(10, 8)
    assert source.mean(axis=1).tolist() == [0, 0, 0, 0.5, 0.5, 1, 1, 1, 1, 1]
    assert mixture.order.samples_drawn(80).tolist() == [3 * 8 + 8, 8 + 5 * 8]


def test_a_curriculum_gives_the_same_samples_in_every_layout_and_after_a_restart(two: Path) -> None:
    sources = [{"path": str(two), "source": name} for name in ("json", "email")]
    mixture = opened(*sources, curriculum=stages((0, 3, 1), (4, 1, 3)))
    for step in (3, 4, 5, 6):
        expected = mixture.read(np.arange((step - 1) * 8, step * 8))[:, :-1]
        for dp, micro in ((1, 8), (2, 2), (4, 1), (8, 1)):
            batch = BatchSizes(8, micro, 8 // (dp * micro), dp, T)
            late = [next(iter(StepLoader(mixture, batch, dp_rank=r, steps=(step, 9)))) for r in range(dp)]
            parts = [m.input_ids for each in zip(*(s.micro_batches for s in late), strict=True) for m in each]
            assert np.array_equal(np.concatenate(parts), expected), (step, dp, micro)


@settings(max_examples=25, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 200_000), min_size=1, max_size=3, unique=True),
    weights=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5), st.integers(0, 3)), min_size=4, max_size=4),
)
def test_stages_continue_so_an_epoch_has_each_window_once(cuts: list[int], weights: list[tuple[int, int, int]]) -> None:
    windows = [700, 3000, 50]
    later = [MixtureStage(start, weights[i + 1]) for i, start in enumerate(sorted(cuts))]
    order = SampleOrder(windows, weights=weights[0], seed=1, later=later)
    start = max(0, cuts[0] - 4000)
    whole = order.locate(np.arange(start, start + 8000))
    for number, size in enumerate(windows):
        before, after = order.samples_drawn(start)[number], order.samples_drawn(start + 8000)[number]
        seen = whole.window[whole.source == number]
        assert len(seen) == after - before
        first = -before % size  # of the sample that begins an epoch
        for at in range(first, len(seen) - size + 1, size):
            assert len(set(seen[at : at + size].tolist())) == size
    for i in (0, 1, 3999, 4000, 4001, 7999):
        alone = order.locate([start + i])
        assert (alone.source[0], alone.window[0]) == (whole.source[i], whole.window[i])


@pytest.mark.parametrize(
    ("curriculum", "message"),
    [
        (stages((1, 1, 1)), r"curriculum\.0\.after_step = 1.*\n.*\n.*try: use 0"),
        (stages((0, 1, 1), (5, 1, 2), (5, 2, 1)), r"curriculum\.2\.after_step"),
        (stages((0, 0, 0)), "all weights are 0"),
        ([{"after_step": 0, "weights": {"json": 1}}], r"weights\.email.*\n.*has no weight"),
        ([{"after_step": 0, "weights": {"json": 1, "emial": 1}}], "did you mean 'email'"),
    ],
)
def test_incomplete_or_misordered_stages_are_refused(curriculum: list[dict[str, Any]], message: str) -> None:
    data = section({"path": "t", "source": "json"}, {"path": "t", "source": "email"}, curriculum=curriculum)
    with pytest.raises(ConfigError, match=message):
        check_data(data)


def test_a_curriculum_needs_unique_source_names() -> None:
    sources = [{"path": "a", "source": "web"}, {"path": "b", "source": "web"}]
    curriculum = [{"after_step": 0, "weights": {"web": 1}}]
    with pytest.raises(ConfigError, match=r"data\.sources\.1\.name"):
        check_data(section(*sources, curriculum=curriculum))
    with pytest.raises(ConfigError, match=r"data\.curriculum sets how much"):
        check_data(section(sources[0] | {"weight": 2.0}, curriculum=curriculum))


def test_features_that_are_off_are_none_among_the_curve_fields(tmp_path: Path) -> None:
    def curve(**data: Any) -> dict[str, Any]:
        config = tiny_config(tmp_path / "t", tmp_path / "r", engine="torch", zero_optimization={"stage": 0})
        config["data"] |= data
        return curve_fields(resolve(load_config(write_config(tmp_path / "c.json", config)), world_size=1))["data"]

    off = curve()
    assert off["weights"] == [1.0]
    assert [off[key] for key in ("sources", "budgets", "schedule", "packing", "fim", "mask_documents")] == [None] * 6
    web = {"path": "t", "source": "web"}
    assert curve(sources=[web])["sources"] == ["web"]
    assert curve(sources=[web | {"epochs": 2.0}])["budgets"]["samples"] == 20 * 8
    assert curve(packing="best_fit")["packing"] == "best_fit"
    assert curve(fim={})["fim"]["rate"] == 0.5
    named = [web | {"name": "w"}], [{"after_step": 0, "weights": {"w": 1}}]
    assert curve(sources=named[0], curriculum=named[1])["schedule"] == [[0, [1.0]]]
    assert curve(sources=[web | {"max_epochs": 3.0}]) == curve(sources=[web])


TEXTS = ["Wasser, Mühle — 水車 🌊\n\n\tturns <|endoftext|> <0x41>\u00a0!", "x", "def f(a):\n    return a\n" * 5]


@pytest.fixture(scope="module", params=["bpe", "sentencepiece-unigram", "sentencepiece-bpe"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens of texts with bytes that are in no vocabulary, by each kind of tokenizer."""
    work = tmp_path_factory.mktemp("bytes")
    (work / "text").mkdir()
    for i in range(60):
        (work / "text" / f"{i}.txt").write_text(f"{i} " + TEXTS[i % 3] + " the mill wheel turns in the water" * (i % 7))
    return make_tokens(work, [work / "text"], tokenizer={"train": request.param, "vocab_size": 400})


def test_text_bytes_equal_those_counted_by_data_prep(made: Path) -> None:
    splits = read_manifest(made, kind="tokens").details["splits"]
    for split in ("train", "heldout"):
        for shard in splits[split]["shards"]:
            assert text_bytes(TokenFile.open(made / split / shard["name"]), made / "tokenizer") == shard["bytes"]


def test_a_megatron_dataset_may_be_evaluated_on_another_one(made: Path) -> None:
    source = {"path": str(made / "train/shard-00000"), "tokenizer": str(made / "tokenizer")}
    data = {"sources": [source | {"heldout": str(made / "heldout/shard-00000")}], "sequence_length": 16}
    section = parse(DataSection, data)
    (held,) = open_heldout(section, open_mixture(section, seed=1))
    entry = read_manifest(made, kind="tokens").details["splits"]["heldout"]
    assert (held.tokens, held.bytes) == (entry["tokens"], entry["bytes"])


@pytest.mark.parametrize("wrong", [400, 65_000, -1])
def test_an_id_outside_the_vocabulary_is_named_wherever_it_is(made: Path, tmp_path: Path, wrong: int) -> None:
    # between the ends that are looked at when a prefix is opened
    ids = np.full(200_000, 5, dtype=np.int32)
    ids[123_456] = wrong
    with TokenFileWriter(tmp_path / "web", dtype=np.int32) as writer:
        writer.append(ids)
    source = {"path": str(made / "train/shard-00000"), "tokenizer": str(made / "tokenizer")}
    data = {"sources": [source | {"heldout": str(tmp_path / "web")}], "sequence_length": 16}
    section = parse(DataSection, data)
    with pytest.raises(DataError) as refused:
        open_heldout(section, open_mixture(section, seed=1))
    known = read_manifest(made, kind="tokens").details["tokenizer"]["vocab_size"]
    assert f"web.bin holds the id {wrong} as token 123,456" in str(refused.value)
    assert f"{made / 'tokenizer'} has {known} ids\n  try: " in str(refused.value)


def test_a_tokenizer_without_countable_bytes_is_refused(made: Path, tmp_path: Path) -> None:
    text = (made / "tokenizer/tokenizer.json").read_text()
    start = text.index('"decoder"')
    end = text.index('"model"', start)
    (tmp_path / "tokenizer.json").write_text(text[:start] + '"decoder": null, ' + text[end:])
    with pytest.raises(DataError, match="but its decoder is none"):
        text_bytes(TokenFile.open(made / "train/shard-00000"), tmp_path)
