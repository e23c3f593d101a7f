"""The tokenizer task, before the map tasks: trains a tokenizer on a sample, or copies the given one."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.config.corpus import CorpusConfig
from data_prep.config.text_policy import ENGINE_FILE
from data_prep.dedup.minhash_task import write_token_classes
from data_prep.sources.conversation import TEMPLATE_FILE
from data_prep.sources.units import Unit
from data_prep.task import Counts, DirectoryTask, Marker, Report
from foundation.directory import write_json
from foundation.remote_folder import local_folder

_NO_END = (
    "no token that ends the assistant's turn counts in the loss, so a model does not learn to stop: put the end of "
    "turn, a special token, at the end of the chat template's {% generation %} block, or set append_eos to true"
)
_ONE_END = (
    "the chat template ends a conversation with the end-of-document token, and append_eos does so, too: one of the two "
    "is written, as at the end of any other document"
)
_FOLDER, _PIECES, _LINES = "tokenizer", "pieces.json", "lines.json"


@dataclass(frozen=True)
class TokenizerTask(DirectoryTask):
    """Makes `directory/tokenizer`, a Hugging Face tokenizer folder.

    The marker beside it is its manifest entry; `engine.json` names the engine with verified ids.

    Args:
        store: directory of tokenizers trained by earlier jobs; None to always train and not store.
    """

    name = "tokenizer"
    units: list[Unit]
    config: CorpusConfig
    directory: Path
    store: Path | None = None

    def _work(self, scratch: Path, report: Report) -> Marker:
        # not at the top of the module: no other task needs it
        from data_prep.tasks import tokenizer_sample  # noqa: PLC0415
        from data_prep.tokenizer import engine_choice, existing, load  # noqa: PLC0415

        folder = scratch / _FOLDER
        folder.mkdir()
        section = self.config.tokenizer
        if section.path is not None:
            lines = existing.import_tokenizer(str(local_folder(section.path)), folder)
        else:
            lines = self._train(scratch, folder)
        if section.chat_template is not None:
            shutil.copyfile(section.chat_template, folder / TEMPLATE_FILE)
        if self.config.dedup is not None and self.config.dedup.near is not None:
            write_token_classes(scratch, folder)
        policy = self.config.text_policy()
        if self.config.has_conversations:
            from data_prep.chat import encoder  # noqa: PLC0415 - brings jinja2 along

            # raises if the template is invalid
            special = policy.parse_special_tokens
            chat = encoder.open_chat_encoder(folder, parse_special_tokens=special, date=section.date)
            if not chat.learns_to_stop(append_eos=policy.append_eos):
                lines.append(_NO_END)
            eos = load.special_ids(folder, load.load(folder))["eos_id"] if policy.append_eos else None
            if eos is not None and chat.writes_end(eos):
                lines.append(_ONE_END)
        load.check_usable(folder, policy)
        if any(source.messages_field is None for source in self.config.sources):
            lines += load.missing_bos(folder, policy)
        texts = tokenizer_sample.proof_texts(self.units, self.config)
        choice = engine_choice.choose_engine(
            section.engine, folder, parse_special_tokens=policy.parse_special_tokens, sample=texts
        )
        if choice.engine == "sentencepiece" and choice.rejected:
            why = "documents get the ids of the sentencepiece model itself; tokenizer.json, which AutoTokenizer loads,"
            lines.append(f"{why} gives others for some texts ({choice.rejected[-1][1]})")
        (scratch / _LINES).write_text(json.dumps(lines), encoding="ascii")
        write_json(scratch / ENGINE_FILE, {"engine": choice.engine, "refused": list(choice.rejected)})
        report(Counts())
        return load.describe(folder, kind=section.train or "given")

    def _train(self, scratch: Path, folder: Path) -> list[str]:
        """Trains the tokenizer, or reuses the stored one for the same texts; records the pieces that were read.

        Returns:
            Lines for the user.
        """
        from data_prep.tasks import tokenizer_sample  # noqa: PLC0415
        from data_prep.tokenizer import store, train  # noqa: PLC0415

        digests: dict[Unit, str] = {}
        lines: list[str] = []
        with store.spool(tokenizer_sample.sample_texts(self.units, self.config, digests), scratch) as texts:
            if self.store is None:
                train.train(texts, folder, self.config.tokenizer)
            else:
                kept = store.TokenizerStore(self.store)
                lines = store.train_or_reuse(texts, folder, self.config.tokenizer, kept)
        pieces = [[u.source, u.file, u.start, u.end, digest] for u, digest in digests.items()]
        (scratch / _PIECES).write_text(json.dumps(pieces), encoding="ascii")
        return lines


def read_pieces(directory: Path) -> list[list[Any]] | None:
    """Pieces read for the training sample: [source, file, start, end, XXH3-128] each; None if unknown."""
    try:
        pieces: list[list[Any]] = json.loads((directory / _PIECES).read_text())
    except (OSError, ValueError):
        return None
    return pieces


def read_lines(directory: Path) -> list[str]:
    """Reads the task's lines for the user."""
    try:
        lines: list[str] = json.loads((directory / _LINES).read_text())
    except (OSError, ValueError):
        return []
    return lines


def tokenizer_folder(directory: Path) -> Path:
    """The Hugging Face folder within the task's directory."""
    return directory / _FOLDER
