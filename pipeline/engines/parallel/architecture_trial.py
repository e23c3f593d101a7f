"""Pre-flight check that an architecture is computed correctly under a layout, on a tiny model of the same architecture.

The reference is Hugging Face's own forward pass. An architecture whose logits differ under the layout (because it caps
or scales logits after the head, or mixes positions outside of attention) would silently train a different model. It is
refused before the process group is initialized. The check takes a fraction of a second, on the CPU.

Shapes: B = 1, T = 16 positions, V = 32 ids.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from foundation.errors import ConfigError
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.data.micro_batch import MicroBatch
from pipeline.engines.parallel.decoder import Decoder, DecoderLayout, parameter_owners
from pipeline.engines.parallel.experts import apply_expert_parallel
from pipeline.engines.parallel.recurrent import SequenceRanks, apply_recurrent, recurrent_blocks
from pipeline.engines.parallel.recurrent_trial import sequence_gradients
from pipeline.engines.parallel.ring import RingInOneProcess
from pipeline.engines.parallel.sharded_trial import LossGradients, rank_gradients, stage_gradients, whole_gradients
from pipeline.engines.parallel.stages import layer_list, split_layers
from pipeline.engines.parallel.trial_cache import remembered
from pipeline.engines.parallel.vocabulary import FULL_VOCABULARY, VocabularyShard
from pipeline.models.attention import ATTENTION_NAME, attention_of
from pipeline.models.attention_adapters import why_eager
from pipeline.models.construction.counter import CPU
from pipeline.models.construction.initial_values import OwnBuffers
from pipeline.models.construction.materialize import materialize
from pipeline.models.construction.meta import build_meta
from pipeline.models.construction.rectangle import Rectangle, part
from pipeline.models.hf_config import config_from, config_key, one_line
from pipeline.models.layers import global_value
from pipeline.models.resize.shrink import shrink
from pipeline.models.routers import has_experts

TOLERANCE = 1e-4
"""Largest difference in fp32, as a share of the largest logit. A different order of summation differs by 1e-6, a
different formula by 1e-2."""

_ROUNDING = 1e-6
"""Largest change of logits that must not change at all, as a share of the largest logit."""

_V, _T = 32, 16
_BOUNDARY = 6
"""Position at which the second document begins in the packed sample."""

_DENSE = "use ZeRO or FSDP2 (parallel.tp 1, parallel.pp 1) without loss.chunk"


def check_architecture(run: ResolvedRun, config: PretrainedConfig) -> None:
    """Checks that the layout and features of a run compute a tiny model correctly. A success is kept on disk.

    Args:
        run: the resolved config.
        config: the real model's Hugging Face config.

    Raises:
        ConfigError: logits or gradients differ; names the cause and what to use instead.
    """
    topology, own = run.topology, run.config
    read = (
        *(topology.pp, topology.tp, topology.cp, topology.ep, run.zigzag),
        *(own.model.attn_implementation, attention_of(run), own.data.mask_documents, own.data.sequence_length),
        *(own.loss.chunk, own.fp8.enabled and own.fp8.experts, own.parallel.tp_plan),
    )
    remembered("trial", [config_key(config), json.dumps(read)], lambda: _try(run, config))


def _try(run: ResolvedRun, config: PretrainedConfig) -> None:
    """Runs the trials of `check_architecture`, which has to list all fields of the run that they read."""
    topology, masks = run.topology, run.config.data.mask_documents
    separate_head = topology.tp > 1 or topology.pp > 1 or run.config.loss.chunk is not None
    attention = run.config.model.attn_implementation
    own = attention_of(run) == ATTENTION_NAME
    has_heads = global_value(config, "num_attention_heads") is not None
    fp8 = run.config.fp8.enabled and run.config.fp8.experts and has_experts(config.to_dict())
    needed = separate_head or masks or topology.cp > 1 or topology.ep > 1 or fp8 or (own and has_heads)
    tiny = _tiny_model(
        config, attention, length=run.config.data.sequence_length, needed=needed, ranks=max(topology.tp, topology.cp)
    )
    if tiny is None:
        return
    _check_causal(run, config, tiny)
    if not needed:
        return  # only Hugging Face's own code runs the model
    layout = DecoderLayout(own_attention=own)
    if own:
        _check_own_attention(run, tiny, layout)
    if separate_head:
        field, value = _separate_head_field(run)
        layout = replace(layout, own_head=not has_separate_head(config))
        chunked = replace(layout, chunk=_T // 2)
        tiny.compare(field, value, "its head on its base model's output", _DENSE, lambda: tiny.logits(chunked))
    if topology.pp > 1:
        tiny.compare_stages(replace(layout, chunk=run.config.loss.chunk and _T // 2), topology.pp)
    if topology.ep > 1:
        remedy = "remove parallel.ep: ZeRO 3 shards them"
        tiny.compare("parallel.ep", topology.ep, "our product of experts", remedy, tiny.exchanged_logits)
    elif fp8:
        remedy = "set it to false: experts then stay in bf16"
        tiny.compare("fp8.experts", True, "our product of experts", remedy, tiny.exchanged_logits)
    if topology.tp > 1:
        chunked = replace(layout, chunk=run.config.loss.chunk and _T // 2)
        tiny.compare_ranks(chunked, topology.tp, run.config.parallel.tp_plan)
    if masks or topology.cp > 1:
        _check_documents(run, tiny, layout)


def _check_documents(run: ResolvedRun, tiny: _TinyModel, layout: DecoderLayout) -> None:
    """Tries a document mask, and a sequence divided over ranks."""
    topology, masks, config = run.topology, run.config.data.mask_documents, tiny._config
    if tiny.attends_across_documents(layout):
        field, value = ("data.mask_documents", True) if masks else ("parallel.cp", topology.cp)
        why = f"layers of {config.model_type} mix positions by other means than attention"
        why += why_eager(tiny._build("eager"))
        raise ConfigError(field, value, why=why, remedy=f"set {field} to {'false' if masks else 1}")
    if topology.cp > 1:
        tiny.compare_sequence_ranks(layout, topology.cp, zigzag=run.zigzag)


def _check_own_attention(run: ResolvedRun, tiny: _TinyModel, layout: DecoderLayout) -> None:
    """Tries our attention, and ring attention if the config selects it; Ulysses computes the same as ours."""
    topology, attention = run.topology, run.config.model.attn_implementation
    also = [
        text
        for text, on in (
            ("parallel.cp 1", topology.cp > 1),
            ("parallel.tp 1", topology.tp > 1),
            ("data.mask_documents false", run.config.data.mask_documents),
            ("no optimizer.params.qk_clip", run.config.optimizer.params.qk_clip is not None),
        )
        if on
    ]
    remedy = " and ".join(["use model.attn_implementation eager", *also])  # eager supports none of these
    try:
        tiny.compare("model.attn_implementation", attention, "our attention", remedy, lambda: tiny.logits(layout))
    except ConfigError as error:
        why = error.why + why_eager(tiny._build("eager"))
        raise ConfigError(error.field, error.value, why=why, remedy=error.remedy) from None
    if run.zigzag:
        ring = replace(layout, cp_attention=RingInOneProcess(2))
        tiny.compare("parallel.cp_method", "ring", "ring attention", "use ulysses", lambda: tiny.logits(ring))


def has_separate_head(config: PretrainedConfig) -> bool:
    """Whether a model's logits are its head applied to the base model's output, not capped or scaled afterwards."""
    return _has_separate_head(config_key(config))


@cache
def _has_separate_head(key: str) -> bool:
    return bool(remembered("head", [key], lambda: _try_separate_head(key)))


def _try_separate_head(key: str) -> bool:
    try:
        tiny = _TinyModel(shrink(config_from(key), divide=1, layers=2, vocab_size=_V), "eager")
        tiny.compare("", "", "", "", lambda: tiny.logits(DecoderLayout(own_attention=False, chunk=_T)))
    except ConfigError:
        return False
    return True


def _tiny_model(
    config: PretrainedConfig, attention: str, *, length: int, needed: bool, ranks: int
) -> _TinyModel | None:
    """Builds a tiny model of the architecture; None if this fails and the layout does not need it.

    Raises:
        ConfigError: the tiny model cannot be built, and the layout needs it.
    """
    try:
        divide = min(ranks, 2)  # of the heads; two ranks are tried
        return _TinyModel(shrink(config, divide=divide, layers=2, vocab_size=_V, lengths=(length, _T)), attention)
    except ConfigError:
        if needed:
            raise
        return None


def _fails_on_meta(config: PretrainedConfig) -> bool:
    """Whether the real model's forward pass fails for a reason other than the missing values of meta tensors."""
    model = build_meta(config, dtype=torch.float32, attn_implementation="eager")
    try:
        with torch.no_grad():
            model(input_ids=torch.zeros(1, _T, dtype=torch.int64, device="meta"), use_cache=False)
    except (NotImplementedError, RuntimeError):
        return False
    except Exception:  # each architecture fails in its own way
        return True
    return False


