"""Finds a machine by the name of its file, by the file's path, or by torch's name for the device."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from foundation.configfile import load
from foundation.errors import ConfigError
from foundation.section import parse, suggest
from pipeline.runtime.machines.machine import Machine

_FOLDER = Path(__file__).parent
_CALIBRATE = "headrace plan --calibrate --machine FILE.json measures the present machine and writes one"


def known_machines() -> list[str]:
    """Lists the names of the shipped machines."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def load_machine(name: str) -> Machine:
    """Loads a machine by name or from a JSON file.

    Raises:
        ConfigError: no machine has this name (the error suggests the nearest), or the file is not a machine.
    """
    if name.lower() in known_machines():
        return _shipped(name.lower())
    path = Path(name)
    if path.suffix or path.exists() or "/" in name:
        if not path.is_file():
            why = "it is a directory" if path.is_dir() else "there is no such file"
            raise ConfigError("--machine", name, why=why, remedy=f"{_CALIBRATE}; or use {', '.join(known_machines())}")
        return read_machine(path)
    near = _nearest(name)
    known = ", ".join(known_machines())
    hint = f"did you mean '{near}'? " if near else ""
    raise ConfigError("--machine", name, why=f"the machines known are {known}", remedy=f"{hint}{_CALIBRATE}")


def read_machine(path: Path) -> Machine:
    """Reads a machine from its JSON file.

    Raises:
        ConfigError: the file cannot be read, or its keys or values are not those of a machine.
    """
    try:
        raw = load(path)
    except ConfigError as error:
        if error.field != "--config":
            raise
        raise ConfigError("--machine", str(path), why=error.why, remedy=error.remedy) from None
    machine = parse(Machine, raw, at=str(path))
    if not machine.peak_flops or "fp32" not in machine.efficiency.products or "fp32" not in machine.peak_flops:
        why = "a machine needs a rate for fp32, which stands in for dtypes without a rate"
        raise ConfigError(f"{path}.peak_flops", why=why, remedy="add fp32 to peak_flops and to efficiency.products")
    return machine


def machine_of_device(device_name: str) -> Machine | None:
    """Finds a device's shipped machine by the name that torch reports; None for an unknown device."""
    words = set(re.split(r"[ -]", device_name))
    if words & {"MIG", "NVL"}:  # a slice of a device, and a variant with other rates
        return None
    named = [(name, each) for each in map(_shipped, known_machines()) for name in each.devices]
    fits = [(name, each) for name, each in named if set(name.split()) <= words]
    # "H100 PCIe" is more specific than "H100"
    return max(fits, key=lambda pair: len(pair[0].split()))[1] if fits else None


def _nearest(name: str) -> str | None:
    """Finds the known name nearest to a mistyped one, with or without separators and maker's words."""
    plain = re.sub(r"nvidia|geforce|amd|instinct|[^a-z0-9]", "", name.lower())
    names = {re.sub(r"[^a-z0-9]", "", known): known for known in known_machines()}
    if not plain:
        return None
    near = suggest(plain, list(names))
    prefixed = [known for short, known in names.items() if plain.startswith(short) or short.startswith(plain)]
    return names[near] if near else next(iter(prefixed), None)


@functools.cache
def _shipped(name: str) -> Machine:
    return read_machine(_FOLDER / f"{name}.json")
