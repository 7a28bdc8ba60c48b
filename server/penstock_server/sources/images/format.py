"""What Penstock knows about folders of images."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from .. import files as fs
from ..format import Facts, Format
from .decoder import ImageDecoder
from .options import ENDINGS

if TYPE_CHECKING:
    from ..description import Description
    from ..files import Files
    from .items import FolderImages


class ImageFolder(Format):
    """A folder of images with a subfolder for each class, or of images alone."""

    name = "folder of images"
    things = "images"
    endings = ()
    folder_of = ENDINGS
    library = "PIL.Image"
    constructor = "from_folder"
    facts = Facts(
        splits="none: images are indexed",
        random_access="yes",
        checksums="those of the images",
        remote="no",
        bounds="100 million pixels an image",
    )

    def source(
        self,
        files: Files,
        leaves: Any = None,
        *,
        size: tuple[int, int] | None = None,
        mode: str = "RGB",
        resize: str = "stretch",
        upright: bool = True,
        validation: float = 0.0,
        part: str = "",
        part_seed: int = 0,
        same_size: bool = False,
    ) -> FolderImages:
        """See `Format`. `Feed.from_folder` describes the options. With `same_size`, images must not differ in size."""
        from .items import FolderImages
        from .listing import Part

        folder, *more = fs.checked(files)
        if more:
            raise ValueError("a feed has one folder of images: make a feed for each, and Feed.mix or Feed.zip them")
        if fs.is_url(folder):
            raise ValueError(f"{folder} is a URL, and folders of images must be local: copy it, or serve tar files")
        decoder = ImageDecoder(size, mode, resize, upright)
        if isinstance(validation, bool) or not isinstance(validation, int | float) or not 0 <= validation < 1:
            raise ValueError(f"validation is the share of the images to set aside, 0 to 1, got {validation!r}")
        if part not in (("train", "validation") if validation else ("",)):
            raise ValueError(
                f'part must be "train" or "validation" with validation={validation}, got {part!r}'
                if validation
                else f"part={part!r} needs validation=, the share of the images to set aside, such as validation=0.2"
            )
        if isinstance(part_seed, bool) or not isinstance(part_seed, int):
            raise TypeError(f"part_seed must be a whole number, got {part_seed!r}")
        chosen = Part(validation, part, part_seed)
        return FolderImages(os.path.normpath(folder), leaves, chosen, decoder, same_size=same_size)

    def describe(self, file: str) -> Description:
        """See `Format`."""
        from .describe import describe

        return describe(file)
