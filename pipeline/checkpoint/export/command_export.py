"""`python -m pipeline export RUN OUT`, and `python -m pipeline checkpoint export RUN OUT`."""

from __future__ import annotations

import argparse
from pathlib import Path

from foundation.directory import commit, parent_entry, staged
from foundation.errors import ConfigError, DataError
from foundation.paths import FOLDER, LOCAL, OUTPUT, RUN
from pipeline.models.card.facts import load_facts
from pipeline.models.split_names import Conversion


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of an export."""
    parser.add_argument("run", metavar="RUN", type=RUN, help="a run directory, or one of its checkpoints")
    parser.add_argument("out", metavar="OUT", type=OUTPUT, help="the folder to write")
    text = (
        "huggingface (the default): the model; dcp: a checkpoint of torch.distributed.checkpoint with optimizer state;"
        " universal: a universal checkpoint of DeepSpeed; megatron: a distributed checkpoint of Megatron-core"
    )
    parser.add_argument(
        "--format", choices=("huggingface", "dcp", "universal", "megatron"), default="huggingface", help=text
    )
    parser.add_argument("--dtype", choices=("bf16", "fp32"), help="dtype of the written weights (default: as trained)")
    parser.add_argument(
        "--tokenizer", metavar="FOLDER", type=FOLDER, help="tokenizer folder (default: that of the run's dataset)"
    )
    text = "JSON or YAML file of facts (license, provider, ...): headrace schema card"
    parser.add_argument("--facts", metavar="FILE", type=LOCAL, help=text)
    text = (
        "folder of the starting model's tensors that were not trained, if it has moved, or drop (model.extra_weights)"
    )
    parser.add_argument("--extra-weights", metavar="FOLDER", type=FOLDER, help=text)
    parser.add_argument("--ema", action="store_true", help="write the EMA of the weights (run.ema)")
    parser.add_argument("--replace", action="store_true", help="replace OUT when it exists")


def run(arguments: argparse.Namespace) -> int:
    """Exports, and prints what was written."""
    out = Path(arguments.out)
    if out.exists() and not arguments.replace:
        raise DataError(f"{out} exists already\n  try: another folder, or --replace")
    if arguments.format != "huggingface":
        return _write_state(arguments, out)
    facts = load_facts(arguments.facts) if arguments.facts else None
    import torch  # noqa: PLC0415
    from rich.progress import Progress  # noqa: PLC0415  with torch below: seconds of import

    from pipeline.checkpoint.export.export import export  # noqa: PLC0415
    from pipeline.checkpoint.export.find import find_checkpoint  # noqa: PLC0415

    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32, None: None}
    tokenizer = Path(arguments.tokenizer) if arguments.tokenizer else None
    with Progress(transient=True) as progress:
        task = progress.add_task("writing tensors", total=None)
        manifest = export(
            find_checkpoint(Path(arguments.run)),
            out,
            dtype=dtypes[arguments.dtype],
            tokenizer=tokenizer,
            facts=facts,
            extra=arguments.extra_weights,
            ema=arguments.ema,
            replace=arguments.replace,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    details = manifest.details
    print(
        f"{out}: {details['parameters']:,} parameters, {details['dtype']}, step {details['step']};"
        f" largest logit difference to the trained model {details['largest_logit_difference']:.2g}"
    )
    if "extra_weights" in details:
        found = details["extra_weights"]
        print(f"{found['tensors']} tensors as they were before the training: {', '.join(found['first'])}")
    print(f"tokenizer: {Conversion(**_named(details['tokenizer'])).text}; model card: {out / 'README.md'}")
    return 0


def _write_state(arguments: argparse.Namespace, out: Path) -> int:
    """Writes weights and optimizer states for another trainer."""
    for name in ("dtype", "tokenizer", "facts", "extra_weights", "ema"):
        if getattr(arguments, name) not in (None, False):
            why = f"--format {arguments.format} writes the state as it is trained, in fp32"
            raise ConfigError(f"--{name.replace('_', '-')}", getattr(arguments, name), why=why, remedy="leave it out")
    from rich.progress import DownloadColumn, Progress  # noqa: PLC0415

    from pipeline.checkpoint.export.dcp_folder import write_dcp  # noqa: PLC0415  with torch: seconds of import
    from pipeline.checkpoint.export.find import find_checkpoint  # noqa: PLC0415
    from pipeline.checkpoint.export.megatron_folder import write_megatron  # noqa: PLC0415
    from pipeline.checkpoint.export.trained_state import TrainedState  # noqa: PLC0415
    from pipeline.checkpoint.export.universal import write_universal  # noqa: PLC0415

    checkpoint = find_checkpoint(Path(arguments.run))
    state = TrainedState(checkpoint)
    write = {"dcp": write_dcp, "universal": write_universal, "megatron": write_megatron}[arguments.format]
    with staged(out) as staging, Progress(*Progress.get_default_columns(), DownloadColumn(), transient=True) as bar:
        task = bar.add_task("writing tensors", total=None)
        write(state, staging, lambda done, total: bar.update(task, completed=done, total=total))
        manifest = commit(
            staging,
            out,
            kind=arguments.format,
            config={"format": arguments.format},
            parents={"checkpoint": parent_entry(checkpoint.path, checkpoint.manifest.fingerprint)},
            details={"step": state.step, "samples": state.samples},
            replace=arguments.replace,
        )
    if (extra := checkpoint.manifest.details.get("extra_weights")) is not None:
        print(f"not in it: {extra['tensors']} tensors of the starting model ({', '.join(extra['first'])})")
    print(f"{out}: {arguments.format}, {len(state.names)} weights with exp_avg and exp_avg_sq, step {state.step:,},")
    print(f"  {manifest.bytes / 1e9:,.3f} GB; not in it: the position in the data ({state.samples:,} samples)")
    return 0


def _named(tokenizer: dict[str, str | None]) -> dict[str, str | None]:
    return {"name": tokenizer["llama_cpp"], "why": tokenizer["why"]}
