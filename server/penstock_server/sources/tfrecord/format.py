"""What Penstock knows about TFRecord files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..format import Facts, Format, Source

if TYPE_CHECKING:
    from ..description import Description
    from ..features import Feature
    from ..files import Files

_ENDING = re.compile(r"\.(tfrecords?|tfrec|tfr)(-\d+-of-\d+)?(\.gz|\.zlib)?\*?$")


class TFRecord(Format):
    """TFRecord files of Examples, whose features are leaves."""

    name = "TFRecord"
    endings = (".tfrecord", ".tfrecords", ".tfrec", ".tfr", ".tfrecord.gz", ".tfrecord.zlib")
    constructor = "from_tfrecord"
    needs_module = "TFRecord files need a module, which declares their features: `penstock peek FILE` prints one"
    facts = Facts(
        splits="files, or ranges of large ones",
        random_access="no",
        checksums="CRC-32C of each record",
        remote="from the beginning",
        bounds="2 GiB a record",
    )

    def matches(self, name: str) -> bool:
        """See `Format`. A shard's number may follow the ending, as in train.tfrecord-00001-of-00010."""
        return _ENDING.search(name) is not None

    def recognizes(self, head: bytes) -> bool:
        """See `Format`. A file begins with a length and its CRC, perhaps compressed."""
        from .reader import begins_with_record

        return begins_with_record(head)

    def source(
        self,
        files: Files,
        leaves: Mapping[str, Feature],
        *,
        split_bytes: int | None = None,
        on_error: str = "raise",
    ) -> Source:
        """See `Format`. `leaves` are the features. `Feed.from_tfrecord` describes the options."""
        from .reader import TFRecordSamples, TFRecordSplits

        reader = TFRecordSamples(leaves, skip=on_error == "skip")
        return Source(TFRecordSplits(files, split_bytes), reader)

    def describe(self, file: str) -> Description:
        """See `Format`."""
        from .describe import describe

        return describe(file)
