"""Software bill of materials of the Python environment: CycloneDX 1.6 as JSON, from `importlib.metadata`. No torch.

Format: https://cyclonedx.org/docs/1.6/json/. Manifests record the version of Headrace, but not of its dependencies. The
bill therefore lists the environment of the process that writes it, and states this.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib.metadata import Distribution, distributions
from typing import Any
from urllib.parse import quote
from uuid import NAMESPACE_URL, uuid5

from packaging.requirements import InvalidRequirement, Requirement

from foundation.directory import Manifest, fingerprint_of
from foundation.version import __version__

BomPart = dict[str, Any]
"""A part of a bill of materials in the format of CycloneDX."""

NAME = "sbom.cdx.json"
_TYPES = {"tokens": "data"}
_LONGEST_LICENSE = 64
"""Longer texts in the field License are whole licenses, not names of one."""


def sbom(manifest: Manifest, *, name: str) -> BomPart:
    """Lists every installed distribution with version, license and dependencies.

    Args:
        manifest: manifest of the directory that the bill describes.
        name: name of the model or dataset.
    """
    found = _installed()
    parts = [_component(found[key]) for key in sorted(found)]
    python = {"type": "platform", "bom-ref": "python", "name": platform.python_implementation()}
    subject = {
        "type": _TYPES.get(manifest.kind, "machine-learning-model"),
        "bom-ref": "subject",
        "name": name,
        "properties": _properties(manifest),
    }
    links = [{"ref": _reference(found[key]), "dependsOn": sorted(_needed(found[key], found))} for key in sorted(found)]
    root = {"ref": "subject", "dependsOn": [_reference(found["headrace"])] if "headrace" in found else []}
    tool = {"type": "application", "name": "headrace", "version": __version__}
    body: BomPart = {
        "components": [python | {"version": platform.python_version()}, *parts],
        "dependencies": [root, *links],
    }
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid5(NAMESPACE_URL, fingerprint_of([subject, body]))}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
            "tools": {"components": [tool]},
            "component": subject,
        },
        **body,
    }


def normalized(name: str) -> str:
    """Normalizes a distribution's name as package indices do (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _properties(manifest: Manifest) -> list[dict[str, str]]:
    of = {
        "headrace:fingerprint": manifest.fingerprint,
        "headrace:made-by-version": manifest.code.get("headrace"),
        "headrace:made-by-commit": manifest.code.get("commit"),
        "headrace:environment": "of the process that wrote this file; manifests record the version of headrace alone",
    }
    return [{"name": name, "value": value} for name, value in of.items() if value]


def _installed() -> dict[str, Distribution]:
    """Maps normalized name to distribution; if two have the same name, the one that an import finds."""
    found: dict[str, Distribution] = {}
    for each in distributions():
        if each.metadata["Name"]:
            found.setdefault(normalized(each.metadata["Name"]), each)
    return found


def _reference(of: Distribution) -> str:
    return f"pkg:pypi/{normalized(of.metadata['Name'])}@{quote(of.version, safe='')}"


def _component(of: Distribution) -> BomPart:
    purl = _reference(of)
    about: BomPart = {"type": "library", "bom-ref": purl, "name": of.metadata["Name"], "version": of.version}
    licenses = _licenses(of.metadata)
    return about | ({"licenses": licenses} if licenses else {}) | {"purl": purl}


def _licenses(metadata: Any) -> list[BomPart]:
    """The package's license: an SPDX expression (PEP 639), or else the names in its classifiers or field License."""
    if expression := metadata.get("License-Expression"):
        return [{"expression": expression}]
    classified = [
        text.rpartition(" :: ")[2] for text in metadata.get_all("Classifier") or () if text.startswith("License :: ")
    ]
    plain = (metadata.get("License") or "").strip()
    named = [plain] if 0 < len(plain) <= _LONGEST_LICENSE and "\n" not in plain and plain != "UNKNOWN" else []
    return [{"license": {"name": name}} for name in dict.fromkeys(classified or named)]


def _needed(of: Distribution, found: Mapping[str, Distribution]) -> set[str]:
    """References of the installed distributions that a distribution requires here, without extras."""
    return {_reference(found[name]) for name in _required(of) if name in found}


def _required(of: Distribution) -> Iterator[str]:
    for text in of.requires or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:  # a package from before PEP 508
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield normalized(requirement.name)
