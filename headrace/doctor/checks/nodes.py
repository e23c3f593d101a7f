"""Check of nodes by `pipeline.cluster.node_checks`: memory, disks, ECC and Xid errors, device, links and clocks."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.doctor.check import Context, Finding
from pipeline.cluster.node_checks.__main__ import NodeChecks
from pipeline.cluster.node_checks.decide import QUICK
from pipeline.cluster.node_checks.records import read_records
from pipeline.config.load import load_config
from pipeline.config.sections.node_checks import NodeChecksSection

_SLOW = "a training would be slow, stop or hang on this node"
_ATTEMPT = "doctor"
_RESERVE_S = 20.0
"""Seconds of the limit that are left for the start of the process and for the verdict."""


def run(context: Context) -> Iterator[Finding]:
    """Makes the checks of this node and of its links; problems of several nodes are reported by the first."""
    config = None if context.config is None else load_config(context.config, context.overrides)
    terms = NodeChecksSection() if config is None else config.launch.node_checks
    terms = terms.model_copy(update={"timeout": min(terms.timeout, context.limit_s - _RESERVE_S)})
    run_dir = context.work if config is None else config.run.local_dir
    verdict = NodeChecks(context.node, dict(context.nodes), context.work, run_dir, _ATTEMPT, terms).run()
    problems = list(verdict.bad.get(context.node, ()))
    if context.node == next(iter(context.nodes)):
        problems += [*(f"every node: {each}" for each in verdict.common), *verdict.warnings]
    for problem in problems:
        failed = not problem.endswith(QUICK)  # the bandwidth of ranks is measured later
        advice = (_SLOW, "mend or leave out the node; docs/how-to/bad-nodes.md") if failed else ()
        yield Finding(False if failed else None, problem, *advice)
    record = read_records(context.work, [context.node], attempt=_ATTEMPT)[context.node]
    for name, why in record.skipped.items():
        yield Finding(None, f"{name}: {why}")
    if all(problem.endswith(QUICK) for problem in problems):
        links = [link.mb_s for link in record.links if link.mb_s is not None]
        slowest = {"slowest_link_mb_per_s": min(links)} if links else {}
        yield Finding(True, "the node passes all other node checks", figures={**record.facts, **slowest})
