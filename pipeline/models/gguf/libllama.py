"""Calls llama.cpp through ctypes, from the shared library in the wheel `xllamacpp`, which exports all of llama.h.

Use it only in a separate process: an error in C ends the process. The fields of parameter structs change between
versions of llama.cpp. The structs therefore start as the library's own defaults, and only their first fields are set;
each declaration has room at its end for fields that later versions append. Source of the declarations: llama.cpp,
include/llama.h and ggml/include/ggml.h, October 2026.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int8, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from functools import cache
from importlib.metadata import version as version_of
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

PACKAGE = "xllamacpp"
_ROOM = 512
_CONTEXT_STEP = 256
"""Number whose multiples are the possible numbers of positions of a sequence in llama.cpp."""


class _ModelParameters(ctypes.Structure):
    _fields_ = (("fields", c_int8 * (128 + _ROOM)),)


class _ContextParameters(ctypes.Structure):
    _fields_ = (
        ("n_ctx", c_uint32),
        ("n_batch", c_uint32),
        ("n_ubatch", c_uint32),
        ("n_seq_max", c_uint32),
        ("others", c_int8 * (256 + _ROOM)),
    )


class _Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    )


def installed() -> bool:
    """Whether the library is installed."""
    return find_spec(PACKAGE) is not None


def version() -> str:
    """Returns the version of the package; its last number is llama.cpp's build."""
    return version_of(PACKAGE)


@cache
def library() -> Any:
    """Loads the shared library, and declares the types of the functions used.

    Raises:
        ImportError: the package is not installed.
    """
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ImportError(f"{PACKAGE} is not installed")
    (file,) = Path(spec.origin).parent.glob("*.so")
    loaded = ctypes.CDLL(str(file))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    loaded.llama_log_set(_quiet, None)
    loaded.llama_backend_init()
    return loaded


_LogCallback = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)
_WARNING = 3


def _print_errors(level: int, text: bytes, _data: object) -> None:
    """Prints errors and their continuations (level 5), and drops the rest."""
    if level > _WARNING and level != _CONTINUED:
        print(text.decode(errors="replace"), end="", flush=True)


_quiet = _LogCallback(_print_errors)
"""The callback, kept because the library calls it later."""

_CONTINUED = 5
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "llama_log_set": (None, [_LogCallback, c_void_p]),
    "llama_backend_init": (None, []),
    "llama_model_default_params": (_ModelParameters, []),
    "llama_context_default_params": (_ContextParameters, []),
    "llama_model_load_from_file": (c_void_p, [c_char_p, _ModelParameters]),
    "llama_model_free": (None, [c_void_p]),
    "llama_model_get_vocab": (c_void_p, [c_void_p]),
    "llama_vocab_n_tokens": (c_int32, [c_void_p]),
    "llama_init_from_model": (c_void_p, [c_void_p, _ContextParameters]),
    "llama_set_n_threads": (None, [c_void_p, c_int32, c_int32]),
    "llama_free": (None, [c_void_p]),
    "llama_tokenize": (c_int32, [c_void_p, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool]),
    "llama_batch_init": (_Batch, [c_int32, c_int32, c_int32]),
    "llama_batch_free": (None, [_Batch]),
    "llama_decode": (c_int32, [c_void_p, _Batch]),
    "llama_get_logits_ith": (POINTER(c_float), [c_void_p, c_int32]),
    "ggml_quantize_init": (None, [c_int]),
    "ggml_row_size": (c_size_t, [c_int, c_int64]),
    "ggml_quantize_chunk": (c_size_t, [c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p]),
}
"""Function -> (result, arguments)."""


class _BatchToken(NamedTuple):
    """A token of a batch: its position in its sequence, and whether to return its logits."""

    token: int
    position: int
    sequence: int
    wanted: bool


