"""Benchmark of object stores behind latency: tokens through the cache, and pauses of checkpoints, against local ones.

    python -m benchmarks.storage [--latency 0 10 100] [--steps 60] [--step 0.3] [--work DIRECTORY]

An S3 server on this machine (moto) answers every request late by the given milliseconds. The same loader (`StepLoader`)
reads the same steps from local files, from the store without a cache, and through the cache; a step lasts `--step`
seconds, in which the loop sleeps as a host does while a device computes. Then the same run writes its checkpoints to a
directory, and to the store. All on one machine at one time, the store included: on two cores it takes its share.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, median
from typing import Any

from headrace.base.remote_directory import CACHE, publish
from headrace.base.section import parse
from pipeline.config.batch import BatchSizes
from pipeline.config.sections.data import DataSection
from pipeline.data.loader import StepLoader
from pipeline.data.mixture import open_mixture
from pipeline.data.read_ahead import ReadAhead
from pipeline.data.span_cache import SpanCache
from pipeline.runtime.metrics.journal import read_rows
from tests.conftest import tiny_config, write_config
from tests.data.sparse import TOKENIZER

STORE = "benchmark"
LENGTH, SAMPLES = 1024, 16
SERVER = """
import sys, time, threading
from tests.object_store import s3_server
def between(app):
    def answer(environ, start_response):
        time.sleep(float(sys.argv[1]) / 1e3)
        return app(environ, start_response)
    return answer
with s3_server(sys.argv[2], between=between):
    import os
    print(os.environ["AWS_ENDPOINT_URL"], flush=True)
    sys.stdin.read()
"""
