"""What Penstock knows about CSV files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .. import files as fs
from ..format import Facts, Format
from ..images.decoder import ImageDecoder

if TYPE_CHECKING:
    from ..description import Description
    from ..files import Files
    from .rows import TableRows


class Csv(Format):
    """CSV files, whose rows are samples."""

    name = "CSV"
    endings = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
    constructor = "from_csv"
    facts = Facts(
        splits="none: rows are indexed",
        random_access="yes",
        checksums="of gzip",
        remote="as a whole",
        bounds="1 GiB a file",
    )

    def source(
        self,
        files: Files,
        leaves: Any = None,
        *,
        images: str | Sequence[str] | Mapping[str, str] = (),
        classes: str | Sequence[str] = (),
        dtypes: Mapping[str, Any] | None = None,
        size: tuple[int, int] | None = None,
        mode: str = "RGB",
        resize: str = "stretch",
        upright: bool = True,
    ) -> TableRows:
        """See `Format`. `Feed.from_csv` describes the options."""
        from ..dtypes import checked_dtypes
        from .rows import TableRows

        file, *more = fs.checked(files)
        if more:
            raise ValueError("a feed has one CSV file: join them (the header once), or write Parquet files")
        decoder = ImageDecoder(size, mode, resize, upright)
        if isinstance(images, str):
            images = (images,)
        if not isinstance(images, Mapping):
            images = dict.fromkeys(images, "{}")
        for template in images.values():
            if not isinstance(template, str) or "{}" not in template:
                raise ValueError(f'images={{COLUMN: PATH}} needs {{}} in PATH, such as "photos/{{}}.jpg": {template!r}')
        if images and fs.is_url(file):
            raise ValueError(f"{file} is a URL, and its images would have to be local: copy the file to their folder")
        names = (classes,) if isinstance(classes, str) else tuple(classes)
        return TableRows(file, leaves, images, names, checked_dtypes(dtypes), decoder)

    def describe(self, file: str) -> Description:
        """See `Format`."""
        from .describe import describe

        return describe(file)
