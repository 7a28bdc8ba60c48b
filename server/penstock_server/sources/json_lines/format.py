"""What Penstock knows about files of JSON lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..format import Facts, Format, Source

if TYPE_CHECKING:
    from ..description import Description
    from ..files import Files


class JsonLines(Format):
    """Files with a JSON object on each line, whose keys are leaves."""

    name = "JSON lines"
    endings = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
    constructor = "from_json_lines"
    facts = Facts(
        splits="ranges of bytes, at lines; gzip is one",
        random_access="no",
        checksums="of gzip",
        remote="by ranges",
        bounds="256 MiB a line",
    )

    def source(
        self, files: Files, leaves: Any = None, *, dtypes: Mapping[str, Any] | None = None, transformed: bool = False
    ) -> Source:
        """See `Format`. `Feed.from_json_lines` describes the options. `transformed`: a function gets the samples."""
        from .reader import JsonLineSplits, JsonRows

        return Source(JsonLineSplits(files), JsonRows(leaves, dtypes or {}, transformed))

    def describe(self, file: str) -> Description:
        """See `Format`."""
        from .describe import describe

        return describe(file)
