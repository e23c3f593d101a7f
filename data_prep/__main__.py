"""`python -m data_prep --config corpus.json`: the command line that turns a text corpus into a tokens directory."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from foundation.cli import add_config_arguments
from foundation.command_line import Parser, add_verbs, execute
from foundation.errors import ConfigError, DataError
from foundation.paths import LOCAL, PLACE, is_store_url
from foundation.remote_directory import CACHE
from foundation.verbs import Run, Verb

if TYPE_CHECKING:  # the phases import numpy and pyarrow, for which --help does not wait
    from data_prep.config.corpus import CorpusConfig
    from data_prep.job.prepare import InspectedJob
    from data_prep.job.progress import Display
    from data_prep.sources.units import Plan
    from foundation.directory import Manifest

INDEX = "JOB_COMPLETION_INDEX"
"""Environment variable with the number of a pod in an indexed Job of Kubernetes."""
_TEXT = "Turns a corpus into a tokens directory: reads, splits, tokenizes, shards, checksums. A stopped job resumes."
_EPILOG = """\
Without a command, the whole job is run, as by 'run'. Shares of a scheduler: a phase runs every task t with t % N == I.

exit codes: 0 done, 2 error (the message says why and what to do), 76 a worker was killed, 130 interrupted
"""


def main(arguments: list[str] | None = None) -> int:
    """Parses the command line and runs the command; returns the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    return execute(words, prog="python -m data_prep", declare=add_arguments, description=_TEXT, config="corpus")


def add_arguments(parser: Parser) -> None:
    """Declares the commands, and the options of the whole job for use without a command."""
    parser.epilog = _EPILOG
    add_verbs(parser, COMMANDS, metavar="COMMAND")
    if parser.active is parser:
        _add_options(parser, "run")
        parser.set_defaults(_run=run)


def _add_options(parser: argparse.ArgumentParser, name: str) -> None:
    if name == "pack":
        from data_prep.packing import pack  # noqa: PLC0415

        pack.add_arguments(parser)
        return
    if name in ("verify", "stats"):
        parser.add_argument("directory", metavar="TOKENS", type=PLACE, help="a tokens directory, or its URL")
        if name == "stats":
            parser.add_argument(
                "--html", type=LOCAL.as_path(), metavar="FILE", help="write the statistics as an HTML page instead"
            )
        return
    if name == "clean":
        parser.add_argument("url", metavar="URL", help="an output in an object store, e.g. s3://bucket/tokens")
        parser.add_argument("--dry-run", action="store_true", help="print what would be deleted, and delete nothing")
        return
    if name == "phase":
        parser.add_argument("phase", metavar="NAME", help="phase to run: map, reduce, ...")
        parser.add_argument("--task", type=int, required=True, metavar="I", help="which share to run, from 0 to N - 1")
        parser.add_argument("--of", type=int, required=True, metavar="N", help="how many shares there are")
    if name == "share":
        index = os.environ.get(INDEX, "")
        given = {"default": int(index)} if index.isdecimal() else {"required": True}
        text = f"which share to run, from 0 to N - 1; default: {INDEX}, which Kubernetes sets in indexed Jobs"
        parser.add_argument("--task", type=int, metavar="I", help=text, **given)
        parser.add_argument("--of", type=int, required=True, metavar="N", help="how many shares there are")
    add_config_arguments(parser)
    if name in ("run", "phase", "plan", "share"):
        default = (
            "1"
            if name in ("phase", "share")
            else "local: the available cores; cluster: all cores; slurm: 8 jobs per phase"
        )
        parser.add_argument("--workers", type=int, metavar="N", help=f"concurrent tasks (default: {default})")
    if name == "run":
        names = ("local", "slurm", "ray", "spark")
        parser.add_argument("--executor", choices=names, default="local", help="what runs the tasks (default: local)")
        parser.add_argument(
            "--address", metavar="URL", help="address of a Ray cluster (HOST:6379, auto) or of a Spark master"
        )


