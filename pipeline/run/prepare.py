"""Checks a run before a process group, a GPU or a byte of output is touched."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PretrainedConfig

from data_prep.tokenizer.fingerprint import tokenizer_fingerprint
from foundation.errors import ConfigError
from foundation.paths import is_url
from foundation.remote_folder import local_folder
from pipeline.checkpoint.store import CheckpointStore
from pipeline.config.rules.curve import curve_fields, joined_curve
from pipeline.config.rules.fallback_layouts import naming_fallback
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.config.sections.compression import DistillSection
from pipeline.config.sections.deepspeed import ZeroSection
from pipeline.config.sections.run import ModelSection
from pipeline.data.dataset import TokenDataset, tokenizer_details
from pipeline.data.mixture import DataMixture, open_heldout
from pipeline.data.sample_order import SampleOrder
from pipeline.data.stage_mixtures import open_mixtures
from pipeline.engines.common import model_dtype
from pipeline.engines.parallel.architecture_limits import check_layout
from pipeline.engines.parallel.fp8 import experts_in_fp8
from pipeline.engines.parametrization.scaled_init import ScaledInit
from pipeline.engines.parametrization.scales import find_parametrization
from pipeline.models.attention import attention_of
from pipeline.models.construction.initial_values import InitByName, ParameterValues
from pipeline.models.construction.meta import build_meta, parameter_shapes
from pipeline.models.construction.stored_values import FromSafetensors
from pipeline.models.count import ModelSize, measure
from pipeline.models.folder.beside_weights import read_generation
from pipeline.models.folder.extra_weights import extra_line
from pipeline.models.folder.model_folder import ModelFolder
from pipeline.models.hf_config import resolve_hf_config
from pipeline.models.layers import original_name
from pipeline.models.routers import has_experts
from pipeline.run.branch import Origin, check_origin, find_origin
from pipeline.run.resume import check_run_dir
from pipeline.run.user_functions import NO_FUNCTIONS, UserFunctions, load_functions
from pipeline.runtime.launch import detect
from pipeline.runtime.metrics.mlflow_sink import check_mlflow
from pipeline.runtime.metrics.tensorboard_sink import check_tensorboard

if TYPE_CHECKING:
    from pipeline.evaluation.tasks.encode import EncodedTask
    from pipeline.run.distillation.cached_logits import CachedLogits
    from pipeline.run.distillation.teacher import TeacherModel


@dataclass(frozen=True)
class PreparedRun:
    """A run whose data, model and directory have passed all checks.

    Attributes:
        run: the resolved config.
        mixture: training samples.
        heldout: the held-out split of every source; empty without evaluation.
        model: the full model, on meta.
        values: initial values of the model's parameters.
        hf_config: the model's Hugging Face config as plain JSON.
        generation: generation_config.json of `model.path`; None without one.
        size: counts of the model's parameters and FLOPs.
        store: the run's checkpoints.
        curve: fields that determine the loss curve, and fingerprints of data and folders; must be unchanged on resume.
        parents: config field -> path and fingerprint of every directory on which the run depends.
        teacher: teacher in memory of a distillation; None in other runs.
        logits: cached logits of a distillation that uses them; None in other runs.
        tasks: the tasks of `evaluation.tasks`, with their requests.
        stages: all stages of the run, this one included, in order; empty without stages, and within this list.
        orders: order of the samples of every stage; of the run itself without stages.
        origin: checkpoint of another run with which the run begins (`run.from`); None without one.
        functions: loss, callbacks and trackers that the user wrote.
    """

    run: ResolvedRun
    mixture: DataMixture
    heldout: list[TokenDataset]
    model: nn.Module
    values: ParameterValues
    hf_config: dict[str, Any]
    generation: dict[str, Any] | None
    size: ModelSize
    store: CheckpointStore
    curve: dict[str, Any]
    parents: dict[str, Any]
    teacher: TeacherModel | None = None
    logits: CachedLogits | None = None
    tasks: tuple[EncodedTask, ...] = ()
    stages: tuple[PreparedRun, ...] = ()
    orders: tuple[SampleOrder, ...] = ()
    origin: Origin | None = None
    functions: UserFunctions = NO_FUNCTIONS

    @property
    def has_experts(self) -> bool:
        """Whether the model is a mixture of experts."""
        return has_experts(self.hf_config)

    @property
    def notes(self) -> list[str]:
        """Lines for people that name the tensors of model folders that the model does not use."""
        values = {"distill.teacher": None if self.teacher is None else self.teacher.values, "model.path": self.values}
        folders = named_folders(self.run.config.model, self.run.config.distill)
        left = {f: v.left_out for f, v in values.items() if isinstance(v, FromSafetensors) and v.left_out}
        fate = {"model.path": _FATES[self.run.config.model.extra_weights]}
        lines = [extra_line(folders[f], names, what=fate.get(f, "are not loaded")) for f, names in left.items()]
        if isinstance(self.values, FromSafetensors) and self.values.fresh:
            found = self.run.config.loss.ahead - len(self.values.fresh)
            lines.append(f"loss.mtp: {found} modules are read from model.path, {len(self.values.fresh)} initialized")
        return lines

    @property
    def extra_weights(self) -> dict[str, Any] | None:
        """Count and first names of the tensors of `model.path` that the model does not use; None without any."""
        if not isinstance(self.values, FromSafetensors) or not (left := self.values.left_out):
            return None
        return {"tensors": len(left), "first": left[:3], "multimodal": self.values.part is not None}

    @property
    def run_dir(self) -> Path:
        """The run's directory."""
        return self.run.config.run.local_dir


