"""Rules of a distillation that hold whatever the data and the models."""

from __future__ import annotations

from headrace.base.errors import ConfigError
from pipeline.config.sections.run import Config


def check_distillation(config: Config) -> None:
    """Refuses a distillation without a teacher, and cached logits of samples that no two runs would agree on.

    Raises:
        ConfigError: names the field.
    """
    section = config.distill
    if section is None:
        return
    if section.teacher is None and section.logits is None:
        why = "there is neither a teacher nor its cached logits"
        raise ConfigError("distill.teacher", why=why, remedy='e.g. "teacher": "out/models/teacher"')
    if section.logits is not None and config.data.fim is not None:
        why = "fill-in-the-middle rearranges a sample differently in every run, and cached logits are of one order"
        raise ConfigError("distill.logits", section.logits, why=why, remedy="use distill.teacher, or remove data.fim")
    if section.logits is not None and section.on_policy is not None:
        why = "cached logits are of the data's tokens, and what the student will sample is not known before"
        raise ConfigError("distill.on_policy", why=why, remedy="use distill.teacher without distill.logits")
    if section.logits is not None and section.shard_teacher:
        why = "with cached logits no teacher is in memory"
        raise ConfigError("distill.shard_teacher", True, why=why, remedy="leave it out")