def run(args: argparse.Namespace) -> None:
    """Runs the whole job, or resumes it."""
    if args.executor == "slurm":
        return _submit(args)
    if args.executor == "local":
        from data_prep.executors import local  # noqa: PLC0415

        local.start_fork_server()  # its imports overlap with this process's
    from data_prep.executors import choose  # noqa: PLC0415
    from data_prep.job import phases, prepare  # noqa: PLC0415

    inspected = prepare.inspect(_config(args, hosts=args.executor != "local"))
    options = {"root": inspected.job.root, "workers": _workers(args), "address": args.address}
    if prepare.output_is_complete(inspected):
        return _print_exists(inspected.job.config.output)
    with choose.open_executor(args.executor, **options) as executor, prepare.open_job(inspected, executor) as plan:
        _print_plan(plan, inspected)
        displays = phases.run_phases(inspected.job, executor)
        manifest = phases.commit_output(inspected.job, tokenizer=inspected.identity["tokenizer"])
    _print_summary(inspected.job.config.output, manifest)
    return _print_rate(displays[0])


def _submit(args: argparse.Namespace) -> None:
    from data_prep.job import slurm  # noqa: PLC0415

    config = _config(args, hosts=True)
    if _output_exists(config):
        return _print_exists(config.output)
    if args.address is not None:
        raise ConfigError("--address", args.address, why="--executor slurm takes no address", remedy="leave it out")
    print(slurm.submit(config, file=args.config, overrides=args.overrides, shares=_workers(args)))
    return None


def _plan(args: argparse.Namespace) -> None:
    from data_prep.executors.base import default_workers  # noqa: PLC0415
    from data_prep.job import prepare  # noqa: PLC0415
    from data_prep.job.estimate import Estimate, estimate_or_reason  # noqa: PLC0415
    from data_prep.job.stats import long_word_lines  # noqa: PLC0415

    inspected = prepare.inspect(_config(args))
    plan = inspected.plan_map_tasks()
    _print_plan(plan, inspected)
    found = estimate_or_reason(inspected.job.config, plan)
    if not isinstance(found, Estimate):
        return print(found)
    workers = _workers(args) or default_workers()
    dedup = inspected.job.config.dedup is not None
    print(f"about {_rounded(found.tokens)} tokens" + " before deduplication" * dedup)
    speed = f"at {found.mb_per_s:.1f} MB/s each,"
    if found.training_s:
        stored = inspected.job.trained_tokenizers
        unless = f" (unless {stored} has it)" if stored.is_dir() else ""
        print(f"about {_duration(found.training_s)} to train the tokenizer{unless}, then")
    print(f"about {_duration(found.map_seconds(workers))} on {workers} workers {speed}")
    if found.training_s:
        print(f"together about {_duration(found.seconds(workers))}:")
    left = "start-up, writing the shards" + " and deduplication" * dedup
    print(f"measured just now on a few megabytes of every source; {left} are not included")
    for drop in found.drops:
        print(drop.line())
    return print(*long_word_lines(list(found.long_words)), sep="\n", end="\n" if found.long_words else "")


def _status(args: argparse.Namespace) -> None:
    from data_prep.job import status  # noqa: PLC0415

    for line in status.report(_config(args)):
        print(line)


def _prepare(args: argparse.Namespace) -> None:
    from data_prep.job import prepare  # noqa: PLC0415

    inspected = prepare.inspect(_config(args, hosts=True))
    if prepare.output_is_complete(inspected):
        return _print_exists(inspected.job.config.output)
    with prepare.open_job(inspected) as plan:
        return _print_plan(plan, inspected)


def _phase(args: argparse.Namespace) -> None:
    from data_prep.executors.local import LocalExecutor  # noqa: PLC0415
    from data_prep.job import phases  # noqa: PLC0415

    _check_share(args)
    config = _config(args, hosts=True)
    if _output_exists(config):
        return _print_exists(config.output)
    with LocalExecutor(_workers(args) or 1) as executor:
        count, display = phases.run_share(config, args.phase, executor, share=(args.task, args.of))
    print(f"share {args.task} of {args.of}: {count} {args.phase} tasks finished")
    return _print_rate(display)


def _share(args: argparse.Namespace) -> None:
    from data_prep.executors.local import LocalExecutor  # noqa: PLC0415
    from data_prep.job import share  # noqa: PLC0415

    _check_share(args)
    config = _config(args, hosts=True)
    with LocalExecutor(_workers(args) or 1) as executor:
        manifest = share.run_whole_share(config, executor, share=(args.task, args.of))
    if manifest is None:
        return print(f"share {args.task} of {args.of}: finished; share 0 commits {config.output}")
    return _print_summary(config.output, manifest)


