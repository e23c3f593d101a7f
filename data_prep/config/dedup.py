"""Config schema of deduplication (exact, near and line): the section `dedup` of a corpus config."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from foundation.section import Count, Index, Section


class NearSection(Section):
    """Near-duplicate detection by MinHash signatures and LSH bands.

    Two documents of Jaccard similarity s are found with probability 1 - (1 - s^rows)^bands.
    """

    ngram: Annotated[int, Field(gt=0, le=64)] = Field(
        default=5, description="tokens in an n-gram; documents are compared as sets of n-grams, e.g. 5"
    )
    bands: Annotated[int, Field(gt=0, le=256)] = Field(
        default=14,
        description="LSH bands of a signature, e.g. 14; more bands find less similar pairs and take more disk",
    )
    rows: Annotated[int, Field(gt=0, le=64)] = Field(
        default=8,
        description="MinHash values in an LSH band, e.g. 8; more rows demand a higher similarity. 14 bands of 8 rows "
        "find half of the pairs of Jaccard similarity 0.68 and 92 % of those of 0.8",
    )

    clusters: Literal["verified", "connected"] = Field(
        default="verified",
        description='"verified" drops a document only if its signature is similar to that of a kept one; "connected" '
        "drops all documents but the first that pairs connect, over any number of steps",
    )
    similarity: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None,
        description="for verified clusters: least Jaccard similarity to a kept document, as the signatures estimate it,"
        " e.g. 0.9 to keep texts of one template apart; null: that of which the bands find half of the pairs",
    )

    @model_validator(mode="after")
    def _check_similarity(self) -> NearSection:
        if self.similarity is not None and self.clusters == "connected":
            raise ValueError("similarity applies to verified clusters only: remove it, or clusters")
        return self

    @property
    def threshold(self) -> float:
        """Least similarity to a kept document; by default the middle of the LSH bands' curve."""
        return self.similarity or (1 - 0.5 ** (1 / self.bands)) ** (1 / self.rows)

    @property
    def slots(self) -> int:
        """Slots of a MinHash signature (minima per document): bands * rows."""
        return self.bands * self.rows


class LinesSection(Section):
    """Line deduplication: of lines (or paragraphs) that are repeated anywhere in the corpus only the first stay."""

    unit: Literal["line", "paragraph"] = Field(
        default="line", description='what is compared: "line", or "paragraph" (text between blank lines)'
    )
    copies: Count = Field(
        default=1, description="occurrences of a repeated line that are kept, the first ones in input order, e.g. 1"
    )
    min_bytes: Index = Field(
        default=30, description="lines shorter than this are always kept, in bytes of UTF-8, e.g. 30"
    )


class DedupSection(Section):
    """Deduplication. Of duplicate documents the first in input order is kept, the others are dropped."""

    exact: bool = Field(default=True, description="true drops documents whose (cleaned) text equals an earlier one's")
    near: NearSection | None = Field(
        default=None,
        description='near-duplicate removal by MinHash: null for none, {} for the defaults, or e.g. {"ngram": 5, '
        '"bands": 14, "rows": 8}',
    )
    lines: LinesSection | None = Field(
        default=None,
        description='removal of lines repeated across the corpus: null for none, or e.g. {"unit": "line", "copies": '
        "1}; reads the corpus twice; not for code",
    )
