"""The tables of a run of `benchmarks/gpu.py`, which are appended to docs/performance.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

NOT_RUN = "not yet run"


def section(result: dict[str, Any]) -> str:
    """Formats a run as Markdown: machine and versions, tests, speed."""
    return "\n".join([f"### {title(result)}", "", *_machine(result), *_tests(result), *_speed(result)])


def title(result: dict[str, Any]) -> str:
    """Heading of a run."""
    machine = result["machine"]
    what = ", a CPU run of tiny sizes: its speed says nothing" if result["tiny"] else ""
    return f"{result['date']}: {machine.get('device', 'unknown device')}, torch {machine.get('torch', 'unknown')}{what}"


def append(page: Path, result: dict[str, Any]) -> None:
    """Appends a run, and links to it from the rows that it answers."""
    text = page.read_text().rstrip() + "\n\n" + section(result) + "\n"
    for key in answered(result):
        text = re.sub(rf"(?m)^(\| `{re.escape(key)}` \|.*\| )[^|]+\|$", rf"\g<1>run of {result['date']} |", text)
    page.write_text(text)


def answered(result: dict[str, Any]) -> list[str]:
    """Keys that a run answers: measured rows, files whose GPU tests passed, the order of backends."""
    if result["tiny"]:
        return []
    measured = [row["name"] for row in result["rows"] if "median_s" in row]
    outcomes: dict[str, set[str]] = {}
    for test in result.get("tests", {}).get("tests", []):
        outcomes.setdefault(test["name"].split("::")[0], set()).add(test["outcome"])
    passed = [file for file, found in outcomes.items() if "passed" in found and "failed" not in found]
    backends = ["sdpa-order"] if result["machine"].get("memory_bytes") else []
    return [*measured, *passed, *backends]


def _machine(result: dict[str, Any]) -> list[str]:
    machine = result["machine"]
    if "reason" in machine:
        return [f"The environment was not read: {machine['reason']}.", ""]
    names = ("driver", "cuda", "cudnn", "nccl", "python", "system", "cpu_cores")
    facts = [f"{name} {machine[name]}" for name in names if machine.get(name)]
    facts += [f"{name} {version}" for name, version in machine["packages"].items() if version]
    lines = [f"{', '.join(facts)}."]
    if machine["memory_bytes"]:
        lines.append(f"Memory of the device: {gib(machine['memory_bytes'])} GiB.")
    times = sorted(machine["sdpa_ms"].items(), key=lambda item: (isinstance(item[1], str), item[1]))
    order = ", ".join(f"{name} {ms:.2f}" if isinstance(ms, float) else f"{name} does not run" for name, ms in times)
    lines.append(f"Causal attention with gradients, milliseconds by backend: {order}.")
    if machine.get("sdpa_order"):
        lines.append(f"The order of a run (`pipeline/models/sdpa_order.py`): {machine['sdpa_order']}.")
    lacks = [f"`{name}` ({use})" for name, use in machine["torch_lacks"].items()]
    lines += [f"This torch lacks {', '.join(lacks)}."] if lacks else []
    missing = [f"{name} ({use})" for name, use in result["missing"].items()]
    lines += [f"Missing packages, and what is skipped because of them: {', '.join(missing)}."] if missing else []
    return [*lines, ""]


def _tests(result: dict[str, Any]) -> list[str]:
    if "tests" not in result:
        return []
    tests = result["tests"]
    counts = f"{tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped"
    lines = [f"GPU tests: {counts}; {tests['ended']}.", ""]
    others: dict[tuple[str, str, str], int] = {}
    for each in tests["tests"]:
        if each["outcome"] != "passed":
            # cases of one test with the same reason share a line
            key = (each["name"].split("[")[0], each["outcome"], cell(each["reason"].removeprefix("Skipped: ")))
            others[key] = others.get(key, 0) + 1
    if others:
        lines += ["| test | outcome | cases | reason |", "|---|---|---|---|"]
        lines += [f"| `{name}` | {outcome} | {count} | {why} |" for (name, outcome, why), count in others.items()] + [
            ""
        ]
    return lines


def _speed(result: dict[str, Any]) -> list[str]:
    if not result["rows"]:
        return []
    lines = [
        "| row | batch x tokens | micro-batch; activation checkpointing | s per step | tokens/s | MFU, 6N + 12Lhs"
        " | MFU, 6N + 6Lhs | peak memory GiB | mean loss |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        if "median_s" not in row:
            lines.append(f"| {row['title']} | not measured: {cell(row['reason'])} | | | | | | | |")
            continue
        cells = [
            row["title"],
            f"{row['samples']} x {row['sequence']}",
            f"{row['micro_batch']}; {row['activation_checkpointing']}",
            f"{row['median_s']:.3f}",
            f"{row['tokens_per_s']:,.0f}",
            percent(row["mfu"]),
            percent(row["mfu_causal"]),
            gib(row["peak_allocated_bytes"]),
            f"{row['mean_loss']:.3f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", *_ratios(result["rows"])]


def _ratios(rows: list[dict[str, Any]]) -> list[str]:
    """Tokens/s of our fastest row of a size against the Trainer's fastest."""
    measured = [row for row in rows if "median_s" in row]
    lines = []
    for size in dict.fromkeys(row["name"].split("-")[0] for row in measured):
        own, peer = [], []
        for row in measured:
            if row["name"].startswith(f"{size}-"):
                (peer if "-trainer-" in row["name"] else own).append(row)
        if own and peer:
            best, theirs = (max(each, key=lambda row: row["tokens_per_s"]) for each in (own, peer))
            ratio = best["tokens_per_s"] / theirs["tokens_per_s"]
            lines += [f"`{best['name']}` makes {ratio:.2f} times the tokens/s of `{theirs['name']}`.", ""]
    return lines


def gib(count: int | None) -> str:
    """Bytes as GiB."""
    return "-" if count is None else f"{count / 2**30:.1f}"


def percent(share: float | None) -> str:
    """A share as a percentage."""
    return "-" if share is None else f"{100 * share:.1f} %"


def cell(text: str) -> str:
    """Text for a cell of a table."""
    return text.replace("|", "/").replace("\n", " ") or "-"