_FATES = {
    "keep": "are not trained; an export has them as they were before the training, unless model.extra_weights is drop",
    "drop": "are dropped (model.extra_weights), and are in no export",
}


def prepare(run: ResolvedRun) -> PreparedRun:
    """Opens the data, builds the model on meta and compares both with the run's directory.

    Returns:
        The run, or its first stage with all `stages`, each of which is checked.

    Raises:
        ConfigError, DataError, CheckpointError: the run is impossible; the error gives the reason and a remedy.
    """
    # if 512 ranks each check 10,000 shards, one metadata server gets millions of requests
    first, made = detect().rank == 0, list[PreparedRun]()
    for stage, mixture in zip(run.stages or (run,), open_mixtures(run, stat_files=first), strict=True):
        with stage.naming():
            made.append(_prepare(stage, mixture, first=first))
            check_same_shapes(made[0].model, made[-1].model)
    curve = joined_curve([(each.run, each.curve) for each in made])
    origin = find_origin(run.config.run, made[0].store, steps=run.steps)
    if origin is not None:
        check_origin(origin, model=made[0].model, tokenizer=tokenizer_details(made[0].mixture.sources[0].manifest))
        for each in made:
            each.store.start = origin.checkpoint
    check_run_dir(run.config.run, made[0].store, curve, accounts=run.accounts)
    parents = stage_parents([(each.run, each.parents) for each in made])
    orders = tuple(each.mixture.order for each in made)
    stages = tuple(replace(each, curve=curve, parents=parents, orders=orders, origin=origin) for each in made)
    return replace(stages[0], stages=stages) if run.stages else stages[0]


