"""Whether an architecture may be computed the way a layout computes it: tried on a tiny model of the same kind.

Hugging Face's own forward pass is the measure. What differs from it here (a model that caps or scales its logits after
the head, attention of another kind, layers that mix positions by other means) would train another model silently; so it
is refused, before a process group is opened. It takes a fraction of a second, on the CPU.

Shapes: B = 1, T = 16 positions, V = 32 ids.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from headrace.base.errors import ConfigError
from pipeline.config.rules import ResolvedRun
from pipeline.data.loader import MicroBatch
from pipeline.models.attention import NAME
from pipeline.models.hf_config import one_line
from pipeline.models.materialise import materialise
from pipeline.models.meta import build_meta
from pipeline.models.shrink import shrink
from pipeline.parallel.decoder import Decoder, DecoderLayout, owners_of
from pipeline.parallel.stages import cut_to_stage, split
from pipeline.parallel.tensor import check_plan
from pipeline.parallel.vocabulary import WHOLE, Vocabulary

TOLERANCE = 1e-4
"""Relative to the largest logit, in fp32: two ways to add up some numbers differ by 1e-6, another formula by 1e-2."""

_V, _T = 32, 16
_BORDER = 6
"""Where the second document begins in the packed sample."""

_DENSE = "use ZeRO or FSDP2 (parallel.tp 1, parallel.pp 1) without loss.chunk"


def check_architecture(run: ResolvedRun, config: PretrainedConfig) -> None:
    """Tries what the layout and features of a run need.

    Args:
        run: the resolved config.
        config: of the real model.

    Raises:
        ConfigError: names what differs, and what to use instead.
    """
    topology, masks = run.topology, run.config.data.mask_documents
    pieces = topology.tp > 1 or topology.pp > 1 or run.config.loss.chunk is not None
    if getattr(config, "num_attention_heads", None) is None and not (pieces or masks or topology.cp > 1):
        return  # nothing of ours takes part in it
    given = run.config.model.attn_implementation
    own = given == "sdpa" and not run.plain
    if not (own or pieces or masks):
        return
    trial, plain = _Trial(shrink(config, divide=1, layers=2, vocab_size=_V), given), DecoderLayout(own_attention=own)
    if own:
        remedy = "use model.attn_implementation eager" + (" and parallel.cp 1" if topology.cp > 1 else "")
        trial.compare("model.attn_implementation", given, "our attention", remedy, lambda: trial.logits(plain))
    if pieces:
        field, value = _asks_for_pieces(run)
        chunked = replace(plain, chunk=_T // 2)
        trial.compare(field, value, "its head on its base model's output", _DENSE, lambda: trial.logits(chunked))
    if topology.pp > 1:
        what = "two stages of it, one behind the other,"
        trial.compare("parallel.pp", topology.pp, what, _DENSE, lambda: trial.staged_logits(plain))
    if topology.tp > 1 and trial.mixes_outside_cut_blocks():
        why = f"layers of {config.model_type} mix positions in parts that its base_model_tp_plan does not cut"
        raise ConfigError("parallel.tp", topology.tp, why=why, remedy="use ZeRO or FSDP2 (parallel.tp 1)")
    if (masks or topology.cp > 1) and trial.crosses_documents(plain):
        field, value = ("data.mask_documents", True) if masks else ("parallel.cp", topology.cp)
        why = f"layers of {config.model_type} mix positions by other means than attention"
        raise ConfigError(field, value, why=why, remedy=f"set {field} to {'false' if masks else 1}")


def _asks_for_pieces(run: ResolvedRun) -> tuple[str, Any]:
    if run.config.loss.chunk is not None:
        return "loss.chunk", run.config.loss.chunk
    axis = "tp" if run.topology.tp > 1 else "pp"
    return f"parallel.{axis}", getattr(run.topology, axis)


@dataclass(frozen=True)
class _Scored:
    total: Tensor
    parts: tuple[Tensor, ...] = ()


class _Caught:
    """Keeps the logits that it is asked to score."""

    def __init__(self) -> None:
        self.pieces: list[Tensor] = []

    def against(self, _batch: MicroBatch) -> tuple[Tensor, ...]:
        return ()

    def __call__(self, logits: Tensor, _labels: Tensor, *_against: Tensor, vocabulary: Vocabulary = WHOLE) -> _Scored:
        assert vocabulary is WHOLE
        self.pieces.append(logits)
        return _Scored(logits.sum())

    @property
    def logits(self) -> Tensor:
        return torch.cat(self.pieces, 1)


class _Drawn:
    """Weights of a tiny model by name, so that two copies are alike: none at 0 or 1, where much has no effect."""

    def __init__(self, model: nn.Module) -> None:
        self._shapes = {name: p.shape for name, p in model.named_parameters()}

    def value(self, name: str) -> Tensor:
        shape = self._shapes[name]
        generator = torch.Generator().manual_seed(sum(name.encode()) + len(name))
        drawn = torch.randn(shape, generator=generator)
        return 1.0 + 0.2 * drawn if len(shape) < 2 else drawn * (2.0 / shape[-1] ** 0.5)


class _Trial:
    """A tiny model, and its logits computed in several ways."""

    def __init__(self, config: PretrainedConfig, attention: str) -> None:
        self._config = config
        # flash attention runs on a GPU only; eager is the formula itself
        self._theirs = attention if attention != "flash_attention_2" else "eager"
        generator = torch.Generator().manual_seed(0)
        self._ids = torch.randint(_V, (1, _T), generator=generator)
        self._reference: Tensor | None = None

    @property
    def reference(self) -> Tensor:
        """Hugging Face's own logits [1, T, V]."""
        if self._reference is None:
            self._reference = self._plain_logits(self._real(self._theirs), self._ids)
        return self._reference

    def compare(self, field: str, value: Any, what: str, remedy: str, compute: Callable[[], Tensor]) -> None:
        """Refuses a field when the logits that its way of computing gives are not Hugging Face's."""
        kind = self._config.model_type
        expected = self.reference
        try:
            found = compute()
        except ConfigError:
            raise
        except Exception as error:
            why = f"{what} does not run on a tiny {kind}: {one_line(error)}"
            raise ConfigError(field, value, why=why, remedy=remedy) from None
        if found.shape != expected.shape or not _close(found, expected):
            why = f"{what} gives other logits than transformers' own forward pass of a tiny {kind}"
            raise ConfigError(field, value, why=why, remedy=remedy)

    def logits(self, form: DecoderLayout) -> Tensor:
        """By the decoder, in a form."""
        model = self._real(NAME if form.own_attention else self._theirs)
        return self._decoded(model, form, MicroBatch(self._ids, self._ids))

    @torch.no_grad()
    def staged_logits(self, form: DecoderLayout) -> Tensor:
        """By two stages."""
        layers = self._config.num_hidden_layers
        passed, caught = self._ids, _Caught()
        for stage in split([1.0] * layers, head=0.0, stages=2):
            model = self._real(NAME if form.own_attention else self._theirs)
            owners = owners_of(model)
            cut_to_stage(model, stage)
            cut = replace(form, first=stage.first, last=stage.last)
            passed = Decoder(model, cut, owners)(passed, MicroBatch(self._ids, self._ids), caught)[0]
        return caught.logits

    def crosses_documents(self, form: DecoderLayout) -> bool:
        """Logits of the second of two packed documents are not those of that document alone."""
        model = self._real(NAME if form.own_attention else self._theirs)
        at = torch.arange(_T).unsqueeze(0)
        second = at >= _BORDER
        packed = MicroBatch(self._ids, self._ids, torch.where(second, at - _BORDER, at), second.to(torch.int32))
        alone = MicroBatch(self._ids[:, _BORDER:], self._ids[:, _BORDER:])
        together = self._decoded(model, form, packed)[:, _BORDER:]
        return not _close(together, self._decoded(model, form, alone))

    def mixes_outside_cut_blocks(self) -> bool:
        """With the blocks that tensor parallelism cuts silenced, a position still sees another."""
        model = self._real(self._theirs)
        blocks = {name.rpartition(".")[0] for name in check_plan(model, tp=1)}
        for name in blocks:
            model.get_submodule(name).register_forward_hook(_silence)
        other = self._ids.clone()
        other[:, 0] = (other[:, 0] + 1) % _V
        before, after = (self._plain_logits(model, ids)[:, 1:] for ids in (self._ids, other))
        return not _close(before, after)

    @torch.no_grad()
    def _plain_logits(self, model: nn.Module, ids: Tensor) -> Tensor:
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
        return logits

    @torch.no_grad()
    def _decoded(self, model: nn.Module, form: DecoderLayout, batch: MicroBatch) -> Tensor:
        caught = _Caught()
        Decoder(model, form, owners_of(model))(batch.input_ids, batch, caught)
        return caught.logits

    def _real(self, attention: str) -> nn.Module:
        model = build_meta(self._config, dtype=torch.float32, attn_implementation=attention)
        materialise(model, _Drawn(model), device=torch.device("cpu"))
        return model.eval()


def _silence(_module: nn.Module, _args: Any, output: Any) -> Any:
    """Zeros in place of a block's output, or of the first of several."""
    if isinstance(output, tuple):
        return (torch.zeros_like(output[0]), *output[1:])
    return torch.zeros_like(output)


def _close(found: Tensor, expected: Tensor) -> bool:
    limit = TOLERANCE * max(float(expected.abs().max()), 1e-6)
    return bool((found - expected).abs().max() <= limit)
