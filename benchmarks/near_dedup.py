"""Near-duplicate detection: recall, precision and CPU time, compared with datatrove.

    python -m benchmarks.near_dedup CORPUS.jsonl TOKENIZER.json [--megabytes 40] [--plants 2000] [--peers PYTHON]

It adds edited duplicates of some real documents (words replaced, left out or added, lines reordered, text cut off,
another text before or after) and runs every implementation with 14 bands of 8 hashes. The ground truth is the exact
Jaccard similarity of 5-grams of words, without case and punctuation, which datatrove also compares.

- recall: the share of planted pairs with a dropped document, by similarity;
- precision: the share of dropped documents with a similarity of 0.5 or more to some document of their component;
- MB/s of CPU time, without reading and tokenizing, which the job does anyway.

`--peers` is the path of a Python with datatrove (`near_dedup_peers.py`); it runs with datatrove's own words, and with
words split at white space.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import fastokens
import numpy as np
import xxhash

from benchmarks.harness import Seconds, make_parser, print_head, print_row, work_folder
from data_prep.config.dedup import DedupSection, NearSection
from data_prep.dedup import components, document_tasks, minhash, words
from data_prep.dedup.table import PAIRS

SHARDS = 4
PEERS = ("datatrove", "datatrove_whitespace")
BUCKETS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
SIMILAR = 0.5
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Corpus:
    """`texts`: in input order; `plants`: (index of the original, index of its edited duplicate, kind of edit)."""

    texts: list[str]
    plants: list[tuple[int, int, str]]

    @property
    def megabytes(self) -> float:
        return sum(len(text.encode()) for text in self.texts) / 1e6


@dataclass(frozen=True)
class Found:
    """Result of one implementation.

    labels: int64[documents], equal for connected documents; dropped: bool[documents]; seconds: CPU seconds by stage.
    """

    labels: Array
    dropped: Array
    seconds: dict[str, float]


def main() -> None:
    """Runs the benchmark and prints the tables in Markdown."""
    parser = make_parser(__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("tokenizer")
    parser.add_argument("--megabytes", type=float, default=40)
    parser.add_argument("--plants", type=int, default=2000)
    parser.add_argument("--peers", help="an interpreter with datatrove")
    parser.add_argument("--only", default=",".join(PEERS), help="which of them, separated by commas")
    arguments = parser.parse_args()
    corpus = make_corpus(arguments.corpus, arguments.megabytes, arguments.plants)
    found: dict[str, Found] = {}
    with work_folder() as work:
        ids, offsets = tokenize(corpus.texts, arguments.tokenizer)
        classes = words.tokenizer_token_classes(Path(arguments.tokenizer))
        for of, table in (("words", classes), ("tokens", None)):
            found[f"headrace, 5-grams of {of}"] = headrace(ids, offsets, work / of, classes=table)
        if arguments.peers:
            write_shards(corpus.texts, work)
            for name in arguments.only.split(","):
                found[name] = peer(arguments.peers, name, work)
    grams = Grams(corpus.texts)
    report_recall(corpus, grams, found)
    report_cost(corpus, grams, found, tokens=len(ids))


def make_corpus(path: Path, megabytes: float, plants: int) -> Corpus:
    """Reads documents of a corpus of {"text"} lines and appends the edited duplicates."""
    rng, texts, size = random.Random(0), [], 0
    with path.open(encoding="utf-8") as file:
        for line in file:
            texts.append(json.loads(line)["text"])
            size += len(texts[-1])
            if size > megabytes * 1e6:
                break
    usable = [n for n, text in enumerate(texts) if 60 <= len(text.split()) <= 3000]
    pairs = []
    for original in rng.sample(usable, min(plants, len(usable))):
        kind = rng.choice(list(EDITS))
        other = texts[rng.choice(usable)]
        pairs.append((original, len(texts), kind))
        texts.append(EDITS[kind](texts[original], other, rng.uniform(0.5, 0.98), rng))
    return Corpus(texts, pairs)


def edit_words(text: str, other: str, similarity: float, rng: random.Random, *, how: str) -> str:
    """Edits each word with the probability p that gives 5-grams this `similarity`: (1 - p)^5 = 2 s / (1 + s)."""
    parts, others = re.split(r"(\s+)", text), other.split()
    share = 1 - (2 * similarity / (1 + similarity)) ** (1 / 5)
    for n in range(0, len(parts), 2):
        if rng.random() < share:
            word = rng.choice(others)
            parts[n] = {"replace": word, "delete": "", "insert": f"{parts[n]} {word}"}[how]
    return "".join(parts)


def reorder(text: str, _other: str, similarity: float, rng: random.Random) -> str:
    """Moves lines: each move breaks the 5-grams at the line's two ends, of about 8 words."""
    lines = text.split("\n")
    for _ in range(int(len(lines) * (1 - similarity) / 2)):
        lines.insert(rng.randrange(len(lines)), lines.pop(rng.randrange(len(lines))))
    return "\n".join(lines)


