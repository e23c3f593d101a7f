"""The table of supported layouts: what is in it resolves; anything else is refused with layouts that are in it."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from foundation.errors import ConfigError
from pipeline.config.load import load_config
from pipeline.config.rules.expert_exchange import expert_exchange
from pipeline.config.rules.layout import check_heads
from pipeline.config.rules.resolve import FEATURES, LAYOUTS, resolve
from pipeline.config.sections.layout import SCHEDULES
from pipeline.config.topology import Topology
from tests.conftest import ROOT, tiny_config, write_config

SELECTED_BY: dict[str, tuple[str, ...]] = {
    "pp": ("parallel.pp=2",),
    "tp": ("parallel.tp=2",),
    "cp": ("parallel.cp=2",),
    "ep": ("parallel.ep=2",),
    "ep_overlap": ("parallel.ep=2", "parallel.ep_overlap=true"),
    "ring": ("parallel.cp=2", "parallel.cp_method=ring"),
    "shard": ("parallel.hybrid_shard_size=2",),
    "offload_optimizer": ("zero_optimization.offload_optimizer.device=cpu",),
    "offload_param": ("zero_optimization.offload_param.device=cpu",),
    "fp16": ("fp16.enabled=true",),
    "gpipe": ("parallel.pp=2", "parallel.schedule=gpipe"),
    "interleaved_1f1b": ("parallel.pp=2", "parallel.schedule=interleaved_1f1b"),
    "zero_bubble": ("parallel.pp=2", "parallel.schedule=zero_bubble"),
    "dualpipev": ("parallel.pp=2", "parallel.schedule=dualpipev"),
}
"""Feature -> the overrides that select it."""


def refusal(tmp_path: Path, sets: list[str], *, processes: int = 8) -> ConfigError | None:
    config = tiny_config(tmp_path / "tokens", tmp_path / "run", train_batch_size=64)
    path = write_config(tmp_path / "c.json", {**config, "train_micro_batch_size_per_gpu": 1})
    try:
        resolve(load_config(path, sets), world_size=processes)
    except ConfigError as error:
        return error
    return None


def with_an_effect(names: Sequence[str], *, stage: int) -> list[str]:
    """Without what is taken and ignored: parameters are offloaded at stage 3 alone."""
    return [name for name in names if name != "offload_param" or stage == 3]


def base(engine: str, stage: int) -> list[str]:
    return [f"engine={engine}", f"zero_optimization.stage={stage}"]


def test_every_feature_of_the_table_has_a_case() -> None:
    assert set(SELECTED_BY) == set(FEATURES)


def exclusive(names: Sequence[str]) -> bool:
    """Two schedules; or `ep_overlap` in a pipeline with one that does not overlap, see `NOT_OVERLAPPED`."""
    schedules = {*SCHEDULES} & set(names)
    return len(schedules) > 1 or ("ep_overlap" in names and bool(schedules - {"dualpipev"} or "pp" in names))


@pytest.mark.parametrize("row", LAYOUTS, ids=lambda row: f"{row.engine}-{row.stage}")
def test_every_layout_of_the_table_resolves(tmp_path: Path, row: Any) -> None:
    for count in (0, 1, 2):
        for names in itertools.combinations(sorted(row.features), count):
            if not exclusive(names):
                sets = [*base(row.engine, row.stage), *(each for name in names for each in SELECTED_BY[name])]
                assert refusal(tmp_path, sets) is None, names


@pytest.mark.parametrize(("engine", "stage"), list(itertools.product(("deepspeed", "torch"), range(4))))
def test_a_layout_that_is_not_in_the_table_is_refused_and_its_remedies_resolve(
    tmp_path: Path, engine: str, stage: int
) -> None:
    here = [row.features for row in LAYOUTS if (row.engine, row.stage) == (engine, stage)]
    refused = 0
    for names in [*itertools.combinations(sorted(FEATURES), 1), *itertools.combinations(sorted(FEATURES), 2)]:
        overrides = {name: each for name in names for each in SELECTED_BY[name]}
        selected = {*with_an_effect(names, stage=stage)} | {
            n for n, sets in SELECTED_BY.items() if n in ("pp", "cp", "ep") and set(sets) & set(overrides.values())
        }
        if exclusive(names) or any(f >= selected for f in here):
            continue
        sets = [*base(engine, stage), *(each for name in names for each in SELECTED_BY[name])]
        error = refusal(tmp_path, sets)
        assert error is not None, names
        refused += 1
        for way in error.remedy.removeprefix("use ").split(", or "):
            assert refusal(tmp_path, [*sets, *map(as_override, way.split(" and "))]) is None, (names, way)
    assert refused


def as_override(words: str) -> str:
    """From a remedy's words to a `--set` text."""
    field, _, value = words.partition(" ")
    return f"{value}=null" if field == "no" else f"{field}={value}"