def _check_causal(run: ResolvedRun, config: PretrainedConfig, tiny: _TinyModel) -> None:
    """Refuses a model that sees later tokens. `is_decoder` does not show it: it is false for GPT-NeoX, a decoder.

    Raises:
        ConfigError: the model sees later tokens, or its forward pass fails.
    """
    try:
        if not tiny.sees_later_tokens():
            return
    except ConfigError:
        if _fails_on_meta(config):
            raise
        return  # the tiny model's sizes are the cause
    why = "it sees the tokens to its right, so predicting the next one means nothing"
    remedy = "use a decoder, e.g. llama"
    if getattr(config, "is_decoder", None) is False:
        where = "" if run.config.model.path is None else f" in {run.config.model.path}/config.json"
        remedy = f"set model.config.is_decoder to true{where}, or {remedy}"
    raise ConfigError("model.config.model_type", config.model_type, why=why, remedy=remedy)


def _separate_head_field(run: ResolvedRun) -> tuple[str, Any]:
    """Returns the config field, with its value, that separates the head from the model's own forward pass."""
    if run.config.loss.chunk is not None:
        return "loss.chunk", run.config.loss.chunk
    axis = "tp" if run.topology.tp > 1 else "pp"
    return f"parallel.{axis}", getattr(run.topology, axis)