def cut_off(text: str, _other: str, similarity: float, _rng: random.Random) -> str:
    """Keeps the share `similarity` of the text, from its start."""
    return text[: int(len(text) * similarity)]


def add_text(text: str, other: str, similarity: float, rng: random.Random) -> str:
    """Adds a part of another text before or after."""
    size = int(len(text) * (1 / similarity - 1))
    added = (other * (size // len(other) + 1))[:size]
    return f"{added}\n{text}" if rng.random() < 0.5 else f"{text}\n{added}"


EDITS: dict[str, Callable[[str, str, float, random.Random], str]] = {
    "words replaced": partial(edit_words, how="replace"),
    "words left out": partial(edit_words, how="delete"),
    "words added": partial(edit_words, how="insert"),
    "lines moved": reorder,
    "cut off": cut_off,
    "text added": add_text,
}


class Grams:
    """Exact Jaccard similarity of documents, from sets of 5-grams of words."""

    def __init__(self, texts: list[str]) -> None:
        self._texts, self._sets = texts, dict[int, Array]()

    def similarity(self, one: int, other: int) -> float:
        """Jaccard similarity: the number of n-grams that both have, divided by the number that either has."""
        a, b = self._set(one), self._set(other)
        both = len(np.intersect1d(a, b, assume_unique=True))
        return both / max(1, len(a) + len(b) - both)

    def _set(self, number: int) -> Array:
        if number not in self._sets:
            found = re.findall(r"\w+", self._texts[number].lower())
            hashes = (
                xxhash.xxh3_64_intdigest(" ".join(found[n : n + 5]).encode()) for n in range(max(1, len(found) - 4))
            )
            self._sets[number] = np.unique(np.fromiter(hashes, dtype=np.uint64))
        return self._sets[number]


def tokenize(texts: list[str], tokenizer: str) -> tuple[Array, Array]:
    """Encodes texts; returns ids, uint32[n], and offsets, int64[documents + 1]."""
    ids, offsets = fastokens._native.Tokenizer.from_file(tokenizer).encode_batch_flat(texts, False, True)
    return np.frombuffer(ids, dtype=np.uint32), np.frombuffer(offsets, dtype=np.uint64).astype(np.int64)


def batches(offsets: Array) -> list[tuple[int, int]]:
    """Documents [first, end) of batches of 256k tokens, as in a map task."""
    cuts = np.flatnonzero(np.diff(offsets[:-1] // (1 << 18))) + 1
    return list(pairwise([0, *cuts.tolist(), len(offsets) - 1]))


def headrace(ids: Array, offsets: Array, work: Path, *, classes: Array | None) -> Found:
    """Runs this project's signatures and deduplication tasks, with one run per shard."""
    section = NearSection(ngram=5)

    def compute_bands(ids: Array, offsets: Array) -> Array:
        if classes is not None:
            ids, offsets = words.comparable_tokens(ids, offsets, classes=classes, ngram=section.ngram)
        return minhash.band_hashes(ids, offsets, section=section)

    began = Seconds.now()
    bands = np.concatenate(
        [compute_bands(ids[offsets[a] : offsets[b]], offsets[a : b + 1] - offsets[a]) for a, b in batches(offsets)]
    )
    signatures = Seconds.since(began).cpu
    dropped, labels = run_tasks(bands, work)
    return Found(labels, dropped, {"signatures": signatures, "tasks": Seconds.since(began).cpu - signatures})


def run_tasks(bands: Array, work: Path) -> tuple[Array, Array]:
    """Runs all deduplication tasks; returns dropped and labels. Shard n has the documents n, n + SHARDS, ..."""
    count, runs = len(bands), [work / f"run{n}" for n in range(SHARDS)]
    for n, run in enumerate(runs):
        run.mkdir(parents=True)
        document_tasks.write_dedup_tables(run, rank=np.arange(n, count, SHARDS), bands=bands[n::SHARDS])
    section = DedupSection(exact=False, near=NearSection(bands=bands.shape[1]))
    each = np.full(SHARDS, -(-count // SHARDS))
    near = document_tasks.pairs_tasks(document_tasks.table_plans(section, runs=runs, documents=each, directory=work)[1])
    for task in near:
        task.run(lambda _: None)
    made = components.ComponentsTask((), tuple(t.directory for t in near), tuple(runs), work / "components")
    made.run(lambda _: None)
    dropped, labels = np.zeros(count, dtype=bool), np.arange(count)
    for n in range(SHARDS):
        dropped[n::SHARDS] = np.load(components.drops_path(made.directory, n)) != components.KEEP
    for task in near:
        pairs = np.fromfile(task.directory / PAIRS, dtype="<i8").reshape(-1, 2)
        numbers = (pairs & 0xFFFFFFFF) * SHARDS + (pairs >> 32)
        components.union_pairs(labels, numbers[:, 0], numbers[:, 1])
    return dropped, components.find_roots(labels, np.arange(count))


def write_shards(texts: list[str], work: Path) -> None:
    """Writes the input of datatrove: shards of texts."""
    (work / "shards").mkdir()
    for n in range(SHARDS):
        with (work / "shards" / f"{n:05d}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text, "id": "0"}) + "\n" for text in texts[n::SHARDS])


def peer(python: str, name: str, work: Path) -> Found:
    """Runs datatrove; returns its result in the order of the corpus."""
    subprocess.run(
        [python, Path(__file__).with_name("near_dedup_peers.py"), name, work],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    made = np.load(work / f"{name}.npz")
    count = len(made["labels"])
    order = np.concatenate([np.arange(n, count, SHARDS) for n in range(SHARDS)])
    labels, dropped = np.empty(count, dtype=np.int64), np.empty(count, dtype=bool)
    labels[order], dropped[order] = made["labels"], made["dropped"]
    return Found(labels, dropped, {key: float(made[key]) for key in made if key not in ("labels", "dropped")})


def report_recall(corpus: Corpus, grams: Grams, found: dict[str, Found]) -> None:
    """Prints recall by similarity, and by kind of edit from 0.7 up, where 14 bands of 8 rows find most pairs."""
    truth = np.array([grams.similarity(a, b) for a, b, _ in corpus.plants])
    hits = {name: np.array([f.dropped[a] or f.dropped[b] for a, b, _ in corpus.plants]) for name, f in found.items()}
    theory = 1 - (1 - truth**8) ** 14
    columns = {f"{a} to {b}": (truth >= a) & (truth < b + (b == 1)) for a, b in pairwise(BUCKETS)}
    print_table("recall by similarity", columns, {"1 - (1 - s^8)^14": theory, **hits})
    kinds = np.array([kind for *_, kind in corpus.plants])
    columns = {kind: (kinds == kind) & (truth >= 0.7) for kind in EDITS}
    print_table("recall from 0.7 up, by edit", columns, {"1 - (1 - s^8)^14": theory, **hits})


def print_table(title: str, columns: dict[str, Array], rows: dict[str, Array]) -> None:
    """Prints one row for each of `rows`: the mean of its values over each column's selection."""
    print()
    print_head(title, *(f"{name} ({int(chosen.sum())})" for name, chosen in columns.items()))
    for name, values in rows.items():
        print_row(name, *(f"{values[c].mean() if c.any() else 0:.3f}" for c in columns.values()))


def report_cost(corpus: Corpus, grams: Grams, found: dict[str, Found], *, tokens: int) -> None:
    """Prints precision and speed."""
    print(f"\n{len(corpus.texts)} documents, {corpus.megabytes:.1f} MB, {tokens / 1e6:.1f}M tokens\n")
    print_head("implementation", "dropped", "precision", "signatures, MB/s", "total, MB/s", "CPU seconds")
    for name, f in found.items():
        signatures, total = (corpus.megabytes / each for each in (f.seconds["signatures"], sum(f.seconds.values())))
        seconds = ", ".join(f"{stage} {took:.2f}" for stage, took in f.seconds.items())
        print_row(name, f.dropped.sum(), f"{precision(f, grams):.4f}", f"{signatures:.1f}", f"{total:.1f}", seconds)


def precision(found: Found, grams: Grams) -> float:
    """The share of dropped documents that are similar to another document of their component."""
    members = defaultdict(list)
    for number, label in enumerate(found.labels.tolist()):
        members[label].append(number)
    dropped = np.flatnonzero(found.dropped).tolist()
    return float(np.mean([_has_similar(d, members[found.labels[d]], grams) for d in dropped]))


def _has_similar(document: int, component: list[int], grams: Grams) -> bool:
    return any(grams.similarity(document, other) >= SIMILAR for other in component if other != document)


if __name__ == "__main__":
    main()