def test_pipeline_parallelism_at_zero_stage_3_is_refused_with_engine_torch_or_stage_1(tmp_path: Path) -> None:
    error = refusal(tmp_path, ["zero_optimization.stage=3", "parallel.pp=2"])
    assert error is not None
    assert error.remedy.startswith("use engine torch, or zero_optimization.stage 1")


ZERO_BUBBLE = ("engine=torch", "zero_optimization.stage=2", "parallel.pp=2", "parallel.schedule=zero_bubble")
DUALPIPEV = (*ZERO_BUBBLE[:3], "parallel.schedule=dualpipev")

AUTOEP = ("expert_parallel.enabled=true",)
EP = ("engine=deepspeed", "parallel.ep=2")
REFUSALS = [
    (["parallel.pp=3"], "start 6 or 9 processes"),
    (["parallel.tp=2", "tensor_parallel.autotp_size=4"], "give one of the two"),
    (["parallel.ep=2", *AUTOEP, "expert_parallel.autoep_size=4"], "expert_parallel.autoep_size is 4"),
    ([*AUTOEP, "expert_parallel.autoep_size=3"], "use 2, or start 9 processes"),
    (["parallel.ep=5", 'model.config={"num_experts": 10}'], "use 2, or start 10 processes"),
    (["parallel.tp=2", "parallel.cp=4", "data.sequence_length=36"], "use 32 or 40"),
    (["parallel.tp=8"], "model.config.num_attention_heads"),
    (["parallel.tp=4"], "use 2, or model.config.num_key_value_heads 4"),
    (["parallel.tp=2", "model.config.vocab_size=511"], "use 1, or model.config.vocab_size 512"),
    (["parallel.cp=8"], "use 4, or parallel.cp_method ring"),
    (["parallel.cp=2", "model.attn_implementation=eager"], "use sdpa"),
    (["data.mask_documents=true", "model.attn_implementation=eager"], "use sdpa"),
    (["engine=torch", "parallel.hybrid_shard_size=3"], "use 2, or leave it out"),
    (["engine=torch", "parallel.pp=4", "train_batch_size=4"], "use 8, or a smaller"),
    (["engine=torch", "parallel.pp=4", "parallel.schedule=interleaved_1f1b", "train_batch_size=12"], "use 8 or 16"),
    (["engine=torch", "parallel.pp=2", "parallel.virtual_stages=2"], "interleaved_1f1b"),
    ([*ZERO_BUBBLE, "parallel.virtual_stages=1"], "use 2"),
    ([*DUALPIPEV, "parallel.virtual_stages=4"], "remove it"),
    ([*DUALPIPEV, "train_batch_size=12"], "needs at least 2 pp, 4, micro-batches"),
    ([*DUALPIPEV, "train_batch_size=12"], "use 16, or a smaller"),
    ([*DUALPIPEV, "parallel.ep=2", "parallel.ep_overlap=true", "zero_optimization.stage=3"], "stage 2"),
    ([*ZERO_BUBBLE, "memory.activation_checkpointing=selective"], "use full"),
    (["engine=torch", "optimizer.params.moments_dtype=bf16"], "in one process, or fp32"),
    (["parallel.cp=4", "parallel.cp_method=ring", "data.sequence_length=36"], "use 32 or 40"),
    (["engine=torch", "parallel.virtual_stages=2"], "parallel.pp is 1"),
    (["fp16.enabled=true", "bf16.enabled=true"], "keep bf16"),
    (["zero_optimization.offload_param.device=nvme"], "nvme_path"),
    (["distill.alpha=0.3"], '"teacher"'),
    (["engine=torch", "zero_optimization.overlap_comm=true"], "use engine deepspeed"),
    (["engine=torch", "zero_optimization.stage3_prefetch_bucket_size=5000"], "use engine deepspeed"),
    (["engine=torch", "aio.block_size=1048576"], "use engine deepspeed"),
    ([*EP, "zero_optimization.stage=3", "zero_optimization.zero_hpz_partition_size=2"], "no second copy"),
    ([*EP, "zero_optimization.stage=1", "zero_optimization.reduce_scatter=false"], "needs true"),
    ([*EP, "zero_optimization.stage=2", "zero_optimization.contiguous_gradients=false"], "needs true"),
]


