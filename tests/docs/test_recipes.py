"""Each recipe of the page "Recipes" runs as printed, where its libraries are installed.

The extra `dev` has them, but for `torch torchvision webdataset`: PyTorch with its CUDA libraries has 3 GB.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import pickle
import re
import sys
import tarfile
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import penstock
from penstock_server import Feed, Shuffle
from tests.docs.pages import DOCS, Block, blocks_of
from tests.reference.one_stream import digests

if importlib.util.find_spec("polars"):  # its threads and descriptors stay as long as the process
    import polars

    polars.DataFrame({"x": [1]}).lazy().select("x").collect()

ROWS = 120
RECIPES = [block for block in blocks_of(DOCS / "recipes.md") if block.kind == "python" and "Feed" in block.text]
NEEDS = {"PIL": "pillow", "sklearn": "scikit-learn", "tensorflow_datasets": "tensorflow-datasets"}


def needs(block: Block) -> list[str]:
    """Return the libraries that a recipe imports, and those that the Parquet files and polars need."""
    found = re.findall(r"^(?:import|from) (\w+)", block.text, re.MULTILINE)
    own = [name for name in found if name not in {*sys.stdlib_module_names, "penstock_server", "numpy"}]
    also = ["pyarrow"] * ("parquet" in block.text or "polars" in own) + ["torch"] * ("webdataset" in own)
    return [*own, *also]


def name_of(block: Block) -> str:
    above = (DOCS / "recipes.md").read_text().split("\n## ")
    heading = next(part.partition("\n")[0] for part in above if block.text in part)
    return f"{heading}, line {block.line}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that recipes read."""
    Image = pytest.importorskip("PIL.Image")
    folder = tmp_path_factory.mktemp("recipes")
    images = np.random.default_rng(0).integers(0, 255, (ROWS, 64, 64, 3), dtype=np.uint8)
    labels = np.arange(ROWS) % 10
    np.save(folder / "images.npy", images)
    np.save(folder / "labels.npy", labels)
    encoded = []
    for image in images:
        stream = io.BytesIO()
        Image.fromarray(image).save(stream, "png")
        encoded.append(stream.getvalue())
    for number, data in enumerate(encoded):
        (folder / "photos" / str(labels[number])).mkdir(parents=True, exist_ok=True)
        (folder / "photos" / str(labels[number]) / f"{number}.png").write_bytes(data)
    for shard in range(3):
        with tarfile.open(folder / f"train-{shard}.tar", "w") as tar:
            for number in range(shard, ROWS, 3):
                for ending, data in (("png", encoded[number]), ("cls", b"%d" % labels[number])):
                    member = tarfile.TarInfo(f"{number:03}.{ending}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    lines = [f"{i},{'' if i % 7 else 'Oslo'},2024-01-{i % 28 + 1:02}" for i in range(ROWS)]
    (folder / "people.csv").write_text("age,city,joined\n" + "\n".join(lines) + "\n")
    found = [{"image_id": i // 2, "bbox": [i, 1, 2, 3], "category_id": i % 5} for i in range(0, 2 * ROWS, 3)]
    coco = {"images": [{"id": i, "file_name": f"{i}.png"} for i in range(ROWS)], "annotations": found}
    (folder / "coco.json").write_text(json.dumps(coco))
    (folder / "train.pkl").write_bytes(pickle.dumps({"image": images, "label": labels}))
    (folder / "corpus").mkdir()
    for part in range(3):
        (folder / "corpus" / f"{part}.txt").write_text("".join(f"line {i}\n" for i in range(part, ROWS, 3)))
    with h5py.File(folder / "samples.h5", "w") as file:
        for number in range(ROWS):
            file[f"{number:03}/image"], file[f"{number:03}/label"] = images[number], labels[number]
    write_recordings(folder)
    if importlib.util.find_spec("pydicom") is not None:
        write_scans(folder)
    if importlib.util.find_spec("av") is not None:
        write_videos(folder, images)
    if importlib.util.find_spec("pyarrow") is not None:
        write_parquet(folder, encoded, labels)
    return folder


def write_recordings(folder: Path) -> None:
    for number in range(40):
        path = folder / "recordings" / ("high", "low")[number % 2] / f"{number}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        tone = np.sin(np.arange(8_000 + 1_000 * number) * (0.1 + number / 1000)) * 20_000
        with wave.open(str(path), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(16_000)
            file.writeframes(tone.astype("<i2").tobytes())


def write_scans(folder: Path) -> None:
    pydicom: Any = importlib.import_module("pydicom")
    (folder / "scans").mkdir()
    for number in range(12):
        scan = pydicom.Dataset()
        scan.file_meta = pydicom.dataset.FileMetaDataset()
        scan.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
        scan.SOPClassUID, scan.SOPInstanceUID = pydicom.uid.CTImageStorage, pydicom.uid.generate_uid()
        scan.Rows, scan.Columns, scan.SamplesPerPixel, scan.PhotometricInterpretation = 4, 4, 1, "MONOCHROME2"
        scan.BitsAllocated, scan.BitsStored, scan.HighBit, scan.PixelRepresentation = 16, 16, 15, 0
        scan.PixelData = np.full((4, 4), number, "<u2").tobytes()
        scan.save_as(folder / "scans" / f"{number}.dcm", enforce_file_format=True)


def write_videos(folder: Path, images: Any) -> None:
    av: Any = importlib.import_module("av")
    (folder / "videos").mkdir()
    for number in range(12):
        with av.open(str(folder / "videos" / f"{number}.mp4"), "w") as file:
            stream = file.add_stream("mpeg4", rate=10)
            stream.width = stream.height = 64
            stream.pix_fmt = "yuv420p"
            for image in images[number : number + 20 + number]:
                file.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
            file.mux(stream.encode())


def write_parquet(folder: Path, encoded: list[bytes], labels: Any) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    photos = [{"bytes": data, "path": f"{number}.png"} for number, data in enumerate(encoded)]
    parquet.write_table(pa.table({"image": photos, "label": labels}), folder / "photos.parquet")
    turns = [[{"role": "user", "said": f"word {n}"} for n in range(number % 4)] for number in range(ROWS)]
    tokens = [[list(range(n)) for n in range(number % 4)] for number in range(ROWS)]
    parquet.write_table(pa.table({"turns": turns, "tokens": tokens}), folder / "chats.parquet")
    for part in range(3):
        parquet.write_table(pa.table({"age": np.arange(part, ROWS, 3)}), folder / f"people-{part}.parquet")


def offline(monkeypatch: pytest.MonkeyPatch, folder: Path, libraries: list[str]) -> None:
    """Let nothing be downloaded, and no thread stay."""
    if importlib.util.find_spec("tqdm") is not None:
        importlib.import_module("tqdm").tqdm.monitor_interval = 0
    if "datasets" in libraries:
        datasets: Any = importlib.import_module("datasets")
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
    if "tensorflow_datasets" in libraries:
        tfds: Any = importlib.import_module("tensorflow_datasets")
        builder = tfds.testing.DummyDataset(data_dir=str(folder / "tfds"))
        builder.download_and_prepare(file_format="array_record")
        monkeypatch.setattr(tfds, "data_source", lambda name, split: builder.as_data_source(split=split))


def streams_of(feed: Feed) -> Iterator[list[str]]:
    """Yield the digests of the batches of two epochs."""
    with penstock.connect(feed, workers=0) as connection:
        for _ in range(2):
            yield digests(connection.batches())


@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.parametrize("block", RECIPES, ids=name_of)
def test_a_recipe_runs_as_printed_and_gives_the_same_stream_again(
    block: Block, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries = needs(block)
    for library in libraries:
        pytest.importorskip(library, reason=f"{NEEDS.get(library, library)} is not installed")
    folder = request.getfixturevalue("folder")
    monkeypatch.chdir(folder)
    offline(monkeypatch, folder, libraries)
    space: dict[str, Any] = {"__name__": "recipe"}
    exec(compile("\n" * block.line + block.text, "recipes.md", "exec"), space)
    feeds = [value for value in space.values() if isinstance(value, Feed)]
    assert feeds
    for feed in feeds:
        first = list(streams_of(feed))
        assert all(first)
        assert list(streams_of(feed)) == first
        shuffles = Shuffle.of(feed.shuffle).samples > 0
        assert (first[0] != first[1]) == shuffles
