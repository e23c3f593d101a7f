"""Warnings before a run costs money: settings that are valid but rarely intended."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from data_prep.formats.indexed import IndexedTokens
from foundation.foreign_folders import is_trainer_checkpoint
from foundation.remote_folder import local_folder
from pipeline.config.rules.expert_exchange import expert_exchange
from pipeline.data.dataset import TokenDataset, tokenizer_details
from pipeline.data.mixing_weights import Extent
from pipeline.models.construction.buffers import parameters_declared_fp32
from pipeline.models.folder.text_part import text_is_nested
from pipeline.models.hf_config import VOCAB_MULTIPLE
from pipeline.run.before.room import room_warnings
from pipeline.run.prepare import PreparedRun

_UNUSED_ROWS = 0.1
"""Share of vocabulary rows without a token above which a warning is given; padding to a round size stays below."""
_EPOCHS = 4
"""Number of epochs up to which a repeated token is worth nearly as much as a new one: Muennighoff et al. 2023,
arXiv:2305.16264."""
_LOOKED_AT = 50_000
"""Number of documents, in the first shard of a source, whose lengths are read."""
_OF_A_NEW_MODEL = 1e-3
"""Learning rate of a new model: DeepSpeed's default `lr`. The Trainer's default, for trained weights, is 5e-5."""
_PLAN_BYTES = 2 * 2**30
PLANNED_SHARD_BYTES = 223
"""Bytes that rank 0 takes per shard while it plans a checkpoint: 6.22 GB for 27.9 M (docs/reference/scale.md)."""
_COVERED, _LONGER = 0.9, 4
"""Limit of the sequence length: 4 times the length up to which documents hold 90 % of the tokens."""


def advice(prepared: PreparedRun) -> Iterator[str]:
    """Yields a line with a remedy for each setting that looks like a mistake; refuses nothing."""
    yield from _text_part(prepared)
    yield from _vocabulary(prepared)
    yield from _repetition(prepared)
    yield from _sequence_length(prepared)
    yield from _experts(prepared)
    yield from _learning_rate(prepared)
    yield from _what_is_dropped(prepared)
    yield from _padding(prepared)
    yield from _fp32(prepared)
    yield from _checkpoint_plan(prepared)
    yield from room_warnings(prepared)


def _text_part(prepared: PreparedRun) -> Iterator[str]:
    path, kind = prepared.run.config.model.path, str(prepared.hf_config.get("model_type"))
    dropped = prepared.run.config.model.fresh or prepared.run.config.model.extra_weights == "drop"
    fate = "exported alone, without what reads images" if dropped else "an export has the other parts as they were"
    if path is not None and text_is_nested(local_folder(path), kind):
        yield (f"model.path = {path} holds a model of several modalities: its decoder ({kind}) is trained, and {fate}")


def _vocabulary(prepared: PreparedRun) -> Iterator[str]:
    section = prepared.run.config.model
    vocabulary = int(prepared.hf_config.get("vocab_size") or 0)
    ids = int(tokenizer_details(prepared.mixture.sources[0].manifest)["vocab_size"])
    unused = vocabulary - ids
    if (section.path is not None and not section.fresh) or unused <= max(VOCAB_MULTIPLE, _UNUSED_ROWS * vocabulary):
        return  # a trained model keeps its rows
    width = prepared.size.embedding // vocabulary
    tables = 1 if prepared.hf_config.get("tie_word_embeddings") else 2
    yield (
        f"model.config.vocab_size = {vocabulary:,}, and the tokenizer has {ids:,} ids: {unused * width * tables:,} of"
        f" {prepared.size.parameters:,} parameters belong to tokens that never occur; leave vocab_size out, and it is"
        f" taken from the tokenizer"
    )


def _repetition(prepared: PreparedRun) -> Iterator[str]:
    run = prepared.run
    epochs = prepared.mixture.order.epochs(Extent.of(run).samples)
    for source, seen in zip(prepared.mixture.sources, epochs, strict=True):
        if seen > _EPOCHS:
            yield (
                f"{source.label} is repeated {seen:.1f} times: from about {_EPOCHS} epochs on repeated tokens are worth"
                f" ever less (arXiv:2305.16264); a shorter run, more text, or max_epochs of the source as a limit"
            )


def _sequence_length(prepared: PreparedRun) -> Iterator[str]:
    length = prepared.run.config.data.sequence_length
    for source in prepared.mixture.sources:
        longest = _length_of_most_tokens(source)
        if length > _LONGER * longest:
            shorter = 1 << max(4, (2 * longest - 1).bit_length())
            yield (
                f"data.sequence_length = {length:,}, and {_COVERED:.0%} of the tokens of {source.label} are in"
                f" documents of at most {longest:,}: attention and memory are spent on text of other documents;"
                f" {shorter:,} would hold nearly all"
            )


def _experts(prepared: PreparedRun) -> Iterator[str]:
    if prepared.has_experts and prepared.run.config.moe.balance == "none":
        yield (
            "nothing balances the experts: a few may get most tokens, and the others stay untrained;"
            " set moe.balance to aux_loss, or to bias where the architecture has a correction bias"
        )
    if prepared.run.topology.ep > 1 and (exchange := expert_exchange(prepared.run.config)) != "all_to_all":
        yield (
            f"parallel.ep_exchange = {exchange} is experimental: it has been run beside stand-ins alone"
            " (pipeline/engines/experimental/README.md); compare some steps with all_to_all first"
        )


def _padding(prepared: PreparedRun) -> Iterator[str]:
    table = prepared.model.get_input_embeddings()  # type: ignore[operator]
    eos, padding = (
        tokenizer_details(prepared.mixture.sources[0].manifest).get("eos_id"),
        getattr(table, "padding_idx", None),
    )
    if eos is not None and padding == eos:
        where = prepared.run.config.model.path
        yield (
            f"the padding id is also the end-of-text id ({eos}): transformers gives the padding row of the embedding no"
            f" gradient, so that end-of-text keeps its first value as an input; set pad_token_id to null in"
            f" {'model.config' if where is None else f'{where}/config.json'}, or to an id that does not occur"
        )


def _fp32(prepared: PreparedRun) -> Iterator[str]:
    names = parameters_declared_fp32(prepared.model) if prepared.run.config.bf16.enabled else []
    if names:
        yield (
            f"transformers computes with {len(names)} parameters of this architecture in fp32 beside bf16"
            f" ({names[0]}, ...), and training in bf16; their master weights are fp32 as all others"
        )


def _checkpoint_plan(prepared: PreparedRun) -> Iterator[str]:
    run = prepared.run
    stage, topology = run.config.zero_optimization.stage, run.topology
    if stage == 0 or (run.config.engine == "deepspeed" and stage < 3):
        return  # there are few shards per rank
    ranks = run.config.parallel.hybrid_shard_size or topology.dp * topology.cp
    rows = (p.shape[0] for p in prepared.model.parameters() if p.dim())
    shards = shards_of_a_checkpoint(rows, ranks=ranks * topology.tp)
    if shards * PLANNED_SHARD_BYTES > _PLAN_BYTES:
        yield (
            f"rank 0 plans checkpoints of {shards:,} shards, which takes {shards * PLANNED_SHARD_BYTES / 1e9:.1f} GB of"
            " its host's memory (docs/reference/scale.md); parallel.pp or parallel.hybrid_shard_size make it small"
        )


def shards_of_a_checkpoint(rows: Iterable[int], *, ranks: int) -> int:
    """Counts the shards of weights and two moments of parameters with `rows` rows over `ranks` ranks (tp included)."""
    return 3 * sum(min(each, ranks) for each in rows)


def _length_of_most_tokens(source: TokenDataset) -> int:
    """Finds the length, in tokens, up to which documents hold `_COVERED` of the tokens in a sample of the source."""
    lengths = np.sort(_document_lengths(source.file(0)))
    held = np.cumsum(lengths)
    return int(lengths[np.searchsorted(held, _COVERED * held[-1])]) if lengths.size and held[-1] else 1 << 62


def _document_lengths(file: IndexedTokens) -> npt.NDArray[np.int64]:
    """Reads the lengths, in tokens, of the first documents of a token file: int64 [documents]."""
    return np.diff(file.document_starts(np.arange(min(_LOOKED_AT, file.documents) + 1)))


def _learning_rate(prepared: PreparedRun) -> Iterator[str]:
    config, peak = prepared.run.config, prepared.run.schedule.peak
    schedule, steps = prepared.run.schedule, prepared.run.steps
    if schedule.kind == "WarmupLR" and schedule.warmup > steps:
        given = config.scheduler is not None and config.scheduler.params.warmup_num_steps
        yield (
            f"scheduler.params.warmup_num_steps is {schedule.warmup:,}{'' if given else ' when absent'}, and the run"
            f" has {steps:,} steps: the rate ends at {schedule.lr(steps):.2e} and never reaches its peak of {peak:g};"
            f" e.g. {max(2, steps // 20)}"
        )
    continued = config.model.path is not None and not config.model.fresh and config.distill is None
    if continued and config.optimizer.kind.sign_like and peak >= _OF_A_NEW_MODEL:
        yield (
            f"{config.model.path} is continued at a peak learning rate of {peak:g}, fit for random weights:"
            " it forgets much; optimizer.params.lr of 1e-5 to 1e-4 is usual (the Trainer's: 5e-5)"
        )


def _what_is_dropped(prepared: PreparedRun) -> Iterator[str]:
    model = prepared.run.config.model
    if model.path is not None and not model.fresh and is_trainer_checkpoint(local_folder(model.path)):
        yield (
            f"{model.path} is a checkpoint of the Hugging Face Trainer: its weights are taken, its optimizer state,"
            " schedule and step are not, so that this is a new run with a warmup of its own; to go on from it:"
            f" headrace import {model.path} RUN_DIR --config FILE"
        )