@pytest.mark.parametrize(("sets", "words"), REFUSALS)
def test_a_layout_that_does_not_divide_is_refused_with_the_nearest_numbers(
    tmp_path: Path, sets: list[str], words: str
) -> None:
    error = refusal(tmp_path, sets)
    assert error is not None
    assert words in str(error)


def test_more_processes_are_no_remedy_where_the_size_does_not_divide_the_experts(tmp_path: Path) -> None:
    error = refusal(tmp_path, ["parallel.ep=5", 'model.config={"num_experts": 6}'])
    assert error is not None
    assert "try: use 2\n" in f"{error}\n"


def test_deepspeeds_key_for_expert_parallelism_is_parallel_ep(tmp_path: Path) -> None:
    path = write_config(tmp_path / "c.json", tiny_config(tmp_path / "tokens", tmp_path / "run"))
    for sets, ep in (([*AUTOEP, "expert_parallel.autoep_size=4"], 4), (["expert_parallel.autoep_size=4"], 1)):
        assert resolve(load_config(path, sets), world_size=4).topology.ep == ep


def test_gpipe_alone_may_have_fewer_micro_batches_than_stages(tmp_path: Path) -> None:
    sets = ["engine=torch", "parallel.pp=4", "train_batch_size=2", "parallel.schedule=gpipe"]
    assert refusal(tmp_path, sets) is None


def test_the_docs_show_the_table_of_layouts() -> None:
    text = (ROOT / "docs/reference/layouts.md").read_text()
    header = next(line for line in text.splitlines() if line.startswith("| engine | stage"))
    columns = [cell.strip() for cell in header.strip("|").split("|")]
    rows = re.findall(r"^\| (deepspeed|torch) \|(.*)\|$", text, flags=re.MULTILINE)
    shown = []
    for engine, cells in rows:
        values = dict(zip(columns, [engine, *(cell.strip() for cell in cells.split("|"))], strict=True))
        features = {name for name in columns[2:] if values[name] == "yes"}
        shown.append((values["engine"], int(values["stage"]), features))
    everywhere = set.intersection(*(set(row.features) for row in LAYOUTS))
    assert shown == [(row.engine, row.stage, set(row.features) - everywhere) for row in LAYOUTS]


def shipped() -> dict[str, int]:
    """File -> its number of processes in docs/reference/layouts.md."""
    text = (ROOT / "docs/reference/layouts.md").read_text()
    rows = re.findall(r"^\| (`[^|]*json`) \| (\d+) \|", text, flags=re.MULTILINE)
    return {name: int(count) for names, count in rows for name in re.findall(r"`([^`]+)`", names)}


def test_every_shipped_config_is_listed_and_resolves_at_its_number_of_processes() -> None:
    listed = shipped()
    assert set(listed) == {path.name for path in (ROOT / "ds_configs").glob("*.json")}
    for name, processes in listed.items():
        run = resolve(load_config(ROOT / "ds_configs" / name), world_size=processes)
        assert run.steps > 0, name


def test_the_70b_configs_have_the_same_curve_fields() -> None:
    from pipeline.config.rules.curve import curve_fields  # noqa: PLC0415

    names = [name for name in shipped() if name.startswith("llama_70b")]
    runs = [resolve(load_config(ROOT / "ds_configs" / name), world_size=512) for name in names]
    assert len(runs) == 3
    assert len({json.dumps(curve_fields(run)) for run in runs}) == 1