@dataclass(frozen=True)
class _Total:
    total: Tensor
    parts: tuple[Tensor, ...] = ()


class _LogitsRecorder:
    """An objective that records the logits."""

    def __init__(self) -> None:
        self.chunks: list[Tensor] = []

    def extra_targets(self, _batch: MicroBatch) -> tuple[Tensor, ...]:
        return ()

    def __call__(
        self, logits: Tensor, _labels: Tensor, *_extra_targets: Tensor, vocabulary: VocabularyShard = FULL_VOCABULARY
    ) -> _Total:
        assert vocabulary is FULL_VOCABULARY
        self.chunks.append(logits)
        return _Total(logits.sum())

    def with_gradient(self, *_args: Any, **_kwargs: Any) -> tuple[_Total, Tensor]:
        raise AssertionError("logits are recorded without gradients")

    @property
    def logits(self) -> Tensor:
        return torch.cat(self.chunks, 1)


SLOW_DECAY = ("A_log", "recurrent_param")
"""Parameters of recurrent layers. In trials their states decay slowly, so that no decay hides an earlier document."""


class RandomValues(OwnBuffers):
    """Random weights seeded by name, equal in two models; none is 0 or 1, with which many operations do nothing."""

    def __init__(self, model: nn.Module) -> None:
        self._shapes = {name: p.shape for name, p in model.named_parameters()}

    def value(self, name: str, *, box: Rectangle | None = None, device: torch.device = CPU) -> Tensor:
        shape = self._shapes[name]
        generator = torch.Generator().manual_seed(sum(name.encode()) + len(name))
        drawn = torch.randn(shape, generator=generator)
        if name.endswith(SLOW_DECAY):
            return part(0.2 * drawn - 4.0, box).to(device)
        return part(1.0 + 0.2 * drawn if len(shape) < 2 else drawn * (2.0 / shape[-1] ** 0.5), box).to(device)


def random_model(config: PretrainedConfig, *, attention: str = "eager") -> nn.Module:
    """Builds a model of a tiny config, on the CPU in fp32, with `RandomValues`."""
    model = build_meta(config, dtype=torch.float32, attn_implementation=attention)
    materialize(model, RandomValues(model), device=torch.device("cpu"))
    return model


