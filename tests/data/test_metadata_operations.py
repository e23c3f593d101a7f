"""How often a rank asks the file system about shards: one rank looks at all of them, the others at those they read."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from foundation.errors import DataError
from pipeline.data.dataset import TokenDataset
from tests.conftest import ROOT, tiny_config, write_config
from tests.data.sparse import write_sparse
from tests.support import output_of

SHARDS = 300
strace = pytest.mark.skipif(shutil.which("strace") is None, reason="counts system calls with strace")


def asked(command: Sequence[str], directory: Path, log: Path, **env: str) -> int:
    """System calls of a command that name a shard in a directory: open, stat and so on."""
    traced = ["strace", "-f", "-e", "trace=%file", "-o", str(log), *command]
    output_of(subprocess.run(traced, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, check=False))
    return len(re.findall(rf'"{re.escape(str(directory))}/[a-z]+/shard-', log.read_text()))


FIRST_BATCH = """
import sys
import numpy as np
from pipeline.config.sections.data import DataSection, SourceSection
from pipeline.data.mixture import open_mixture
data = DataSection(sources=(SourceSection(path=sys.argv[1]),), sequence_length=32)
mixture = open_mixture(data, seed=5, stat_files=sys.argv[2] == "0")
print(mixture.read(np.arange(8)).shape)
"""


@strace
@pytest.mark.parametrize("rank", [0, 1])
def test_a_first_batch_opens_no_more_shards_than_it_has_samples(tmp_path: Path, rank: int) -> None:
    directory = write_sparse(tmp_path / "many", shards=SHARDS, tokens=5000, documents=10)
    command = [sys.executable, "-c", FIRST_BATCH, str(directory), str(rank)]
    looked_at = 2 * SHARDS if rank == 0 else 0  # .bin and .idx
    assert looked_at < asked(command, directory, tmp_path / "log") <= looked_at + 2 * 8


PREPARE = """
import sys
from pipeline.config.load import load_config
from pipeline.config.rules.resolve import resolve
from pipeline.run.prepare import prepare
prepare(resolve(load_config(sys.argv[1]), world_size=2))
"""


@strace
@pytest.mark.integration
@pytest.mark.sweep
def test_of_the_ranks_of_a_run_the_first_alone_looks_at_all_shards(tokens: Path, tmp_path: Path) -> None:
    path = write_config(tmp_path / "c.json", tiny_config(tokens, tmp_path / "run", engine="torch"))
    shards = len(list(tokens.glob("*/shard-*")))
    assert shards > 2
    command = [sys.executable, "-c", PREPARE, str(path)]
    given = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999", "TORCHELASTIC_RUN_ID": "x"}
    first, second = (
        asked(command, tokens, tmp_path / "log", RANK=str(rank), LOCAL_RANK=str(rank), **given) for rank in (0, 1)
    )
    assert first == shards
    assert second == 0


def test_a_shard_that_nobody_looked_at_is_refused_when_it_is_read(tmp_path: Path) -> None:
    directory = write_sparse(tmp_path / "few", shards=3, tokens=5000, documents=10)
    os.truncate(directory / "train/shard-00001.bin", 4000)
    with pytest.raises(DataError, match=r"shard-00001\.bin has 4000 bytes"):
        TokenDataset.open(directory, split="train", sequence_length=32)
    dataset = TokenDataset.open(directory, split="train", sequence_length=32, stat_files=False)
    dataset.read(np.arange(3))
    with pytest.raises(DataError, match="shard-00001"):
        dataset.read([dataset.windows // 2])