def _check_share(args: argparse.Namespace) -> None:
    if not 0 <= args.task < args.of:
        remedy = f"--task from 0 to {args.of - 1}" if args.of > 0 else "--of 1 or more"
        raise ConfigError("--task", args.task, why=f"there are {args.of} shares, counted from 0", remedy=remedy)


def _finish(args: argparse.Namespace) -> None:
    from data_prep.job import phases  # noqa: PLC0415

    config = _config(args, hosts=True)
    if _output_exists(config):
        return _print_exists(config.output)
    return _print_summary(config.output, phases.commit_prepared_job(config))


def _verify(args: argparse.Namespace) -> None:
    from foundation.directory import verify  # noqa: PLC0415
    from foundation.remote_directory import manifest_of, verify_remote  # noqa: PLC0415

    packings = [] if is_store_url(args.directory) else sorted(Path(args.directory).glob("packed-*/"))
    for directory, kind in [(args.directory, "tokens"), *((str(packing), "packing") for packing in packings)]:
        manifest = manifest_of(directory, kind=kind)
        found = verify_remote(directory, manifest) if is_store_url(directory) else verify(Path(directory), manifest)
        bad = [name for name, good in found if not good]
        if bad:
            listed = "".join(f"\n  {directory}/{name}" for name in bad)
            why = f"{len(bad)} of {len(manifest.files)} files are missing or differ from the manifest"
            raise DataError(f"{why}:{listed}\n  try: make the directory again")
        print(f"{directory}: all {len(manifest.files)} files match their checksums")


def _stats(args: argparse.Namespace) -> None:
    from data_prep.job import stats  # noqa: PLC0415

    found = stats.read_stats(args.directory)
    if args.html is not None:
        args.html.write_text(stats.html_page(Path(args.directory), *found), encoding="utf-8")
        return print(f"{args.html} written")
    return stats.print_stats(*found)


def _clean(args: argparse.Namespace) -> None:
    from data_prep.job import uploads  # noqa: PLC0415

    url = args.url.rstrip("/")
    if not is_store_url(url):
        why = "a job that writes to a disk leaves only its job directory, .NAME.job, beside the output"
        raise ConfigError("URL", url, why=why, remedy="rm -r .NAME.job, or start the job again, which resumes it")
    found = uploads.leftovers(url)
    size = sum(stat.bytes for stat in found.objects.values())
    for name in found.objects:
        print(f"{url}/{name}")
    if not args.dry_run:
        uploads.clean(url, found)
    if not found.objects:
        return print(f"no job has left anything in {url}{', which is finished' if found.finished else ''}")
    what = f"{len(found.objects)} objects, {size / 1e9:,.3f} GB, of the job in {found.claim}"
    return print(f"would delete {what}" if args.dry_run else f"deleted {what}")


def _pack(args: argparse.Namespace) -> None:
    from data_prep.packing import pack  # noqa: PLC0415

    pack.run(args)


def _command(name: str, run: Run, text: str, heading: str) -> Verb:
    return Verb(name, text, heading, functions=(lambda parser: _add_options(parser, name), run), config="corpus")


_JOB, _OUTPUT, _SHARES = "A job", "A tokens directory", "Shares of a job, for batch schedulers"
COMMANDS = (
    _command("run", run, "run the whole job, or resume it; the same as without a command", _JOB),
    _command("plan", _plan, "print the tasks, bytes, and an estimate of the time", _JOB),
    _command("status", _status, "print the progress of a job; from any machine that sees its directory", _JOB),
    _command("stats", _stats, "print documents, tokens, lengths and dropped records, by source", _OUTPUT),
    _command("verify", _verify, "compare all checksums of a tokens directory", _OUTPUT),
    _command("pack", _pack, "pack whole documents into samples of a fixed length", _OUTPUT),
    _command("clean", _clean, "delete what an abandoned job has uploaded of an output in an object store", _OUTPUT),
    _command("prepare", _prepare, "check the input, plan the map tasks, make the tokenizer", _SHARES),
    _command("phase", _phase, "run one share of the tasks of a phase", _SHARES),
    _command("finish", _finish, "commit the output when all phases have finished", _SHARES),
    _command("share", _share, "run one share of every phase beside the others, as in an indexed Job", _SHARES),
)