def _prepare(run: ResolvedRun, mixture: DataMixture, *, first: bool) -> PreparedRun:
    """Prepares a run without stages, or one stage, whose directory is not checked yet."""
    config = run.config
    heldout = [] if config.evaluation.samples == 0 else open_heldout(config.data, mixture, stat_files=first)
    tokenizer = tokenizer_details(mixture.sources[0].manifest)
    changes = {} if run.place is None else dict(run.place.stage.model)
    length = config.data.sequence_length
    hf_config = resolve_hf_config(config.model, tokenizer=tokenizer, sequence_length=length, changes=changes)
    for field, folder in named_folders(config.model, config.distill).items():
        check_tokenizer(field, folder, tokenizer)
    teacher, logits = None, None
    if config.distill is not None:
        from pipeline.run.distillation.find_teacher import check_student, find_teacher  # noqa: PLC0415

        teacher, logits = find_teacher(run, mixture, vocab_size=hf_config.vocab_size)
    how: dict[str, Any] = {"attn_implementation": attention_of(run), "ahead": config.loss.ahead}
    model = build_meta(hf_config, dtype=model_dtype(config), **how)
    check_layout(run, model)
    check_fallbacks(run, model)
    if config.distill is not None:
        check_student(run, model, teacher)
    tasks = _tasks(run, model, mixture.sources[0].tokenizer)
    check_disks(config.zero_optimization)
    check_tensorboard(config.tensorboard)
    check_mlflow(config.mlflow)
    functions = load_functions(config)
    values = first_values(config.model, model, seed=config.run.seed)
    size = measure(model, hf_config, sequence_length=config.data.sequence_length)
    section = config.run
    remote = is_url(section.dir)
    store = CheckpointStore(
        section.local_dir,
        keep=section.keep_checkpoints,
        keep_every=None if remote else section.keep_every,
        url=section.dir if remote else None,
    )
    plain = described(hf_config)
    parents = {
        **mixture.parents,
        **folder_parents(config.model, config.distill),
        **(logits.parents if logits is not None else {}),
    }
    prints = {f"{field}.fingerprint": parent["fingerprint"] for field, parent in parents.items()}
    if logits is not None:  # a directory with more of the same records is equivalent
        prints["distill.logits.fingerprint"] = logits.format.content
    # absent from other runs' curves, and from checkpoints older than the field
    sparse = ({"fp8.experts": True} if experts_in_fp8(config.fp8, model) else {}) | functions.curve()
    curve = {**curve_fields(run), **sparse, "model.resolved": plain, **prints}
    generation = None if config.model.path is None else read_generation(local_folder(config.model.path))
    return PreparedRun(
        run,
        mixture,
        heldout,
        model,
        values,
        plain,
        generation,
        size,
        store,
        curve,
        parents,
        teacher,
        logits,
        tasks,
        functions=functions,
    )


def check_same_shapes(first: nn.Module, later: nn.Module) -> None:
    """Refuses a stage whose model has other parameters than the first stage's.

    Raises:
        ConfigError: a parameter has another shape, or is in one of the models only.
    """
    before, after = parameter_shapes(first), parameter_shapes(later)
    for name in {**before, **after}:
        if (was := before.get(name)) != (now := after.get(name)):
            why = f"{name} has the shape {_shape(now)} then, and {_shape(was)} in the first stage"
            raise ConfigError(
                "model.config", why=why, remedy="change keys that keep all shapes, such as rope_parameters"
            )


def _shape(shape: Sequence[int] | None) -> str:
    return "none" if shape is None else str(list(shape))


def stage_parents(stages: Sequence[tuple[ResolvedRun, dict[str, Any]]]) -> dict[str, Any]:
    """Joins the parents of all stages; fields of later stages that differ get the prefix `stages.NAME`."""
    joined = dict(stages[0][1])
    for run, parents in stages[1:]:
        name = run.accounts.names[run.stage]
        joined |= {f"stages.{name}.{field}": each for field, each in parents.items() if joined.get(field) != each}
    return joined


def _tasks(run: ResolvedRun, model: nn.Module, tokenizer: Path) -> tuple[EncodedTask, ...]:
    """Opens the tasks of the run; imports modules for tasks only if there are any."""
    sections = run.config.evaluation.tasks
    if not sections:
        return ()
    from pipeline.evaluation.tasks.encode import open_tasks  # noqa: PLC0415
    from pipeline.run.task_evaluation import check_tasks  # noqa: PLC0415

    tasks = open_tasks(sections, tokenizer, length=run.batch.sequence_length)
    check_tasks(run, model, tasks)
    return tasks


