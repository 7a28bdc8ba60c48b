"""`Feed.from_folder`: folders of images, with a subfolder for each class."""

from __future__ import annotations

import os
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock_server import Feed, ImageDecoder
from penstock_server.sources import registry
from penstock_server.sources.images import pixels
from tests.conftest import Serve
from tests.reference.one_stream import one_stream

PIL = pytest.importorskip("PIL.Image")

CLASSES = {"cat": 12, "dog": 20, "emu": 5}


def save(path: Path, value: int, shape: tuple[int, ...] = (6, 8, 3), **options: Any) -> Path:
    """Write an image with one value."""
    path.parent.mkdir(parents=True, exist_ok=True)
    PIL.fromarray(np.full(shape, value, np.uint8)).save(path, **options)
    return path


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write photos/cat/0.png and so on. Image i of all, in order, has the value i."""
    monkeypatch.chdir(tmp_path)
    value = 0
    for name, count in CLASSES.items():
        for number in range(count):
            save(tmp_path / "photos" / name / f"{number:02}.png", value)
            value += 1
    return tmp_path / "photos"


def items(feed: Feed) -> list[Any]:
    """Return all samples, by index."""
    source: Any = feed.generate
    return [source[index] for index in range(len(source))]


def images(*args: Any, **options: Any) -> list[Any]:
    return items(Feed.from_folder(*args, batch_size=4, **options))


def test_labels_are_the_places_of_the_sorted_folders(photos: Path) -> None:
    samples = images("photos")
    assert [int(image[0, 0, 0]) for image, _ in samples] == list(range(37))
    assert [int(label) for _, label in samples] == [0] * 12 + [1] * 20 + [2] * 5
    source: Any = Feed.from_folder("photos", batch_size=4).generate
    assert source.labels.tolist() == [0] * 12 + [1] * 20 + [2] * 5
    image, label = samples[0]
    assert (image.dtype, image.shape, label.dtype) == (np.uint8, (6, 8, 3), np.int32)
    assert Feed.from_folder("photos", batch_size=4).generate.classes == ("cat", "dog", "emu")  # type: ignore[union-attr]


def test_each_epoch_is_a_permutation_with_any_workers_through_a_kill_and_a_resume(photos: Path, serve: Serve) -> None:
    source = """
        import os
        from penstock_server import Feed
        leaves = {"x": "image", "y": "label"}
        feed = Feed.from_folder(os.environ["DATA"], leaves, size=(4, 4), batch_size=3, shuffle=1, seed=3)
        """
    batches = one_stream(serve, source, photos)
    values = np.concatenate([batch["x"][:, 0, 0, 0] for batch in batches])
    assert sorted(values) == list(range(37))
    assert values.tolist() != sorted(values)
    labels = np.repeat(np.arange(3), [*CLASSES.values()])
    assert np.concatenate([batch["y"] for batch in batches]).tolist() == labels[values].tolist()


def test_a_folder_without_folders_has_no_labels(photos: Path) -> None:
    assert [int(image[0, 0, 0]) for image in images("photos/cat")] == list(range(12))
    with pytest.raises(ValueError, match="photos/cat has no subfolders, so its images have no labels"):
        images("photos/cat", ("image", "label"))


def test_leaves_choose_the_columns(photos: Path) -> None:
    sample = images("photos", {"p": "path", "in": ("label",)})[12]
    assert (sample["p"], int(sample["in"][0])) == ("dog/00.png", 1)
    with pytest.raises(ValueError, match="has the columns image, label, path, got 'labels'"):
        images("photos", "labels")


def test_deeper_images_belong_to_the_upper_folder_and_what_is_no_image_is_left_out(photos: Path) -> None:
    save(photos / "dog" / "more" / "deep" / "x.PNG", 200)
    save(photos / "loose.png", 99)
    save(photos / ".cache" / "x.png", 99)
    (photos / "cat" / "._00.png").write_bytes(b"of a Mac")
    (photos / "cat" / "notes.txt").write_text("x")
    (photos / "dog" / "circle").symlink_to(photos / "dog")
    (photos / "none").mkdir()
    samples = images("photos", ("image", "label", "path"))
    assert [path for *_, path in samples if "/" in path][-6] == "dog/more/deep/x.PNG"
    assert len(samples) == 38
    assert Feed.from_folder("photos", batch_size=4).generate.classes == ("cat", "dog", "emu", "none")  # type: ignore[union-attr]


def test_a_part_for_validation_has_the_share_of_each_class_and_no_image_twice(photos: Path) -> None:
    def paths(part: str, **options: Any) -> list[str]:
        return images("photos", "path", validation=0.25, part=part, **options)

    train, validation = paths("train"), paths("validation")
    assert sorted(train + validation) == images("photos", "path")
    assert [sum(path.startswith(name) for path in validation) for name in CLASSES] == [3, 5, 1]
    assert paths("validation", part_seed=1) != validation
    save(photos / "dog" / "new.png", 0)
    assert len({*validation} - {*paths("validation")}) <= 1, "new images move almost none"
    with pytest.raises(ValueError, match=r'part must be "train" or "validation" with validation=0\.25'):
        paths("test")
    with pytest.raises(ValueError, match="needs validation=, the share"):
        images("photos", part="train")


class TestPixels:
    def test_sizes_are_made_by_stretching_cutting_or_padding(self, tmp_path: Path) -> None:
        wide = np.zeros((10, 40, 3), np.uint8)
        wide[:, 15:25] = 200
        PIL.fromarray(wide).save(tmp_path / "a.png")
        stretch, crop, pad = (images(tmp_path, size=(10, 10), resize=how)[0] for how in ("stretch", "crop", "pad"))
        assert stretch.shape == crop.shape == pad.shape == (10, 10, 3)
        assert (stretch[:, 0] == 0).all()
        assert (stretch[:, 5] > 150).all()
        assert (crop == 200).all(), "the middle"
        assert (pad[:3] == 0).all()
        assert (pad[5, 5] > 150).all()

    def test_images_of_several_sizes_need_one(self, tmp_path: Path) -> None:
        save(tmp_path / "a.png", 1)
        save(tmp_path / "b.png", 2, (5, 8, 3))
        with pytest.raises(ValueError, match=r"b\.png is 5 x 8 pixels \(height x width\).*size=\(224, 224\)"):
            images(tmp_path)
        assert [image.shape for image in images(tmp_path, batching="pad")] == [(6, 8, 3), (5, 8, 3)]

    def test_the_size_is_that_of_the_first_image_that_can_be_read(self, tmp_path: Path) -> None:
        (tmp_path / "a.png").write_bytes(b"")
        for name in "bc":
            save(tmp_path / f"{name}.png", 1)
        save(tmp_path / "d.png", 2, (5, 8, 3))
        source: Any = Feed.from_folder(tmp_path, batch_size=2, on_error="skip").generate
        assert source[1].shape == source[2].shape == (6, 8, 3)
        with pytest.raises(OSError, match=r"a\.png cannot be decoded"):
            source[0]
        with pytest.raises(ValueError, match=r"d\.png is 5 x 8 pixels .*b\.png is 6 x 8"):
            source[3]

    def test_all_modes_become_one(self, tmp_path: Path) -> None:
        colour = PIL.fromarray(np.full((6, 8, 3), (10, 100, 200), np.uint8))
        colour.save(tmp_path / "a.png")
        colour.convert("P", palette=PIL.Palette.ADAPTIVE).save(tmp_path / "b.png")
        colour.convert("RGBA").save(tmp_path / "c.png")
        colour.convert("CMYK").save(tmp_path / "d.jpg", quality=100)
        for image in images(tmp_path):
            assert np.abs(image.astype(int) - (10, 100, 200)).max() <= 3
        assert {image.shape for image in images(tmp_path, mode="L")} == {(6, 8, 1)}
        assert {image.shape for image in images(tmp_path, mode="RGBA")} == {(6, 8, 4)}

    def test_images_of_16_bits_are_not_cut_off(self, tmp_path: Path) -> None:
        deep = np.arange(48, dtype=np.uint16).reshape(6, 8) * 1000
        PIL.fromarray(deep).save(tmp_path / "a.png")
        np.testing.assert_array_equal(images(tmp_path, mode="I;16")[0][:, :, 0], deep)
        assert images(tmp_path, mode="I;16", size=(3, 4))[0].max() > 40_000
        with pytest.raises(ValueError, match=r'a\.png has more than 8 bits for each pixel.*give mode="I;16"'):
            images(tmp_path)
        save(tmp_path / "b.png", 1)
        with pytest.raises(ValueError, match=r"b\.png does not have 16 bits"):
            images(tmp_path, mode="I;16")

    @pytest.mark.parametrize(("kind", "numbers"), [(2, 3), (4, 2), (6, 4)])
    def test_png_files_with_colours_of_16_bits_are_not_cut_off(self, tmp_path: Path, kind: int, numbers: int) -> None:
        rows = (b"\0" + bytes(8 * numbers * 2)) * 6
        parts = [(b"IHDR", struct.pack(">IIBBBBB", 8, 6, 16, kind, 0, 0, 0)), (b"IDAT", zlib.compress(rows))]
        data = b"\x89PNG\r\n\x1a\n"
        for name, part in [*parts, (b"IEND", b"")]:
            data += struct.pack(">I", len(part)) + name + part + struct.pack(">I", zlib.crc32(name + part))
        (tmp_path / "a.png").write_bytes(data)
        for mode in ("RGB", "RGBA", "L", "I;16"):
            with pytest.raises(ValueError, match=r"a\.png has 16 bits for each number .*: convert the file to 8 bits"):
                images(tmp_path, mode=mode)

    def test_photos_are_upright_as_viewers_show_them(self, tmp_path: Path) -> None:
        image = np.zeros((40, 80, 3), np.uint8)
        image[:, :40] = 250  # bright on the left
        exif = PIL.Exif()
        exif[0x0112] = 6  # turn clockwise
        PIL.fromarray(image).save(tmp_path / "a.jpg", exif=exif, quality=95)
        (turned,) = images(tmp_path)
        assert turned.shape == (80, 40, 3)
        assert turned[:30].mean() > 200 > 50 > turned[50:].mean(), "bright above"
        assert images(tmp_path, size=(20, 10))[0][:8].mean() > 200
        assert images(tmp_path, upright=False)[0].shape == (40, 80, 3)

    def test_large_jpegs_are_decoded_at_a_part_of_their_size(self, tmp_path: Path) -> None:
        ramp = np.broadcast_to(np.linspace(0, 255, 640, dtype=np.uint8)[None, :, None], (480, 640, 3))
        PIL.fromarray(ramp.copy()).save(tmp_path / "a.jpg", quality=95)
        whole = np.asarray(PIL.open(tmp_path / "a.jpg").resize((64, 48), PIL.Resampling.BILINEAR))
        assert np.abs(images(tmp_path, size=(48, 64))[0].astype(int) - whole).max() <= 4

    @pytest.mark.parametrize("damage", ["cut", "empty", "text"])
    def test_a_damaged_image_is_named(self, photos: Path, damage: str) -> None:
        bad = save(photos / "dog" / "03.jpg", 5, (64, 64, 3))
        bad.write_bytes({"cut": bad.read_bytes()[:300], "empty": b"", "text": b"<html>"}[damage])
        with pytest.raises(OSError, match=r"photos/dog/03\.jpg cannot be decoded: .+\. Replace it, or leave it out"):
            images("photos", size=(8, 8))

    def test_an_image_may_not_claim_any_size(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        save(tmp_path / "a.png", 1)
        monkeypatch.setattr(pixels, "MOST_PIXELS", 48)
        assert len(images(tmp_path)) == 1
        monkeypatch.setattr(pixels, "MOST_PIXELS", 47)
        with pytest.raises(ValueError, match=r"a\.png has 8 x 6 pixels, and at most 47 are read: cut it into tiles"):
            images(tmp_path)
        monkeypatch.setattr(PIL, "MAX_IMAGE_PIXELS", 5)
        with pytest.raises(OSError, match=r"a\.png cannot be decoded: it claims more than the 47 pixels that are read"):
            images(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 224}, r"size must be \(height, width\) in pixels, such as \(224, 224\), got 224"),
        ({"size": (0, 5)}, r"size must be \(height, width\)"),
        ({"mode": "rgb"}, "mode must be one of 'RGB', 'RGBA', 'L', 'I;16', got 'rgb'"),
        ({"resize": "fit"}, "resize must be one of 'stretch', 'crop', 'pad', got 'fit'"),
        ({"validation": 2}, "validation is the share of the images to set aside, 0 to 1, got 2"),
        ({"splits": [1]}, "from_folder divides the files itself: leave splits= out"),
    ],
)
def test_an_option_that_cannot_work_is_refused(photos: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        images("photos", **options)


def test_a_folder_that_is_no_dataset_is_named(photos: Path) -> None:
    save(photos.parent / "both" / "train" / "a" / "0.png", 1)
    save(photos.parent / "both" / "val" / "a" / "0.png", 1)
    (photos.parent / "notes").mkdir()
    (photos.parent / "notes" / "a.txt").write_text("x")
    for folder, message in {
        "both": r"the folders in both look like parts of a dataset.*train, val.*give one of them, such as both/train",
        "notes": r"notes has no images, that is, no files that end in \.jpg.*It has 1 \.txt\.",
        "absent": "absent: no such folder in /",
        "notes/a.txt": "a.txt cannot be listed: Not a directory",
        "s3://bucket/train": "is a URL, and folders of images must be local",
    }.items():
        with pytest.raises((OSError, ValueError), match=message):
            images(folder)
    with pytest.raises(ValueError, match="a feed has one folder of images"):
        images(["photos", "both"])


def test_a_feed_can_be_sent_to_workers(photos: Path) -> None:
    source: Any = Feed.from_folder("photos", batch_size=4, size=(4, 4)).generate
    os.rename(photos, photos.with_name("moved"))
    assert len(pickle.loads(pickle.dumps(source))) == 37, "with the list that the trainer saw"


def test_a_decoder_reads_bytes_wherever_they_come_from(photos: Path) -> None:
    decoder = ImageDecoder(size=(3, 4), mode="L")
    data = (photos / "dog" / "00.png").read_bytes()
    assert decoder(data).tolist() == [[[12]] * 4] * 3
    assert pickle.loads(pickle.dumps(decoder)) == decoder
    with pytest.raises(OSError, match=r"an image of 50 bytes cannot be decoded: .+\. Replace it, or leave it out"):
        decoder(data[:50])
    with pytest.raises(ValueError, match="mode must be one of"):
        ImageDecoder(mode="BGR")


def test_a_folder_has_the_format_of_most_of_its_files(photos: Path) -> None:
    found = registry.format_of("photos")
    assert found is not None
    assert found.name == "folder of images"
    np.save(photos.parent / "x.npy", np.zeros(3))
    for number in range(40):
        np.save(photos / f"{number}.npy", np.zeros(3))
    assert registry.format_of("photos") is None