def _config(args: argparse.Namespace, *, hosts: bool = False) -> CorpusConfig:
    """Loads the given config; `hosts`: whether processes of several hosts may work on the job."""
    from data_prep.config.corpus import load  # noqa: PLC0415

    config = load(args.config, args.overrides)
    if hosts and is_store_url(config.output) and CACHE not in os.environ:
        why = f"the job works in a directory that all hosts have to share, and {CACHE} does not name one"
        raise ConfigError("output", config.output, why=why, remedy=f"export {CACHE}=/shared/DIRECTORY on all hosts")
    return config


def _output_exists(config: CorpusConfig) -> bool:
    """Whether the output is complete, for commands that check no inputs (a scheduler reruns a finished job)."""
    from data_prep.job import prepare  # noqa: PLC0415
    from data_prep.job.directory import Job  # noqa: PLC0415

    return Job(config).has_output and prepare.output_is_complete(prepare.inspect(config))


def _workers(args: argparse.Namespace) -> int | None:
    if args.workers is not None and args.workers < 1:
        raise ConfigError("--workers", args.workers, why="must be positive", remedy="1 or more")
    workers: int | None = args.workers
    return workers


def _duration(seconds: float) -> str:
    """A duration with as many digits as an estimate can have: 7 s, 85 s, 4 min, 25 min, 2.5 h, 31 h, 4 days."""
    if seconds < 120:
        return f"{max(1, round(seconds))} s" if seconds < 10 else f"{5 * round(seconds / 5)} s"
    if seconds < 7200:
        minutes = seconds / 60
        return f"{round(minutes) if minutes < 10 else 5 * round(minutes / 5)} min"
    hours = seconds / 3600
    if hours < 72:
        return f"{hours:.1f} h" if hours < 10 else f"{hours:.0f} h"
    return f"{hours / 24:.0f} days"


def _rounded(count: int) -> str:
    """A number rounded to two digits, the precision of an estimate."""
    return f"{int(float(f'{count:.1e}')):,}"


def _print_plan(plan: Plan, inspected: InspectedJob) -> None:
    from data_prep.sources.listing import left_out_line  # noqa: PLC0415

    files = {(unit.source, unit.file) for task in plan for unit in task}
    size = sum(unit.end - unit.start for task in plan for unit in task)
    print(f"{len(files):,} files, {size / 1e6:,.1f} MB as stored, {len(plan):,} map tasks")
    lines = [left_out_line(source) for source in inspected.sources if source is not None]
    print("".join(f"{line}\n" for line in lines if line), end="", flush=True)


def _print_exists(output: str) -> None:
    print(f"{output} exists already, made with this config from files of these names and sizes; nothing to do")
    print(f"(the input was not read again; to check the output: headrace prep verify {output})")


def _print_summary(output: str, manifest: Manifest) -> None:
    for split, entry in manifest.details["splits"].items():
        ratio = entry["bytes"] / max(1, entry["tokens"])
        counts = f"{entry['documents']:,} documents, {entry['tokens']:,} tokens, {ratio:.3f} bytes/token"
        print(f"{split:>8}: {counts}, {len(entry['shards'])} shards")
    skipped = manifest.details["skipped"]
    print(f" skipped: {', '.join(f'{n:,} {reason}' for reason, n in skipped.items()) or 'nothing'}")
    sizes = manifest.details.get("dropped_bytes", {})
    for reason, count in sorted(manifest.details.get("dropped", {}).items(), key=lambda item: -item[1]):
        size = f", {sizes[reason] / 1e6:,.2f} MB" if reason in sizes else ""
        print(f" dropped: {count:,} {reason}{size}")
    fields = (f"{count:,} {name}" for name, count in manifest.details.get("unprinted", {}).items())
    if lost := ", ".join(fields):
        print(f"    lost: {lost} (messages with a field that the chat template does not print)")
    print(f"  output: {output}, fingerprint {manifest.fingerprint[:16]}")


def _print_rate(display: Display) -> None:
    if display.counts.text_bytes:
        text = f"{display.counts.text_bytes / 1e6:,.2f} MB of text in {display.seconds():.1f} s"
        print(f"{display.phase:>8}: {text}, {display.mb_per_s():.2f} MB/s (of this run, with the start of workers)")


if __name__ == "__main__":
    code = main()
    gc.freeze()  # otherwise the final garbage collection scans all imported modules, which takes a tenth of a second
    sys.exit(code)
