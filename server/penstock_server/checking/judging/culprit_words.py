"""Says in words why two runs of a feed differ, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence

from ...worker.isolation.shared_settings import FIX, SEED_FIXES, is_setting
from ..observing.messages import Source
from ..observing.sources import CLOCK, PID, SYSTEM
from .culprit import BEFORE, HASH, SOURCES, Culprit

_GLOBAL_TOO = (
    "the generator (or a transform) takes `rng`, so the global generators are not seeded for it: draw from `rng` "
    "alone, or leave the parameter `rng` out"
)

_IN_ORDER = (
    "take the results of threads and processes in a fixed order, and give each its own random numbers, from `rng` (you "
    "need no prefetcher: workers read ahead)"
)

_FIXES = {
    CLOCK: "let samples depend on the split and on random numbers from `rng` only",
    PID: "let samples depend on the split and on random numbers from `rng` only",
    "random": _GLOBAL_TOO,
    "numpy.random": _GLOBAL_TOO,
    "torch": _GLOBAL_TOO,
    "tensorflow": (
        "draw from `rng` instead of tf.random, or begin each sample with tf.random.set_seed(int(rng.integers(2**31)))"
    ),
    "cv2": "begin each sample with cv2.setRNGSeed(int(rng.integers(2**31)))",
    "polars": (
        "give sample() or shuffle() a seed=, such as int(rng.integers(2**31)), or a fixed number where the module is "
        "imported"
    ),
    "numba": "pass random numbers from `rng` to the compiled function, or seed np.random inside it",
}

_LIBRARIES = {
    "albumentations": "seed it for each sample: augmentations.set_random_seed(int(rng.integers(2**31)))",
    "monai": "seed it for each sample: transform.set_random_state(int(rng.integers(2**31)))",
}

_SEEDED = "random or numpy.random, which Penstock seeds for each batch"
_OF_ITEMS = (
    ("give it a seed, such as np.random.default_rng(0), or, in the generator, draw from `rng`", f"draw from {_SEEDED}"),
    ("draw from the parameter `rng`, which Penstock seeds for each split", f"draw from {_SEEDED}"),
    ("draw from `rng` alone, or leave the parameter `rng` out", "draw from the parameter rng alone in the transform"),
    ("split and on random numbers from `rng` only", f"index and on {_SEEDED}"),
    (
        "keep nothing from one split (or item) to the next: make such objects inside the generator",
        "keep nothing from "
        "one item to the next: let it depend on its index and on numpy.random alone. Make such objects in __getitem__",
    ),
    ("for each sample or each split", "for each item"),
    ("int(rng.integers(2**31))", "np.random.randint(2**31)"),
    ("`rng`", "numpy.random"),
)
"""Words of the advice for generators, and what is right for indexable objects: they get no `rng`."""

_OF_BATCHES = (
    ("in the generator, draw from `rng`", "in batch_transform=, draw from its parameter `rng`"),
    ("the parameter `rng`, which Penstock seeds for each split", "the parameter `rng` of batch_transform="),
    ("split and on random numbers from `rng` only", "samples of its batch and on random numbers from `rng` only"),
    (
        "keep nothing from one split (or item) to the next: make such objects inside the generator",
        "keep nothing from one batch to the next: make such objects inside the function",
    ),
    ("for each sample or each split", "for each batch"),
    ("for each sample", "for each batch"),
    ("each sample", "each batch"),
)
"""The same for `batch_transform=`."""


def cause(culprit: Culprit, *, listing: bool = False) -> tuple[str, str, str]:
    """Return why the runs differ, the place in user code (or an empty text), and what to do.

    `listing`: True if the lists of splits differ, not the samples.
    """
    text, where, fix = _cause(culprit, listing=listing)
    others = _OF_BATCHES if culprit.batches else _OF_ITEMS if culprit.items and not listing else ()
    for words, instead in others:
        fix = fix.replace(words, instead)
    return text, where, fix


def _cause(culprit: Culprit, *, listing: bool) -> tuple[str, str, str]:
    if culprit.kind == SOURCES:
        text, where, fix = _sources(culprit)
        if listing:
            fix = "draw from random or numpy.random, which are seeded before the splits are listed, or sort the list"
        return text, where, fix
    if culprit.kind == HASH:
        return (
            "it depends on the order of a set, or on hash() of text, which PYTHONHASHSEED decides: the two runs had "
            "different values of it",
            "",
            "workers always have PYTHONHASHSEED=0, so their stream is always the same. With workers=0, set it "
            "yourself, or sort the set",
        )
    if culprit.kind == BEFORE:
        return _before(culprit)
    return _unknown(culprit)


def _sources(culprit: Culprit) -> tuple[str, str, str]:
    first = culprit.sources[0]
    named = _named(culprit.sources[:3])
    evidence = "two runs with the same values there agree" if culprit.proven else "one of these, or several together"
    sites = dict.fromkeys(source.site for source in culprit.sources[:3] if source.site)
    return f"the cause is {named}: {evidence}", "; ".join(sites), _fix(first)


def _named(sources: Sequence[Source]) -> str:
    libraries = " or ".join(dict.fromkeys(one.library for one in sources if one.kind == SYSTEM and one.library))
    by = f" in {libraries}" if libraries else ""
    words = {
        SYSTEM: f"the system's random numbers (a generator without a seed{by}, or os.urandom)",
        CLOCK: "the clock",
        PID: "the process id",
    }
    kinds = dict.fromkeys(source.kind for source in sources)
    return " and ".join(
        words.get(kind, f"the random state of {kind}, which Penstock does not seed here") for kind in kinds
    )


def _fix(source: Source) -> str:
    if source.kind == SYSTEM:
        if source.library in _LIBRARIES:
            return _LIBRARIES[source.library]
        if source.library:
            return f"give {source.library} a seed that comes from `rng`, for each sample or each split"
        if source.site.endswith("at import"):
            return "give it a seed, such as np.random.default_rng(0), or, in the generator, draw from `rng`"
        return "draw from the parameter `rng`, which Penstock seeds for each split"
    return _FIXES.get(source.kind, f"seed {source.kind} from `rng` for each sample")


def _before(culprit: Culprit) -> tuple[str, str, str]:
    text = "it depends on what the process read before: when it was read alone, it was the same in every run"
    if culprit.at_once:
        text = (
            "it depends on what the process read before, or on threads or processes that your code starts, which run "
            "in no fixed order: when it was read alone, it was the same in every run"
        )
    if culprit.names:
        text += f". While samples are made, these change: {', '.join(culprit.names)}"
    elif culprit.late:
        text += f". While samples are made, these are imported: {', '.join(culprit.late[:4])}"
    else:
        text += ". (Files that it writes and reads later, such as a cache on the disk, count too)"
    seeded = next((SEED_FIXES[name] for name in culprit.names if name in SEED_FIXES), None)
    if seeded is not None:
        return text, "", f"{seeded}: all generators and transforms in a worker share this state"
    if any(map(is_setting, culprit.names)):
        return text, "", f"{FIX}: all generators that are open in a worker share it"
    fix = (
        "keep nothing from one split (or item) to the next: make such objects inside the generator, or when the "
        "module is imported, and do not change them afterwards"
    )
    return text, "; ".join(culprit.at_once[:3]), f"{fix}; and {_IN_ORDER}" if culprit.at_once else fix


def _unknown(culprit: Culprit) -> tuple[str, str, str]:
    text = "experiments did not show the cause"
    if culprit.sources:
        text += f": the runs differ even with {_named(culprit.sources[:3])} the same in both"
    if culprit.at_once:
        return (
            f"{text}. Your code starts threads or processes, which run in no fixed order",
            "; ".join(culprit.at_once[:3]),
            _IN_ORDER,
        )
    return (
        text,
        "",
        "look for arrays of np.empty() that are not filled, for id() and sets of objects, whose order depends on "
        "memory addresses, for threads and processes that a library starts, and for random numbers of C libraries",
    )