@pytest.mark.parametrize(
    ("sets", "processes", "sizes", "spare"),
    [
        (["parallel.tp=2"], 7, (1, 3, 1, 2), 1),
        (["parallel.tp=2", "parallel.pp=2"], 7, (2, 1, 1, 2), 3),
        (["parallel.hybrid_shard_size=2", "engine=torch"], 7, (1, 6, 1, 1), 1),
        (["parallel.hybrid_shard_size=4", "parallel.cp=2", "engine=torch"], 11, (1, 4, 2, 1), 3),
        (["parallel.pp=2", "parallel.schedule=interleaved_1f1b", "engine=torch"], 6, (2, 3, 1, 1), 0),
    ],
)
@pytest.mark.parametrize("how", ["elastic", "begun"])
def test_an_elastic_or_resumed_run_uses_as_many_processes_as_its_layout_fits(
    tmp_path: Path, sets: list[str], processes: int, sizes: tuple[int, ...], spare: int, how: str
) -> None:
    config = tiny_config(tmp_path / "tokens", tmp_path / "run", train_batch_size=64)
    path = write_config(tmp_path / "c.json", {**config, "zero_optimization": {"stage": 0}})
    if "engine=torch" in sets:
        sets = [*sets, "zero_optimization.stage=2"]
    with pytest.raises(ConfigError):
        resolve(load_config(path, sets), world_size=processes)
    flag = ["parallel.elastic=true"] if how == "elastic" else []
    run = resolve(load_config(path, [*sets, *flag]), world_size=processes, begun=how == "begun")
    assert (run.topology.sizes, run.spare) == (sizes, spare)
    assert (f"{spare} spare" in run.layout) == (spare > 0)


def test_an_elastic_run_on_fewer_processes_than_one_model_replica_is_refused(tmp_path: Path) -> None:
    path = write_config(tmp_path / "c.json", tiny_config(tmp_path / "tokens", tmp_path / "run"))
    with pytest.raises(ConfigError, match="start 4 or 8 processes"):
        resolve(load_config(path, ["parallel.tp=4", "parallel.elastic=true"]), world_size=3)


def test_a_size_of_trained_weights_is_not_to_be_changed() -> None:
    """A model from `model.path` has the vocabulary that it has; one that is initialized may have another."""
    sizes, topology = {"vocab_size": 513}, Topology(dp=1, tp=2)
    with pytest.raises(ConfigError, match=r"use 1, or model\.config\.vocab_size 514"):
        check_heads(sizes, topology, cp_method="ulysses")
    with pytest.raises(ConfigError) as refused:
        check_heads(sizes, topology, cp_method="ulysses", trained=True)
    assert refused.value.remedy == "use 1"
    check_heads({"vocab_size": 514}, topology, cp_method="ulysses")


EXCHANGE = ("bf16.enabled=true", "parallel.ep=2", "parallel.ep_exchange=hybridep")
BACKEND = ("bf16.enabled=true", *AUTOEP, "expert_parallel.autoep_size=2", "expert_parallel.comm_backend=deepep")
KERNELS = {
    "fp32": (EXCHANGE[1:], "use bf16.enabled true, or all_to_all"),
    "selective": (
        (*EXCHANGE, "memory.activation_checkpointing=selective"),
        "use memory.activation_checkpointing full or none, or all_to_all",
    ),
    "two keys": ((*BACKEND, "parallel.ep_exchange=hybridep"), "give one of the two"),
}


@pytest.mark.parametrize("case", KERNELS)
@pytest.mark.parametrize("engine", ["torch", "deepspeed"])
def test_what_kernels_of_expert_exchanges_do_not_combine_with_is_refused(
    tmp_path: Path, case: str, engine: str
) -> None:
    sets, remedy = KERNELS[case]
    error = refusal(tmp_path, [*base(engine, 3), *sets])
    assert error is not None
    assert (error.field, error.remedy) == ("parallel.ep_exchange", remedy)


