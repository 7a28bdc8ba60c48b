"""`Feed.from_...`: feeds that read data files. Each makes an ordinary feed with the source of a format."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from ..sources import files as fs
from ..sources import registry
from ..sources.features import Feature
from ..sources.format import Format, Source
from ..sources.other_formats import words_for
from .options.values import OnError


class FromFiles:
    """The constructors of `Feed` for data files."""

    @classmethod
    def from_hdf5(
        cls,
        files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        leaves: Any,
        *,
        batch_size: int | None,
        rows: tuple[int, int | None] | None = None,
        split_rows: int | None = None,
        locking: bool | None = None,
        allow_outside: bool = False,
        **options: Any,
    ) -> Self:
        """Return a feed of the rows of HDF5 datasets.

        A sample is one row of each dataset, with the dtype and shape of the file. Splits are ranges of rows that follow
        the chunks, so that no chunk is decompressed twice in an epoch. (Small datasets beside large ones, such as
        labels beside images, may have other chunk borders. Splits follow those only if that still leaves many splits.
        If whole chunks make fewer than 16 splits, splits may also divide chunks.) A read covers about 1 MiB of a
        dataset, or one row of chunks if that is more, up to 256 MiB.

        Files on which a dataset depends (external links, the sources of virtual datasets, external storage) must be
        there, with all the data that the dataset takes from them.

        Args:
            files: one path, pattern or URL of a file, or a list of these. Files are read in the order of the list, and
                the matches of a pattern in the order of their names.
            leaves: the names of datasets in the structure of a sample: `{"image": "images", "label": "labels"}`,
                `("images", "labels")` or "images". All datasets in a file must have the same length.
            batch_size: samples in a batch.
            rows: (start, stop) of the rows to serve, counted over all files; a stop of None means the end. By default
                all rows.
            split_rows: rows of a split, rounded up to whole chunks; by default about 1/256 of the rows.
            locking: as in `h5py.File`. False reads files on a file system without locks (NFS).
            allow_outside: whether datasets may depend on files outside the folder of their file. A file can name any
                file of the host, so allow this only for files that you trust.
            options: other attributes of `Feed`, such as `shuffle` and `seed`. `splits` and `segment` are refused.

        Workers open the files when they list the splits of an epoch. Problems are reported as errors of the feed, which
        name the file: it is missing, locked, truncated or was changed since; a dataset is missing or has another length
        than the others.

        Raises:
            TypeError, ValueError: an option cannot work; the message says what to do.
        """
        own = {"rows": rows, "split_rows": split_rows, "locking": locking, "allow_outside": allow_outside}
        return cls._of("HDF5", files, leaves, own, batch_size, options)

    @classmethod
    def from_tfrecord(
        cls,
        files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        features: Mapping[str, Feature],
        *,
        batch_size: int | None,
        split_bytes: int | None = None,
        on_error: str | OnError = "raise",
        **options: Any,
    ) -> Self:
        """Return a feed of the `tf.train.Example` or `SequenceExample` records of TFRecord files, read without
        TensorFlow.

        A sample is a dict with the declared features; others are ignored. Files may be compressed with GZIP or ZLIB,
        which is recognized by their first bytes. All CRCs are checked. Each file is a split, but a large local file
        that is not compressed is divided into several.

        Args:
            files: as for `from_hdf5`.
            features: `FixedLen`, `VarLen`, or for a feature list `FixedLenSequence`, by the feature's name, such as
                `{"label": FixedLen((), "int64")}`.
            batch_size: samples in a batch.
            split_bytes: bytes of a split; files of more than twice that size are divided. By default 1/256 of the size
                of all files, and 1 to 64 MiB.
            on_error: as in `Feed`. With "skip", only the corrupt record is skipped, and the log and the status name it
                when its split ends. If a length is corrupt, the rest of its split is skipped.
            options: other attributes of `Feed`. `splits` and `segment` are refused.

        A corrupt record, or one without the declared features, is an error of the feed that names the file and the
        record's offset in bytes (in the uncompressed data).

        Raises:
            TypeError, ValueError: an option cannot work; the message says what to do.
        """
        own = {"split_bytes": split_bytes, "on_error": on_error}
        return cls._of("TFRecord", files, features, own, batch_size, {**options, "on_error": on_error})

    @classmethod
    def from_numpy(
        cls,
        files: Any,
        leaves: Any = None,
        *,
        batch_size: int | None,
        rows: tuple[int, int | None] | None = None,
        split_rows: int | None = None,
        **options: Any,
    ) -> Self:
        """Return a feed of the rows of NumPy arrays in .npy or .npz files.

        Arrays in .npy files, and in .npz files that are not compressed, are mapped into memory, so that workers share
        them. A compressed .npz file is a single split, and a worker decompresses it from its beginning.

        Args:
            files: as for `from_hdf5`. One .npy file has one array, whose rows are the samples. For several arrays give
                a tuple or a dict of .npy files, with the structure of a sample: `{"x": "x.npy", "y": "y.npy"}`, or
                patterns that match the same number of files.
            leaves: with .npz files, the names of arrays in the structure of a sample, as for `from_hdf5`. By default a
                dict of all arrays.
            batch_size: samples in a batch.
            rows: (start, stop) of the rows to serve, as for `from_hdf5`.
            split_rows: rows of a split; by default about 1/256 of the rows.
            options: other attributes of `Feed`. `splits` and `segment` are refused.

        All arrays must have the same length. They hold numbers; Python objects are never unpickled. A problem with a
        file is an error of the feed that names the file.

        Raises:
            TypeError, ValueError: an option cannot work; the message says what to do.
        """
        own = {"rows": rows, "split_rows": split_rows}
        return cls._of("NumPy", files, leaves, own, batch_size, options)

    @classmethod
    def from_parquet(
        cls,
        files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        leaves: Any = None,
        *,
        batch_size: int | None,
        **options: Any,
    ) -> Self:
        """Return a feed of the rows of Parquet files, read with pyarrow. Each row group is a split.

        With fewer than 8 row groups, large ones are divided into up to 8 splits each. Each of these decodes the rows
        before its own, so write more row groups if you can.

        A column of numbers gives numbers. A column of lists of numbers gives one-dimensional arrays, and one of
        fixed-shape tensors gives arrays of that shape. Lists of lists of one length give arrays of two dimensions. Text
        is `str`, binary data are `bytes`, a struct is a dict, and a struct of `bytes` and `path`, as Hugging Face
        stores images, is its bytes. A column with nulls, or of another type, is an error.

        Args:
            files: as for `from_hdf5`.
            leaves: the names of columns in the structure of a sample; by default a dict of all columns. Other columns
                are not read.
            batch_size: samples in a batch.
            options: other attributes of `Feed`. `splits` and `segment` are refused.

        A problem with a file is an error of the feed that names the file.

        Raises:
            TypeError, ValueError: an option cannot work; the message says what to do.
        """
        return cls._of("Parquet", files, leaves, {}, batch_size, options)

    @classmethod
    def from_webdataset(
        cls,
        files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        leaves: Any,
        *,
        batch_size: int | None,
        decode: Mapping[str, Callable[[bytes], Any]] | None = None,
        **options: Any,
    ) -> Self:
        """Return a feed of tar files in the layout of WebDataset. Each tar file is a split.

        Neighbouring files whose names are equal up to the first dot are a sample: `0001.jpg`, `0001.cls`. The extension
        decides the type: `cls`, `id` and `index` are whole numbers, `npy` and `npz` are arrays, `txt` is `str`, and
        `json` is the value that it contains. All others are `bytes`. Pickles (`pyd`, `pkl`, `pth`) are refused.

        Args:
            files: as for `from_hdf5`. They may be compressed.
            leaves: extensions in the structure of a sample: `{"image": "jpg;png", "label": "cls"}`. A semicolon
                separates alternatives: the first one that exists is used. Other files are ignored.
            batch_size: samples in a batch.
            decode: functions that turn the bytes of a file into a value, by extension: `{"jpg": decode_jpeg}`.
            options: other attributes of `Feed`. `splits` and `segment` are refused.

        A sample that lacks a file, a file that cannot be decoded, and a truncated tar file are errors of the feed that
        name the tar file.

        Raises:
            TypeError, ValueError: an option cannot work; the message says what to do.
        """
        return cls._of("tar (WebDataset)", files, leaves, {"decode": decode}, batch_size, options)

    @classmethod
    def from_zarr(
        cls,
        stores: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        leaves: Any = None,
        *,
        batch_size: int | None,
        rows: tuple[int, int | None] | None = None,
        split_rows: int | None = None,
        **options: Any,
    ) -> Self:
        """Return a feed of the rows of Zarr arrays, of versions 2 and 3.

        A sample is one row of each array. Splits are ranges of rows that follow the chunks (or the shards, if there are
        any), so that no chunk of a large array is decompressed twice in an epoch.

        zarr reads a chunk that is not stored as the fill value, without an error, so a lost chunk looks like an empty
        one. `penstock peek` counts the chunks that are not stored.

        Args:
            stores: as the files of `from_hdf5`: folders, .zarr.zip files, or URLs.
            leaves: the names of arrays in the structure of a sample; by default a dict of all arrays, or the array
                itself if the store is a single one.
            batch_size: samples in a batch.
            rows: (start, stop) of the rows to serve, as for `from_hdf5`.
            split_rows: rows of a split, rounded up to whole chunks; by default about 1/256 of the rows.
            options: other attributes of `Feed`. `splits` and `segment` are refused.

        A problem with a store is an error of the feed that names it.

        Raises:
            TypeError, ValueError: an option cannot work; the message says what to do.
        """
        own = {"rows": rows, "split_rows": split_rows}
        return cls._of("Zarr", stores, leaves, own, batch_size, options)

    @classmethod
    def from_folder(
        cls,
        folder: str | os.PathLike[str],
        leaves: Any = None,
        *,
        batch_size: int | None,
        size: tuple[int, int] | None = None,
        mode: str = "RGB",
        resize: str = "stretch",
        upright: bool = True,
        validation: float = 0.0,
        part: str = "",
        part_seed: int = 0,
        **options: Any,
    ) -> Self:
        """Return a feed of the images in a folder, read with Pillow.

        Each subfolder is a class. An image's label is the place of its class among the sorted names, as in Keras and
        torchvision. Images may lie deeper; hidden files, and files that are no images by their ending, are left out.
        The images of a folder without subfolders have no labels.

        The feed is indexable: with any `shuffle` above 0 each epoch is a permutation of all images.

        Args:
            folder: a path.
            leaves: "image", "label" and "path" (that inside the folder) in the structure of a sample. By default
                `("image", "label")`, or `"image"` if there are no subfolders.
            batch_size: images in a batch.
            size: (height, width) of the images in pixels, to which they are resized with bilinear interpolation. By
                default that of the files, which must then all have the same, unless a transform or `batching` takes
                care of it. Large JPEG files are decoded at a half, a quarter or an eighth of their size if that is
                enough.
            mode: "RGB", "RGBA", "L" (grey) or "I;16" (grey of 16 bits). All images are converted to it.
            resize: what `size` does to images of another shape: "stretch", "crop" (the middle) or "pad" (with black).
            upright: turn images as their EXIF data say, as viewers do.
            validation: share of the images of each class to set aside for validation, 0 to 1.
            part: with `validation`, "train" or "validation": which images to serve.
            part_seed: another number sets other images aside.
            options: other attributes of `Feed`, such as `shuffle` and `transform`. `splits` and `segment` are refused.

        An image is an array [height, width, channels] of uint8 (uint16 for "I;16"), and a label is an int32. An image
        that cannot be decoded is an error of the feed that names the file; with `on_error="skip"` it is left out.

        Raises:
            TypeError, ValueError: an option cannot work; the message says what to do.
        """
        own = {
            "size": size,
            "mode": mode,
            "resize": resize,
            "upright": upright,
            "validation": validation,
            "part": part,
            "part_seed": part_seed,
        }
        return cls._of("folder of images", folder, leaves, own, batch_size, options)

    @classmethod
    def from_csv(
        cls,
        file: str | os.PathLike[str],
        leaves: Any = None,
        *,
        batch_size: int | None,
        images: str | Sequence[str] | Mapping[str, str] = (),
        classes: str | Sequence[str] = (),
        dtypes: Mapping[str, Any] | None = None,
        size: tuple[int, int] | None = None,
        mode: str = "RGB",
        resize: str = "stretch",
        upright: bool = True,
        **options: Any,
    ) -> Self:
        """Return a feed of the rows of a CSV file, whose first line names the columns.

        A column is int64, float64 or bools if all of its cells are such values, and otherwise text. Numbers with
        leading zeros are text. An empty cell among numbers is an error. Each worker holds the columns that the feed
        uses, so a file may have at most 1 GiB.

        The feed is indexable: with any `shuffle` above 0 each epoch is a permutation of all rows.

        Args:
            file: a path or URL. It is UTF-8, may be compressed with gzip, and is separated by tabs if it ends in .tsv,
                else by commas, semicolons or tabs.
            leaves: the names of columns in the structure of a sample, as for `from_hdf5`; by default a dict of all
                columns. A name with `*`, such as "pixel*", makes one array of all columns that match.
            batch_size: samples in a batch.
            images: columns that hold the paths of images, which are read in their place; or a dict with a path for each
                column, with {} for the cell: `{"id": "photos/{}.jpg"}`. Paths are relative to the file's folder.
            classes: columns whose values become int32 numbers from 0, in the order of the sorted values.
            dtypes: other dtypes of columns of numbers, such as `{"pixel*": "uint8"}`. A value that an integer dtype
                cannot hold is an error, and so is a finite one that a float dtype makes infinite.
            size: (height, width) of the images, as for `from_folder`.
            mode: their mode, as for `from_folder`.
            resize: what `size` does to images of another shape, as for `from_folder`.
            upright: turn images as their EXIF data say.
            options: other attributes of `Feed`. `splits` and `segment` are refused.

        Raises:
            OSError: the file cannot be read; the message names it.
            TypeError, ValueError: an option cannot work, or the file is no such table; the message says what to do.
        """
        own = {
            "images": images,
            "classes": classes,
            "dtypes": dtypes,
            "size": size,
            "mode": mode,
            "resize": resize,
            "upright": upright,
        }
        return cls._of("CSV", file, leaves, own, batch_size, options)

    @classmethod
    def from_json_lines(
        cls,
        files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        leaves: Any = None,
        *,
        batch_size: int | None,
        dtypes: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Self:
        """Return a feed of files with a JSON object on each line.

        Numbers, text and bools are values, a list of numbers or text is an array, and an object is a dict. A null is an
        error, and so is a list of objects, unless a transform gets them. Large files that are not compressed are
        divided at lines.

        Args:
            files: as for `from_hdf5`. They may be compressed with gzip.
            leaves: the names of keys in the structure of a sample, as for `from_hdf5`; by default a dict of all keys.
                `"meta.size"` is the key "size" of the object "meta".
            batch_size: samples in a batch.
            dtypes: dtypes of numbers and of lists of numbers: `{"score": "float32"}`. Without one, whole numbers are
                int64 and others float64, so a key that has both needs one.
            options: other attributes of `Feed`. `splits` and `segment` are refused.

        A line that is no object, or lacks a key, is an error of the feed that names the file and the line's first byte.

        Raises:
            TypeError, ValueError: an option cannot work; the message says what to do.
        """
        return cls._of("JSON lines", files, leaves, {"dtypes": dtypes}, batch_size, options)

    @classmethod
    def from_files(
        cls,
        files: Any,
        leaves: Any = None,
        *,
        batch_size: int | None,
        format: str | Format | None = None,
        **options: Any,
    ) -> Self:
        """Return a feed of data files of any format, also one that an installed package has registered.

        Args:
            files: as for `from_hdf5`. All have one format.
            leaves: the names of columns in the structure of a sample, as for `from_hdf5`; for TFRecord files the
                features. Some formats need none.
            batch_size: samples in a batch.
            format: the format, or its name, such as "HDF5". By default the first file's ending decides.
            options: options of the format, such as `rows`, and other attributes of `Feed`. `splits` and `segment` are
                refused.

        Raises:
            StartError: a registered format cannot be loaded.
            TypeError, ValueError: no format has this name or ending, or an option cannot work; the message says what to
                do.
        """
        found = _format_of(files) if format is None else format
        one = registry.by_name(found) if isinstance(found, str) else found
        if leaves is None and one.needs_leaves():
            raise TypeError(f"{one.name} files need leaves=, the names of their columns in the structure of a sample")
        own = {name: value for name, value in options.items() if one.takes(name)}
        attributes = inspect.signature(cls).parameters
        rest = {name: value for name, value in options.items() if name not in own or name in attributes}
        return cls._of(one, files, leaves, own, batch_size, rest)

    @classmethod
    def _of(
        cls,
        format: str | Format,
        files: Any,
        leaves: Any,
        own: dict[str, Any],
        batch_size: int | None,
        options: dict[str, Any],
    ) -> Self:
        """Return a feed. `own` are the options of the format, and `options` those of `Feed`."""
        one = registry.by_name(format) if isinstance(format, str) else format
        if "on_error" in own:
            own = {**own, "on_error": OnError.of(own["on_error"]).action}
        if one.takes("same_size"):  # what follows the source may bring images to one size
            own = {**own, "same_size": not options.get("transform") and options.get("batching", "stack") == "stack"}
        if one.takes("transformed"):  # a transform may take what cannot be a leaf
            own = {**own, "transformed": bool(options.get("transform"))}
        source = one.source(files, leaves, **own)
        for name in ("splits", "segment"):
            if name in options:
                raise TypeError(f"Feed.{one.constructor} divides the files itself: leave {name}= out")
        make: Any = cls  # a Feed
        feed: Self
        if isinstance(source, Source):
            feed = make(source.reader, splits=source.splits, batch_size=batch_size, **options)
        else:
            feed = make(source, batch_size=batch_size, **options)
        return feed


def _format_of(files: Any) -> Format:
    first = fs.checked([*files.values()] if isinstance(files, Mapping) else files)[0]
    found = registry.format_of(first)
    if found is None and os.path.isdir(first):
        raise ValueError(f"{first} is a folder without images: give the files in it, such as {first}/*.h5")
    if found is None and (words := words_for(first)):
        raise ValueError(words)
    if found is None:
        raise ValueError(
            f"{first} has the ending of no format: give format=, or install the package that has the format. The known "
            f"endings are {registry.all_endings()}"
        )
    return found