class _TinyModel:
    """A tiny model, and its logits computed in several ways."""

    def __init__(self, config: PretrainedConfig, attention: str) -> None:
        self._config = config
        # flash attention runs only on a GPU; eager computes the same formula
        without = attention.startswith("flash_attention") or global_value(config, "num_attention_heads") is None
        self._hf_attention = "eager" if without else attention
        generator = torch.Generator().manual_seed(0)
        self._ids = torch.randint(_V, (1, _T), generator=generator)
        self._two = torch.cat([self._ids, self._ids.flip(1)])  # samples: a view may mix them up
        self._reference: Tensor | None = None
        self._built: dict[str, nn.Module] = {}

    @property
    def reference(self) -> Tensor:
        """Hugging Face's own logits [1, T, V]."""
        if self._reference is None:
            with self._refusing():
                self._reference = self._hf_logits(self._build(self._hf_attention), self._ids)
        return self._reference

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Turns a failure of Hugging Face's own forward pass into a ConfigError."""
        kind = self._config.model_type
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:  # each architecture fails in its own way
            why = f"transformers' own forward pass fails on a tiny {kind}: {one_line(error)}"
            remedy = "correct the key of model.config that it names, or use another architecture"
            raise ConfigError("model.config.model_type", kind, why=why, remedy=remedy) from None

    def compare(self, field: str, value: Any, what: str, remedy: str, compute: Callable[[], Tensor]) -> None:
        """Raises ConfigError for a field if the computed logits differ from Hugging Face's."""
        kind = self._config.model_type
        expected = self.reference
        try:
            found = compute()
        except ConfigError:
            raise
        except Exception as error:
            why = f"{what} fails on a tiny {kind}: {one_line(error)}"
            raise ConfigError(field, value, why=why, remedy=remedy) from None
        if found.shape != expected.shape or not _close(found, expected):
            why = f"{what} gives other logits than transformers' own forward pass of a tiny {kind}"
            raise ConfigError(field, value, why=why, remedy=remedy)

    def logits(self, layout: DecoderLayout) -> Tensor:
        """Computes the decoder's logits in a layout."""
        model = self._build_for(layout)
        return self._decoder_logits(model, layout, MicroBatch(self._ids, self._ids))

    def compare_stages(self, layout: DecoderLayout, pp: int) -> None:
        """Raises ConfigError if loss or a gradient differs from the whole model's with each layer in its own stage."""
        count = len(layer_list(self._build_for(layout))[1])
        models = [self._build_for(layout) for _ in range(count)]
        stages = split_layers([1.0] * count, head=0.0, stages=count)
        self._compare_gradients(
            "pp", pp, "pipeline stages of one layer each", lambda: stage_gradients(models, stages, layout, self._two)
        )

    def compare_ranks(self, layout: DecoderLayout, tp: int, table: Mapping[str, str]) -> None:
        """Raises ConfigError if loss or a gradient of two tensor-parallel ranks differs from the whole model's."""
        attention = ATTENTION_NAME if layout.own_attention else self._hf_attention
        model = build_meta(copy.deepcopy(self._config), dtype=torch.float32, attn_implementation=attention)
        values = RandomValues(model)
        self._compare_gradients(
            "tp",
            tp,
            "two tensor-parallel ranks",
            lambda: rank_gradients(model, values, layout, self._two, ranks=2, table=table),
        )

    def compare_sequence_ranks(self, layout: DecoderLayout, cp: int, *, zigzag: bool) -> None:
        """Raises ConfigError if loss or a gradient of a model with recurrent blocks differs with two cp ranks.

        The sequence is two packed documents, as on the one rank with which they are compared.
        """
        model = self._build_for(layout)
        if not recurrent_blocks(model):
            return
        compute = partial(sequence_gradients, model, layout, self._packed(), zigzag=zigzag)
        what = "two context-parallel ranks"
        self._compare_gradients("cp", cp, what, lambda: compute(ranks=2), lambda: compute(ranks=1))

    def _packed(self) -> MicroBatch:
        """Returns the sequence as two packed documents."""
        positions = torch.arange(_T).unsqueeze(0)
        second = positions >= _BOUNDARY
        restarted = torch.where(second, positions - _BOUNDARY, positions)
        return MicroBatch(self._ids, self._ids, restarted, second.to(torch.int32))

    def _compare_gradients(
        self,
        axis: str,
        size: int,
        what: str,
        compute: Callable[[], LossGradients],
        reference: Callable[[], LossGradients] | None = None,
    ) -> None:
        kind, field, remedy = self._config.model_type, f"parallel.{axis}", f"use ZeRO or FSDP2 (parallel.{axis} 1)"
        with self._refusing():
            expected = reference() if reference else whole_gradients(self._build(self._hf_attention), self._two)
        try:
            found = compute().difference(expected)
        except ConfigError:
            raise
        except Exception as error:  # each architecture fails in its own way
            why = f"running it as {what} fails on a tiny {kind}: {one_line(error)}"
            raise ConfigError(field, size, why=why, remedy=remedy) from None
        if found is not None:
            why = f"{what} give another result than transformers' own forward pass of a tiny {kind}: {found}"
            raise ConfigError(field, size, why=why, remedy=remedy)

    def exchanged_logits(self) -> Tensor:
        """Computes the logits with the experts of expert parallelism, all on one rank."""
        model = self._build(self._hf_attention)
        apply_expert_parallel(model, None, names={})
        return self._hf_logits(model, self._ids)

    def attends_across_documents(self, layout: DecoderLayout) -> bool:
        """Whether two packed documents have other logits than each document alone."""
        model = self._build_for(layout)
        recurrent = apply_recurrent(model, SequenceRanks(), blocks=recurrent_blocks(model))
        layout = replace(layout, recurrent=recurrent)
        packed = self._packed()
        changed = self._ids.clone()
        changed[:, _BOUNDARY - 1] = (changed[:, _BOUNDARY - 1] + 1) % _V
        both = (self._ids[:, :_BOUNDARY], self._ids[:, _BOUNDARY:])
        try:
            together = self._decoder_logits(model, layout, packed)
            moved = self._decoder_logits(model, layout, replace(packed, input_ids=changed))[:, _BOUNDARY:]
            alone = [self._decoder_logits(model, layout, MicroBatch(ids, ids)) for ids in both]
        except Exception:  # an architecture for lengths that its blocks divide (Reformer)
            return True
        if not torch.allclose(moved, together[:, _BOUNDARY:], rtol=0, atol=_ROUNDING * float(together.abs().max())):
            return True  # the last token of the first document changes the second
        return not _close(together, torch.cat(alone, dim=1))

    def sees_later_tokens(self) -> bool:
        """Whether replacing the last token changes earlier logits.

        Raises:
            ConfigError: Hugging Face's own forward pass fails.
        """
        with self._refusing():
            model = self._build("eager")  # every architecture supports eager
            return any(
                not _close(self._hf_logits(model, ids)[:, :-1], self._hf_logits(model, other)[:, :-1])
                for ids, other in self._pairs()
            )
        raise AssertionError("unreachable: a failure is raised as ConfigError")

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields two sequences that differ in the last token; if end-of-text is also padding, two more with padding.

        XLM treats any number of padding tokens, anywhere, as the end of a text.
        """
        other = self._ids.clone()
        other[:, -1] = (other[:, -1] + 1) % _V
        yield self._ids, other
        padding = self._config.pad_token_id
        if isinstance(padding, int) and padding == self._config.eos_token_id:
            ids = self._ids.clone()
            ids[:, _BOUNDARY] = padding
            other = ids.clone()
            ids[:, -1], other[:, -1] = (padding + 1) % _V, padding
            yield ids, other

    @torch.no_grad()
    def _hf_logits(self, model: nn.Module, ids: Tensor) -> Tensor:
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
        return logits

    @torch.no_grad()
    def _decoder_logits(self, model: nn.Module, layout: DecoderLayout, batch: MicroBatch) -> Tensor:
        recorder = _LogitsRecorder()
        Decoder(model, layout, parameter_owners(model))(batch.input_ids, batch, recorder)
        return recorder.logits

    def _build_for(self, layout: DecoderLayout) -> nn.Module:
        return self._build(ATTENTION_NAME if layout.own_attention else self._hf_attention)

    def _build(self, attention: str) -> nn.Module:
        """Builds a model that the caller may change."""
        if attention not in self._built:
            config = copy.deepcopy(self._config)  # a config remembers the attention with which a model is built
            self._built[attention] = random_model(config, attention=attention).eval()
        return copy.deepcopy(self._built[attention])


def _close(found: Tensor, expected: Tensor) -> bool:
    limit = TOLERANCE * max(float(expected.abs().max()), 1e-6)
    return bool((found - expected).abs().max() <= limit)
