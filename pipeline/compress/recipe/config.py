"""Config of a whole compression (`headrace compress run`). No torch."""

from __future__ import annotations

from pydantic import Field

from foundation.configfile import ConfigTree
from foundation.paths import LocalPath
from foundation.section import Count, Section
from pipeline.evaluation.heldout.data import HeldOutData


class DistillStep(Section):
    """The training that follows a pruning: the pruned model is the student, the original is the teacher."""

    config: LocalPath = Field(
        description="Training config of the student, e.g. demo/student.json, relative to the current directory; the"
        " recipe sets model.path, distill.teacher and run.dir in it"
    )
    overrides: list[str] = Field(
        default=[], description='Overrides of its fields, as with --set, e.g. ["run.steps=300", "distill.alpha=0.9"]'
    )
    processes: Count = Field(
        default=1, description="Processes that train on this machine, one per GPU, e.g. 8 (headrace distill --nproc)"
    )


class RecipeConfig(Section):
    """Prune, distil, quantize, export and evaluate a trained model; each step is a directory, and is done once."""

    model: LocalPath = Field(
        description="What is compressed: a Hugging Face folder, e.g. out/demo/models/teacher, or a run directory or"
        " checkpoint, which is exported first"
    )
    output: LocalPath = Field(
        description="Directory of all results, e.g. out/demo/compressed; a second start goes on with the step that was"
        " interrupted"
    )
    data: HeldOutData = Field(description="Held-out data on which every step is evaluated")
    prune: ConfigTree | list[ConfigTree] | None = Field(
        default=None,
        description='Pruning: fields of a prune config but model, output and data, e.g. {"target": {"parameters":'
        " 2e6}}; a list for several rounds, each of which is followed by the distillation; null: no pruning",
    )
    distill: DistillStep | None = Field(
        default=None, description="Distillation from the original after each pruning; null: none"
    )
    quantize: dict[str, ConfigTree] = Field(
        default={},
        description="Quantizations of the result, by name: fields of a quantize config but model, output and data, e.g."
        ' {"int4-gptq": {"scheme": "W4A16", "method": "gptq"}, "q8_0": {"scheme": "Q8_0"}}',
    )
    consumers: list[str] | None = Field(
        default=None,
        description='Programs that have to score every quantized model, e.g. ["transformers", "vllm"]; null: every one'
        " that is installed and takes the scheme",
    )
    prompts: list[str] = Field(
        default=[], description='Texts that every model of the report goes on from, e.g. ["Once upon a time"]'
    )

    @property
    def rounds(self) -> list[ConfigTree]:
        """Pruning sections, one per round; empty without pruning."""
        given = self.prune or []
        return [given] if isinstance(given, dict) else given
