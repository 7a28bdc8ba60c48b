"""Data files that Penstock does not serve as they are, and what to do with each: for messages.

A file is known by its ending, or by its first bytes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from .image_encodings import encoding
from .recipes import recipe

_HEAD = 4096
"""Bytes of a file that are looked at."""


@dataclass(frozen=True, slots=True)
class _Other:
    """A format that is not served.

    Attributes:
        name: what a file is, such as "a pickle".
        advice: what to do; FILE stands for the file.
        endings: in lower case.
        magic: bytes at a place by which a file is known, whatever its name: (offset, bytes).
    """

    name: str
    advice: str
    endings: tuple[str, ...] = ()
    magic: tuple[tuple[int, bytes], ...] = ()


_STAND_INS = (
    _Other(
        "a Git LFS pointer, not the data",
        "Fetch the data with git lfs pull",
        magic=((0, b"version https://git-lfs"),),
    ),
    _Other(
        "an HTML page, not the data",
        "A download has failed: look at the page, and download the file again",
        (".html", ".htm"),
        ((0, b"<!DOCTYPE html"), (0, b"<!doctype html"), (0, b"<html")),
    ),
)
"""Files that are in the place of data, after something has gone wrong."""

_OTHERS = (
    *_STAND_INS,
    _Other(
        "a pickle, which can run any code when it is read, so Penstock does not read it",
        f"If you trust it, load it in a module, as in {recipe('Pickles, and files of PyTorch')}",
        (".pkl", ".pickle", ".p", ".joblib"),
        tuple((0, b"\x80" + bytes([version]) + b"\x95") for version in (4, 5)),
    ),
    _Other(
        "a file of PyTorch, which is a pickle, so Penstock does not read it",
        f"Load it in a module, as in {recipe('Pickles, and files of PyTorch')}",
        (".pt", ".pth", ".ckpt"),
    ),
    _Other(
        "a safetensors file",
        f"Convert it to .npz once, as in {recipe('Safetensors')}",
        (".safetensors",),
    ),
    _Other(
        "a DICOM file",
        f"Read it with pydicom in a module, as in {recipe('DICOM and NIfTI')}",
        (".dcm", ".dicom"),
        ((128, b"DICM"),),
    ),
    _Other(
        "a NIfTI file",
        f"Read it with nibabel in a module, as in {recipe('DICOM and NIfTI')}",
        (".nii", ".nii.gz"),
        ((344, b"n+1\0"), (344, b"ni1\0")),
    ),
    _Other(
        "a tar file that is compressed with zstd",
        "Decompress it with zstd -d FILE: images and audio in it are compressed already",
        (".tar.zst", ".tzst"),
    ),
    _Other(
        "an Excel table",
        f"Read it with pandas.read_excel('FILE') in a module, as in {recipe('pandas')}",
        (".xlsx", ".xls", ".xlsm", ".ods"),
    ),
    _Other(
        "a table of Stata, SAS or SPSS",
        f"Read it with pandas.read_stata('FILE'), read_sas or read_spss in a module, as in {recipe('pandas')}",
        (".dta", ".sas7bdat", ".xpt", ".sav"),
    ),
    _Other(
        "an ORC file",
        "Write it to Parquet once: pyarrow.parquet.write_table(pyarrow.orc.read_table('FILE'), 'FILE.parquet')",
        (".orc",),
        ((0, b"ORC"),),
    ),
    _Other(
        "an Avro file",
        "Write it to Parquet once, such as with polars.read_avro('FILE').write_parquet('FILE.parquet')",
        (".avro",),
        ((0, b"Obj\x01"),),
    ),
    _Other(
        "a SQLite database",
        f"Read it with pandas.read_sql('select ...', sqlite3.connect('FILE')) in a module, as in {recipe('pandas')}",
        (".sqlite", ".sqlite3", ".db"),
        ((0, b"SQLite format 3\0"),),
    ),
    _Other(
        "a netCDF 3 file, which is not HDF5",
        "Convert it once: xarray.open_dataset('FILE').to_zarr('FILE.zarr'), or nccopy -k nc4 FILE FILE.h5",
        magic=((0, b"CDF\x01"), (0, b"CDF\x02"), (0, b"CDF\x05")),
    ),
    _Other(
        "a FITS file",
        "Read it with astropy.io.fits in a module, and give the array to Feed(...)",
        (".fits", ".fit", ".fits.gz"),
        ((0, b"SIMPLE  ="),),
    ),
    _Other(
        "an IDX file, as MNIST has it",
        "Convert it to .npy once: data = numpy.fromfile('FILE', numpy.uint8), then numpy.save('images.npy', "
        "data[16:].reshape(-1, 28, 28)) for images, and data[8:] for labels",
        ("idx3-ubyte", "idx1-ubyte"),
    ),
    _Other(
        "an ArrayRecord file",
        f"Give grain.sources.ArrayRecordDataSource('FILE') to Feed(...) in a module, as in {recipe('Grain')}",
        (".array_record", ".arrayrecord"),
    ),
    _Other(
        "a RecordIO file of MXNet",
        "Write it as tar files once, with mxnet.recordio.MXRecordIO('FILE', 'r') and webdataset.TarWriter",
        (".rec",),
    ),
    _Other(
        "a file of FFCV",
        "Write the dataset from which it was made as tar files, Parquet or .npz",
        (".beton",),
    ),
    _Other(
        "a Lance dataset",
        "Give lance.dataset('FILE').to_table() to Feed(...) in a module, or write a large one to Parquet once",
        (".lance",),
    ),
    _Other(
        "a video",
        f"Decode it in a module, as in {recipe('Video')}",
        (".mp4", ".avi", ".mkv", ".webm", ".mov", ".mpg", ".mpeg"),
        ((4, b"ftyp"),),
    ),
    _Other(
        "a sound recording",
        f"Decode it in a module, as in {recipe('Audio')}",
        (".wav", ".flac", ".mp3", ".ogg", ".opus", ".m4a", ".aac"),
        ((8, b"WAVE"), (0, b"fLaC"), (0, b"OggS"), (0, b"ID3")),
    ),
    _Other(
        "a zip archive",
        "Unpack it: a folder of images can be served as it is, and so can data files in it",
        (".zip",),
        ((0, b"PK\3\4"),),
    ),
    _Other(
        "text",
        f"Yield its lines from a generator, as in {recipe('Lines of text')}. If it is a table, name it .csv or .tsv",
        (".txt", ".text", ".log"),
    ),
)


def words_for(file: str) -> str:
    """Return what a file is, and what to do with it: "x.pkl is a pickle, ...: ..."; "" if it is not known."""
    name = file.lower().rstrip("/")
    head = _head_of(file)
    if name.endswith(".json"):
        return f"{file} is {_json(file, head)}"
    found = next(_by_magic(head[:512]), None)
    if found is None or found.name == "a zip archive":
        found = next((one for one in _OTHERS if one.endings and name.endswith(one.endings)), found)
    if found is not None:
        return f"{file} is {found.name}. {found.advice.replace('FILE', file)}"
    if kind := encoding(head):
        folder = os.path.dirname(file) or "."
        return (
            f"{file} is one image ({kind}). Give the folder of all images, with a folder for each class if they have "
            f"labels: penstock peek {folder}"
        )
    return ""


def not_the_data(file: str) -> str:
    """Return what a file is, and what to do, if it stands in the place of data whatever its name; else ""."""
    head = _head_of(file)
    found = next((one for one in _STAND_INS if any(head.startswith(magic) for _, magic in one.magic)), None)
    return "" if found is None else f"{file} is {found.name}. {found.advice}"


def _by_magic(head: bytes) -> Iterator[_Other]:
    for one in _OTHERS:
        if any(head[at:].startswith(magic) for at, magic in one.magic):
            yield one


def _head_of(file: str) -> bytes:
    if not os.path.isfile(file):  # opening a named pipe would wait for its writer
        return b""
    try:
        with open(file, "rb") as opened:
            return opened.read(_HEAD)
    except OSError:
        return b""


def _json(file: str, head: bytes) -> str:
    """Return what a JSON document is, and what to do with it."""
    whole = "a JSON document, which has to be read as a whole. "
    text = head.decode(errors="replace").lstrip("\ufeff \t\r\n")
    if re.match(r"\{[^\n]*\}\r?\n\s*\{", text):
        return f"JSON lines. Rename it to {file.removesuffix('.json')}.jsonl, or use Feed.from_json_lines({file!r})"
    if text.startswith("["):
        return (
            f"{whole}Write an object on each line, such as with jq -c '.[]' {file} > {file.removesuffix('.json')}.jsonl"
        )
    if re.search(r'"(annotations|categories|images)"\s*:', text):
        return f"{whole}Read annotations such as those of COCO in a module, as in {recipe('Lists of dicts')}"
    return f"{whole}Read it in a module with json.load, and give a list of samples to Feed(...)"
