"""Answers ListSplits: lists the splits of an epoch, and reads the feed's first sample if its spec is not known."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Any

from msgspec import structs

from penstock_proto import messages as m
from penstock_proto.spec import Spec

from ...feed.combined.zipped import zip_warnings
from ...feed.options.plan_sizes import segment_count
from ...worker_state.activity import ActivityPage
from ..isolation.randomness import GlobalRandomness
from ..reading.first_sample import Probe
from ..reading.loaded_feed import LoadedFeed
from ..reading.split_list import list_splits, write_list
from ..verification.file_versions import FileVersions
from .mixed_feed import MixedLists


def answer_listing(
    message: m.ListSplits,
    feed: LoadedFeed,
    randomness: GlobalRandomness,
    page: ActivityPage,
    send: Callable[[m.SplitsListed, int | None], None],
) -> None:
    """List the splits, look at the first sample, and send both, the list as a memfd.

    Raises:
        FeedError: there are no splits, none yields a sample, or one cannot be pickled.
        GeneratorError, SpecError: user code raised, or what it yields cannot be served.
    """
    if feed.parts:
        _answer_mixed(message, feed, randomness, page, send)
        return
    plan, probe = feed.plan, Probe(feed, randomness, page, message.run)
    if plan.length is not None:
        spec, nbytes = probe.look_at_item()
        identity = f"indexable {plan.length}" + ("" if plan.block is None else f" block {plan.block}")
        send(_without_list(message.run, 0, identity, spec, nbytes, feed.first), None)
        return
    if plan.segment is not None:
        count = segment_count(plan)
        spec, nbytes = probe.look_at_splits(range(count), message.epoch)
        identity = f"segments {plan.segment} {plan.samples}"
        answer = _without_list(message.run, count, identity, spec, nbytes, feed.first)
        send(structs.replace(answer, sample_spec=_sample_spec(feed)), None)
        return
    if feed.cache is not None:
        feed.cache.tidy()
    splits = list_splits(feed.declared, plan, message.epoch, randomness, page, message.run)
    spec, nbytes = probe.look_at_splits(splits, message.epoch)
    answer = m.SplitsListed(
        run=message.run,
        count=len(splits),
        nbytes=0,
        digest=b"",
        spec=spec,
        sample_nbytes=nbytes,
        first=feed.first,
        warnings=zip_warnings(feed.declared, plan.name),
        sample_spec=_sample_spec(feed),
    )
    _send_list(answer, splits, FileVersions.of([(feed.declared, splits)]), page, send)


def _sample_spec(feed: LoadedFeed) -> Spec | None:
    """Return the spec of a sample before `batch_transform`, if there is one in lanes."""
    return feed.sample_spec if feed.has_lane_batches else None


def _answer_mixed(
    message: m.ListSplits,
    feed: LoadedFeed,
    randomness: GlobalRandomness,
    page: ActivityPage,
    send: Callable[[m.SplitsListed, int | None], None],
) -> None:
    lists = MixedLists(feed, message.epoch, randomness, page, message.run)
    spec, nbytes = lists.look(message.epoch, randomness, page, message.run)
    answer = m.SplitsListed(
        run=message.run,
        count=lists.count,
        nbytes=0,
        digest=b"",
        spec=spec,
        sample_nbytes=nbytes,
        first=feed.first,
        warnings=lists.warnings,
    )
    _send_list(answer, lists.shared, lists.versions, page, send)


def _send_list(
    answer: m.SplitsListed,
    splits: list[Any],
    versions: FileVersions,
    page: ActivityPage,
    send: Callable[[m.SplitsListed, int | None], None],
) -> None:
    """Write the list to a memfd, and send `answer` with the memfd, its length and its digest."""
    page.enter(answer.run, -1, "pickling the splits")
    try:
        fd, length, digest = write_list(splits, versions)
    finally:
        page.leave()
    try:
        send(structs.replace(answer, nbytes=length, digest=digest), fd)
    finally:
        os.close(fd)


def _without_list(
    run: int, count: int, identity: str, spec: Spec | None, nbytes: int, first: m.FirstSample | None
) -> m.SplitsListed:
    """Return the answer for a feed that has no list. The digest of `identity` stands for the list's."""
    return m.SplitsListed(
        run=run,
        count=count,
        nbytes=0,
        digest=hashlib.sha256(identity.encode()).digest(),
        spec=spec,
        sample_nbytes=nbytes,
        first=first,
    )
