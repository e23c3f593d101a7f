"""`python -m pipeline.run.uploads`: the process that rank 0 starts; it ends when its input is closed, with rank 0.

It reads words from its standard input: `backlog` (report when everything is uploaded), `end` (upload small files and
end). It writes events to its standard output, one JSON object per line.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

from foundation.lease import Lease, LeaseLostError
from foundation.processes import die_with_parent
from pipeline.run.uploads.uploader import Uploader, UploadTerms

_WRITING = threading.Lock()


def main() -> int:
    """Uploads until it is told to end; the first input line has the arguments."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # all processes of a job get these signals, but rank 0 decides
    die_with_parent()  # the next start itself uploads the backlog
    given = json.loads(sys.stdin.readline())
    uploader = Uploader(
        given["url"],
        Path(given["run_dir"]),
        lease=Lease(**given["lease"]),
        terms=UploadTerms(given["keep"], given["keep_every"]),
        tell=_tell,
    )
    threading.Thread(target=_listen, args=(uploader,), daemon=True).start()
    os.nice(5)
    try:
        uploader.run()
    except LeaseLostError as error:
        _tell({"event": "lease_lost", "why": str(error).splitlines()[0]})
    return 0


def _listen(uploader: Uploader) -> None:
    for line in sys.stdin:
        uploader.ending = "now" if line.strip() == "end" else "backlog"
    if uploader.ending != "now":  # rank 0 has ended, on a system without a parent-death signal
        os._exit(1)


def _tell(event: dict[str, object]) -> None:
    with _WRITING:
        print(json.dumps(event), flush=True)


if __name__ == "__main__":
    sys.exit(main())
