"""Finds the teacher of a distillation and compares it with the student, before process groups are opened."""

from __future__ import annotations

from torch import nn

from foundation.errors import ConfigError
from foundation.remote_folder import local_folder
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.data.mixing_weights import Extent
from pipeline.data.mixture import DataMixture
from pipeline.engines.common import model_dtype
from pipeline.engines.parallel.architecture_limits import check_layout
from pipeline.engines.parallel.compilation import compiles
from pipeline.engines.parallel.partition import pipeline_stages
from pipeline.models.attention import attention_of
from pipeline.models.construction.meta import build_meta
from pipeline.models.construction.stored_values import FromSafetensors
from pipeline.models.folder.model_folder import ModelFolder
from pipeline.models.hf_config import read_hf_config
from pipeline.run.distillation.cached_logits import CachedLogits
from pipeline.run.distillation.feature_checks import check_feature_models
from pipeline.run.distillation.kv_cache import check_kv_cache
from pipeline.run.distillation.open_logits import open_logits
from pipeline.run.distillation.quantized import DequantizedValues, is_dequantized
from pipeline.run.distillation.teacher import TeacherModel, teacher_run


def find_teacher(
    run: ResolvedRun, mixture: DataMixture, *, vocab_size: int
) -> tuple[TeacherModel | None, CachedLogits | None]:
    """Opens the teacher of a distillation, or its cached logits.

    Raises:
        ConfigError: the teacher or its cached logits do not fit the student or the config.
        DataError: the teacher or its cached logits are missing, damaged, or made for other data.
    """
    config, extent = run.config, Extent(run.steps, run.batch.samples)
    assert config.distill is not None
    if config.distill.logits is None:
        return open_teacher(run, vocab_size=vocab_size), None
    logits = open_logits(
        config.distill,
        mixture,
        data=config.data,
        anomalies=config.anomalies,
        extent=extent,
        vocab_size=vocab_size,
    )
    return None, logits


def open_teacher(run: ResolvedRun, *, vocab_size: int) -> TeacherModel:
    """Opens a teacher; refuses one that is incomplete or cannot be compared with the student id by id.

    Raises:
        ConfigError: its vocabulary has another size, it supports fewer positions than the sequence has, or it cannot be
            computed in the student's layout or dtype.
        DataError: the folder is not a model, or lacks weights.
    """
    config, section = run.config, run.config.distill
    assert section is not None
    assert section.teacher is not None
    folder, length = section.teacher, config.data.sequence_length
    files = ModelFolder.open(folder)
    quantized = is_dequantized(files)
    theirs = read_hf_config(folder, dequantized=quantized)
    if theirs.vocab_size != vocab_size:
        why = f"the teacher has {theirs.vocab_size} ids, the student {vocab_size}"
        raise ConfigError("distill.teacher", folder, why=why, remedy=_equal_ids(run, theirs.vocab_size, vocab_size))
    longest = files.longest_sequence
    if longest is not None and longest < length:
        why = f"the teacher was made for {longest} positions, data.sequence_length is {length}"
        raise ConfigError("distill.teacher", folder, why=why, remedy=f"set data.sequence_length to at most {longest}")
    model = build_meta(theirs, dtype=model_dtype(config), attn_implementation=attention_of(run))
    try:
        check_layout(teacher_run(run), model)
    except ConfigError as error:
        raise ConfigError("distill.teacher", folder, why=str(error), remedy="change the student's layout") from None
    return TeacherModel(model, DequantizedValues(folder) if quantized else FromSafetensors(folder, model=model))


def _equal_ids(run: ResolvedRun, teacher: int, student: int) -> str:
    """Returns a remedy that gives teacher and student equally many rows: one only has more padding."""
    model, section = run.config.model, run.config.distill
    if model.path is None:
        return f"set model.config.vocab_size to {teacher}"
    assert section is not None
    assert section.teacher is not None
    key, path = ("distill.teacher", section.teacher) if teacher > student else ("model.path", model.path)
    rows, folder = min(teacher, student), str(local_folder(path))
    code = (
        f"from transformers import AutoModelForCausalLM as M; m = M.from_pretrained({folder!r}, dtype='auto');"
        f" m.resize_token_embeddings({rows}); m.save_pretrained('CUT')"
    )
    return f'cut the padding off the larger one, python -c "{code}", and set {key} to CUT'


def check_student(run: ResolvedRun, student: nn.Module, teacher: TeacherModel | None) -> None:
    """Refuses a student whose hidden states cannot be matched with the teacher's, or that cannot generate.

    Args:
        run: the resolved config, with a section `distill`.
        student: the student's full model, on meta.
        teacher: the teacher in memory; None with cached logits.

    Raises:
        ConfigError: features of the two models cannot be matched, or the student cannot have a key/value cache.
    """
    section = run.config.distill
    assert section is not None
    if teacher is not None:
        check_feature_models(
            section,
            run.topology,
            student=student,
            teacher=teacher.model,
            last_stage=pipeline_stages(run, student)[-1].layers,
            compiled=compiles(run.config.compile),
        )
    if section.on_policy is not None and section.on_policy.kv_cache:
        data = run.config.data
        check_kv_cache(student, mask_documents=data.mask_documents, sequence_length=data.sequence_length)
