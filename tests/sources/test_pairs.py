"""Files of several patterns that belong together."""

from __future__ import annotations

import pytest

from penstock_server.sources.npy.pairs import pairs


def test_files_belong_together_if_the_wildcards_stand_for_the_same() -> None:
    images, labels = ["i/1.npy", "i/10.npy", "i/2.npy"], ["l/10_l.npy", "l/1_l.npy", "l/2_l.npy"]
    assert pairs([("i/*.npy", images), ("l/*_l.npy", labels)]) == [
        ("i/1.npy", "l/1_l.npy"),
        ("i/10.npy", "l/10_l.npy"),
        ("i/2.npy", "l/2_l.npy"),
    ]


@pytest.mark.parametrize(
    ("pattern", "file", "other", "partner"),
    [
        ("**/x-?.npy", "a/b/x-1.npy", "**/y-?.npy", "a/b/y-1.npy"),
        ("**/x.npy", "x.npy", "**/y.npy", "y.npy"),
        ("a[0-9]/x*", "a4/x5", "b[0-9]/y*", "b4/y5"),
        ("[!a]x", "bx", "[!a]y", "by"),
        ("s3://one/(*)+.npy", "s3://one/(3)+.npy", "gs://two/*.npy", "gs://two/3.npy"),
        ("file:///x-*", "/x-\n", "/y-*", "/y-\n"),
        ("x.npy", "x.npy", "y.npy", "y.npy"),
        ("d//x-*", "d/x-1", "./d/y-*", "./d/y-1"),
        ("d//e///x-*", "d//e/x-1", "d/e/y-*", "d/e/y-1"),
    ],
)
def test_every_wildcard_counts(pattern: str, file: str, other: str, partner: str) -> None:
    assert pairs([(pattern, [file]), (other, [partner])]) == [(file, partner)]
    if pattern != "x.npy":
        strange = partner.replace("1", "2").replace("a/", "c/").replace("3", "4").replace("5", "6").replace("by", "cy")
        if strange == partner:
            strange = partner + "2" if partner.endswith("\n") else f"d/{partner}"
        with pytest.raises(ValueError, match="belongs to no file of another leaf: none matches"):
            pairs([(pattern, [file]), (other, [strange])])


def test_numbers_that_are_padded_in_one_of_them_are_not_paired_by_their_places() -> None:
    with pytest.raises(ValueError, match=r"x-1 belongs to no file of another leaf: none matches y-\* with '1'"):
        pairs([("x-*", ["x-1", "x-10", "x-2"]), ("y-*", ["y-01", "y-02", "y-10"])])


def test_patterns_with_other_wildcards_are_paired_by_their_places() -> None:
    assert pairs([("x-*", ["x-1", "x-2"]), ("*-y-*", ["1-y-1", "1-y-2"])]) == [("x-1", "1-y-1"), ("x-2", "1-y-2")]
    with pytest.raises(ValueError, match=r"x-\* matches 2 files and \*-y-\* matches 1: each file of one leaf needs"):
        pairs([("x-*", ["x-1", "x-2"]), ("*-y-*", ["1-y-1"])])


def test_a_name_that_is_no_pattern_may_have_the_characters_of_one() -> None:
    assert pairs([("x[1].npy", ["x[1].npy"]), ("y[2].npy", ["y[2].npy"])]) == [("x[1].npy", "y[2].npy")]


def test_a_file_whose_wildcards_cannot_be_told_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"xa/1 matches x\*, but what its wildcards stand for cannot be told"):
        pairs([("x*", ["xa/1"]), ("y*", ["ya/1"])])


def test_a_circumflex_in_brackets_is_one() -> None:
    assert pairs([("[^!]x", ["^x"]), ("[!a]y", ["^y"])]) == [("^x", "^y")]
