"""The config of deduplication: `dedup` in a corpus config."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from headrace.base.section import Count, Index, Section


class NearSection(Section):
    """Near-duplicates by MinHash: two documents of similarity s are found with probability 1 - (1 - s^rows)^bands."""

    ngram: Annotated[int, Field(gt=0, le=64)] = Field(
        default=5, description="how many tokens in a row are compared as one, e.g. 5"
    )
    bands: Annotated[int, Field(gt=0, le=256)] = Field(default=14, description="groups of hashes, e.g. 14")
    rows: Annotated[int, Field(gt=0, le=64)] = Field(default=8, description="hashes in a group, e.g. 8")

    @property
    def slots(self) -> int:
        """Hashes per document."""
        return self.bands * self.rows


class LinesSection(Section):
    """Lines (or paragraphs) that come again all over the corpus: only their first copies stay."""

    unit: Literal["line", "paragraph"] = Field(
        default="line", description="'line', or 'paragraph': what stands between blank lines"
    )
    copies: Count = Field(default=1, description="how many copies stay, those first in the input")
    min_bytes: Index = Field(default=30, description="shorter ones always stay, in bytes of UTF-8, e.g. 30")


class DedupSection(Section):
    """What counts as a copy. The copy that comes first in the input stays, the others are dropped."""

    exact: bool = Field(default=True, description="true drops documents with equal texts")
    near: NearSection | None = Field(default=None, description='null, or e.g. {"ngram": 5, "bands": 14, "rows": 8}')
    lines: LinesSection | None = Field(default=None, description='null, or e.g. {"unit": "line", "copies": 1}')