def test_deepspeeds_key_for_the_exchange_of_experts_is_parallel_ep_exchange(tmp_path: Path) -> None:
    path = write_config(tmp_path / "c.json", tiny_config(tmp_path / "tokens", tmp_path / "run"))
    for sets, name in ((BACKEND, "deepep"), (EXCHANGE, "hybridep"), (BACKEND[:-1], "all_to_all"), ((), "all_to_all")):
        run = resolve(load_config(path, [*base("torch", 3), *sets]), world_size=4)
        assert expert_exchange(run.config) == name


OVERLAP = ("parallel.ep=2", "parallel.ep_overlap=true")
NOT_OVERLAPPED = {
    "stage 3": (3, OVERLAP, "use zero_optimization.stage 2, or parallel.ep_overlap false"),
    "a pipeline": (2, (*OVERLAP, "parallel.pp=2"), "use parallel.schedule dualpipev, or parallel.ep_overlap false"),
    "another schedule": (
        0,
        (*OVERLAP, "parallel.pp=2", "parallel.schedule=zero_bubble"),
        "use parallel.schedule dualpipev, or parallel.ep_overlap false",
    ),
    "no expert parallelism": (2, OVERLAP[1:], "remove it"),
    "kernels": (2, (*EXCHANGE, *OVERLAP), "remove it, or use parallel.ep_exchange all_to_all"),
    "uneven shares": (
        0,
        (*OVERLAP, "parallel.cp=2", "parallel.shares=[2,1,1,1]"),
        "remove it, or parallel.shares",
    ),
    "one micro-batch": (
        2,
        (*OVERLAP, "train_micro_batch_size_per_gpu=2", "train_batch_size=16"),
        "use a train_micro_batch_size_per_gpu of 1 or less, or a train_batch_size of 32, or remove it",
    ),
}


@pytest.mark.parametrize("case", NOT_OVERLAPPED)
def test_an_exchange_that_has_nothing_to_run_beside_is_refused(tmp_path: Path, case: str) -> None:
    stage, sets, remedy = NOT_OVERLAPPED[case]
    error = refusal(tmp_path, [*base("torch", stage), *sets])
    assert error is not None
    assert (error.field, error.remedy) == ("parallel.ep_overlap", remedy)


def test_an_elastic_run_with_one_micro_batch_of_each_rank_has_no_overlap(tmp_path: Path) -> None:
    path = write_config(tmp_path / "c.json", tiny_config(tmp_path / "tokens", tmp_path / "run", train_batch_size=8))
    sets = [*base("torch", 2), *OVERLAP, "train_micro_batch_size_per_gpu=1", "parallel.elastic=true"]
    overlaps = {size: resolve(load_config(path, sets), world_size=size).overlaps_exchange for size in (4, 8)}
    assert overlaps == {4: True, 8: False}


EXPERTS = {
    "does not divide the 8 ranks of a pipeline stage": (["parallel.ep=3"], 8, "use 2, or start 9 processes"),
    "of a stage, not of the world": (["parallel.pp=2", "parallel.ep=8"], 8, "use 4, or start 16 processes"),
    "within a replica": (["parallel.ep=4", "parallel.hybrid_shard_size=2"], 8, "use 2, or hybrid_shard_size 4"),
    "uneven shares": (["parallel.ep=2", "parallel.shares=[3,1,1,1]"], 4, "remove parallel.shares, or parallel.ep"),
}


@pytest.mark.parametrize("case", EXPERTS)
def test_an_expert_parallel_size_that_does_not_fit_is_refused(tmp_path: Path, case: str) -> None:
    sets, processes, remedy = EXPERTS[case]
    error = refusal(tmp_path, [*base("torch", 3), *sets], processes=processes)
    assert error is not None
    assert (error.field, error.remedy) == ("parallel.ep", remedy)


def test_an_elastic_run_takes_a_number_of_processes_that_ep_divides(tmp_path: Path) -> None:
    path = write_config(tmp_path / "c.json", tiny_config(tmp_path / "tokens", tmp_path / "run", train_batch_size=64))
    sets = [*base("torch", 3), "parallel.ep=4", "parallel.tp=2", "parallel.elastic=true"]
    run = resolve(load_config(path, sets), world_size=7)
    assert (run.topology.dp, run.topology.ep, run.topology.edp, run.spare) == (2, 4, 1, 3)