def check_fallbacks(run: ResolvedRun, model: nn.Module, *, packages: bool = True) -> None:
    """Refuses, before it is needed, a configured or fallback layout that the model's architecture does not support.

    Args:
        run: the resolved config.
        model: the full model, on meta.
        packages: whether the packages for the layout have to be installed here.

    Raises:
        ConfigError: a layout is unsupported; the error names the fallback.
    """
    for field, other in run.layouts.items():
        with naming_fallback(field, run.config):
            check_layout(other, model, packages=packages)


def first_values(section: ModelSection, model: nn.Module, *, seed: int) -> ParameterValues:
    """Returns the parameters' initial values: initialized by name, or read from the folder in `model.path`."""
    if section.path is None or section.fresh:
        scaled = find_parametrization(section, model)
        drawn = InitByName(model, seed=seed) if scaled is None else ScaledInit(model, scaled, seed=seed)
        drawn.check()
        return drawn
    rename, partial = original_name(section.keep_layers), section.keep_layers is not None
    initial, keeps = InitByName(model, seed=seed), section.extra_weights == "keep"
    found = FromSafetensors(section.path, model=model, rename=rename, partial=partial, initial=initial, modules=keeps)
    if keeps and (unread := found.unread_modules):
        why = f"the modules of {section.path} have a form that is not known: {', '.join(unread[:3])}"
        remedy = "add model.extra_weights drop: they are dropped, and new ones initialized; or remove loss.mtp"
        raise ConfigError("loss.mtp", why=why, remedy=remedy)
    return found


def named_folders(model: ModelSection, distill: DistillSection | None) -> dict[str, str]:
    """Returns config field -> path of every Hugging Face folder that the config names."""
    teacher = distill.teacher if distill is not None and distill.logits is None else None
    named = {"model.path": model.path, "distill.teacher": teacher}
    return {field: path for field, path in named.items() if path is not None}


def check_tokenizer(field: str, folder: str, tokenizer: dict[str, Any]) -> None:
    """Refuses a model whose tokenizer differs from the dataset's.

    Raises:
        ConfigError: the folder holds a tokenizer with another fingerprint.
    """
    place = local_folder(folder)
    if not (place / "tokenizer.json").is_file():
        return
    if tokenizer_fingerprint(place) != tokenizer["fingerprint"]:
        why = "its tokenizer is not the one the dataset was made with: the same id means different text"
        remedy = f'make the dataset with "tokenizer": {{"path": "{folder}"}}'
        raise ConfigError(field, folder, why=why, remedy=remedy)


def described(config: PretrainedConfig) -> dict[str, Any]:
    """Converts a Hugging Face config to plain JSON, without fields that do not affect the trained model."""
    fields: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    idle = {"transformers_version", "dtype", "use_cache", "architectures", "id2label", "label2id", "_name_or_path"}
    return {key: value for key, value in fields.items() if key not in idle}


def folder_parents(model: ModelSection, distill: DistillSection | None) -> dict[str, Any]:
    """Returns path and fingerprint of every Hugging Face folder that the config names."""
    named = named_folders(model, distill).items()
    return {field: {"path": path, "fingerprint": ModelFolder.open(path).fingerprint()} for field, path in named}


def check_disks(zero: ZeroSection) -> None:
    """Refuses to offload to a directory that is missing on this machine.

    Raises:
        ConfigError: `nvme_path` is not a directory, or cannot be written.
    """
    for name in ("offload_optimizer", "offload_param"):
        section = getattr(zero, name)
        path = section.nvme_path
        if section.device == "nvme" and not (Path(path).is_dir() and os.access(path, os.W_OK)):
            field = f"zero_optimization.{name}.nvme_path"
            why = "it is not a directory that this machine can write to"
            raise ConfigError(field, path, why=why, remedy=f"make it on every node: mkdir -p {path}")