class Model:
    """A GGUF file loaded by llama.cpp, on the CPU.

    Args:
        path: the file.
        threads: number of threads; None for llama.cpp's default.

    Raises:
        RuntimeError: llama.cpp cannot load the file; it has printed the reason.
    """

    def __init__(self, path: Path, *, threads: int | None = None) -> None:
        self._library, self._threads = library(), threads
        parameters = self._library.llama_model_default_params()
        self._model = self._library.llama_model_load_from_file(str(path).encode(), parameters)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self._vocabulary = self._library.llama_model_get_vocab(self._model)
        self.vocabulary_size = int(self._library.llama_vocab_n_tokens(self._vocabulary))

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Returns the token ids of a text.

        Args:
            add_special: whether to add the BOS and EOS ids as the file specifies.
            parse_special: whether the text of a special token becomes that token.
        """
        raw = text.encode()
        room = len(raw) + 16
        ids = (c_int32 * room)()
        arguments = (self._vocabulary, raw, len(raw), ids, room, add_special, parse_special)
        count = self._library.llama_tokenize(*arguments)
        assert count >= 0, "a token has a byte at least"
        return list(ids[:count])

    def logits(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Returns logits float32 [T, V] of one sequence of T token ids.

        Raises:
            RuntimeError: llama.cpp does not run the model.
        """
        with self._context(len(ids), tokens=len(ids), sequences=1) as (context, batch):
            entries = [_BatchToken(each, position, 0, wanted=True) for position, each in enumerate(ids)]
            return self._decode(context, batch, entries)

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
        """Continues prompts by greedy decoding, all sequences in one batch; does not stop at end-of-text.

        Args:
            prompts: token ids [B][P], all of one length.
            tokens: number of tokens to generate, N, at least 1.

        Returns:
            ids [B][N].

        Raises:
            RuntimeError: llama.cpp does not run the model.
        """
        count, length = len(prompts), len(prompts[0])
        room = -(-(length + tokens) // _CONTEXT_STEP) * _CONTEXT_STEP
        with self._context(count * room, tokens=count * length, sequences=count) as (context, batch):
            entries = [
                _BatchToken(each, position, sequence, wanted=position == length - 1)
                for sequence, prompt in enumerate(prompts)
                for position, each in enumerate(prompt)
            ]
            made = [self._decode(context, batch, entries).argmax(-1).tolist()]
            for position in range(length, length + tokens - 1):
                entries = [_BatchToken(each, position, sequence, wanted=True) for sequence, each in enumerate(made[-1])]
                made.append(self._decode(context, batch, entries).argmax(-1).tolist())
        return [list(row) for row in zip(*made, strict=True)]

    @contextmanager
    def _context(self, positions: int, *, tokens: int, sequences: int) -> Iterator[tuple[Any, Any]]:
        """Makes a context with `positions` positions over all sequences, and a batch of `tokens` tokens."""
        parameters = self._library.llama_context_default_params()
        parameters.n_ctx, parameters.n_seq_max = positions, sequences
        parameters.n_batch = parameters.n_ubatch = tokens
        context = self._library.llama_init_from_model(self._model, parameters)
        if not context:
            raise RuntimeError("llama.cpp cannot make a context for the model")
        if self._threads is not None:
            self._library.llama_set_n_threads(context, self._threads, self._threads)
        batch = self._library.llama_batch_init(tokens, 0, 1)
        try:
            yield context, batch
        finally:
            self._library.llama_batch_free(batch)
            self._library.llama_free(context)

    def _decode(self, context: Any, batch: Any, entries: Sequence[_BatchToken]) -> npt.NDArray[np.float32]:
        """Decodes a batch; returns logits float32 [wanted, V] of the entries whose logits are wanted."""
        batch.n_tokens = len(entries)
        for number, each in enumerate(entries):
            batch.token[number], batch.pos[number] = each.token, each.position
            batch.n_seq_id[number], batch.seq_id[number][0] = 1, each.sequence
            batch.logits[number] = each.wanted
        code = self._library.llama_decode(context, batch)
        if code:
            raise RuntimeError(f"llama_decode failed with code {code}")
        rows = [self._library.llama_get_logits_ith(context, n) for n, each in enumerate(entries) if each.wanted]
        return np.stack([np.ctypeslib.as_array(row, (self.vocabulary_size,)).copy() for row in rows])


def quantize_rows(
    values: npt.NDArray[np.float32], *, ggml_type: int, importance: npt.NDArray[np.float32] | None = None
) -> npt.NDArray[np.uint8]:
    """Quantizes rows of numbers to a type of ggml.

    Args:
        values: float32 [rows, n], C order; n a multiple of the type's block.
        ggml_type: number of the type in `gguf.GGMLQuantizationType`.
        importance: float32 [n], weight of every column's squared error; None for equal weights.

    Returns:
        uint8 [rows, bytes per row].
    """
    loaded = library()
    rows, width = values.shape
    values = np.ascontiguousarray(values, dtype=np.float32)
    out = np.empty((rows, loaded.ggml_row_size(ggml_type, width)), dtype=np.uint8)
    loaded.ggml_quantize_init(ggml_type)
    source, target = (each.ctypes.data_as(c_void_p) for each in (values, out))
    weights = None
    if importance is not None:
        importance = np.ascontiguousarray(importance, dtype=np.float32)
        assert importance.shape == (width,), (importance.shape, width)
        weights = importance.ctypes.data_as(c_void_p)
    written = loaded.ggml_quantize_chunk(ggml_type, source, target, 0, rows, width, weights)
    assert written == out.nbytes, (written, out.nbytes)
    return out
