"""The client's stream alone: values in, values out."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock._state.consumer_state import ConsumerState, Received, Refused
from penstock._state.memory import Pool
from penstock_proto import (
    ConnectionLost,
    EndOfStream,
    GeneratorError,
    IncompleteEpoch,
    Leaf,
    PenstockError,
    ProtocolError,
    StateMismatch,
    StreamClosed,
)
from penstock_proto.batches.layout import SlotLayout
from penstock_proto.messages import Ack, Begin, Begun, End, FeedInfo, LaneEnded, Leave, SentElsewhere, Slab
from tests.fakes.fake_daemon import feed_info

LAYOUT = SlotLayout((), 1, 64)
POOL = Pool(keep=4)


def info(**more: object) -> FeedInfo:
    return feed_info(Leaf("uint8", ()), 4, **more)  # type: ignore[arg-type]


def slab(seq: int, epoch: int) -> Received:
    return Received(Slab(seq, epoch, 0, seq, 1, 4, 64), LAYOUT, POOL.take(64))


@contextlib.contextmanager
def refused(kind: type[PenstockError], match: str) -> Iterator[None]:
    with pytest.raises(Refused) as caught:
        yield
    assert type(caught.value.error) is kind
    assert match in str(caught.value.error)


def test_slabs_are_handed_in_order_and_then_the_end() -> None:
    stream = ConsumerState(info())
    assert stream.begin() == [Begin(0)]
    assert stream.take(0) is None
    stream.queue(slab(0, 0))
    stream.queue(slab(1, 0))
    stream.end_epoch(End(0, 2, 2, 8))
    assert [stream.take(0).slab.seq for _ in range(2)] == [0, 1]  # type: ignore[union-attr]
    assert isinstance(stream.take(0), End)
    assert stream.ack() == Ack(2, (), 1)
    assert stream.ack() is None
    assert stream.begin() == [Begin(1)]


class Interrupt(Exception):
    """In place of KeyboardInterrupt."""


def interrupted_take(stream: ConsumerState, place: int) -> bool:
    """Take a slab of epoch 0, and raise Interrupt where a function begins or ends within it, at this place. Return
    whether there was such a place."""
    left = place

    def interrupt(frame: FrameType, event: str, arg: object) -> None:
        nonlocal left
        left -= frame.f_code is not interrupted_take.__code__
        if not left:
            raise Interrupt

    sys.setprofile(interrupt)
    try:
        stream.take(0)
    except Interrupt:
        pass
    finally:
        sys.setprofile(None)
    return left <= 0


def test_a_reader_that_was_interrupted_anywhere_in_take_misses_nothing() -> None:
    for place in range(1, 1000):
        stream = ConsumerState(info())
        stream.begin()
        stream.queue(slab(0, 0))
        stream.end_epoch(End(0, 1, 1, 4))
        if not interrupted_take(stream, place):
            break
        stream.go_back(0)
        stream.on_disconnected()
        assert (stream.place().batches, stream.go_on_at(stream.place(), 0)) == (0, [Begin(0)]), place
        assert stream.take(0) is None, "the slab comes again"
    assert place > 4


def test_leaving_makes_void_what_came_and_what_comes() -> None:
    stream = ConsumerState(info())
    stream.begin()
    stream.queue(slab(0, 0))
    stream.queue(slab(1, 0))
    stream.take(0)
    assert stream.leave(0) == [Leave(0, 1)]
    assert stream.handed == 2
    stream.queue(slab(2, 0))
    assert stream.handed == 3
    assert stream.begin() == [Begin(1)]
    stream.queue(slab(3, 1))
    assert stream.handed == 3
    assert stream.leave(0) == []


def test_a_newer_iteration_takes_over() -> None:
    stream = ConsumerState(info())
    stream.begin()
    assert stream.begin() == [Leave(0), Begin(1)]
    with refused(StreamClosed, match="a newer one on the same connection"):
        stream.take(0)


def test_an_epoch_whose_end_has_come_is_not_left() -> None:
    stream = ConsumerState(info())
    stream.begin()
    stream.end_epoch(End(0, 0, 0, 0))
    assert stream.leave(0) == []


def test_a_failure_comes_after_the_data_before_it_and_stays() -> None:
    stream, error = ConsumerState(info()), GeneratorError("boom")
    stream.begin()
    stream.queue(slab(0, 0))
    stream.fail(error)
    stream.fail(GeneratorError("later"))
    assert isinstance(stream.take(0), Received)
    for attempt in (lambda: stream.take(0), lambda: stream.take(0), stream.begin):
        with pytest.raises(Refused) as caught:
            attempt()
        assert caught.value.error is error


def test_a_failure_of_an_epoch_that_is_left_before_it_does_not_end_the_stream() -> None:
    stream = ConsumerState(info())
    stream.begin()
    stream.queue(slab(0, 0))
    stream.queue(slab(1, 0))
    stream.fail(GeneratorError("boom"))
    stream.take(0)
    assert stream.error is None
    assert stream.leave(0) == []  # the session has failed, so another one is needed
    assert "boom" in str(stream.passed_by)
    assert stream.begin() == []
    stream.on_disconnected()
    assert stream.passed_by is None
    assert stream.place().epoch == 1
    assert stream.go_on_at(stream.place(), 0) == [Begin(1)]


@pytest.mark.parametrize("begins", [False, True])
def test_a_failure_that_crosses_a_leave_belongs_to_the_epoch_that_was_left(begins: bool) -> None:
    stream = ConsumerState(info())
    stream.begin()
    assert stream.leave(0) == [Leave(0)]
    if begins:
        stream.begin()
    stream.fail(GeneratorError("boom"))
    assert stream.passed_by is not None
    if not begins:
        assert stream.begin() == []
    stream.on_disconnected()
    assert stream.go_on_at(stream.place(), 0) == [Begin(1)]
    stream.fail(GeneratorError("boom"))  # so it was of this epoch
    with refused(GeneratorError, match="boom"):
        stream.take(1)


@pytest.mark.parametrize("answer", ["begun", "slab"])
def test_a_failure_after_the_answer_to_begin_belongs_to_the_new_epoch(answer: str) -> None:
    stream = ConsumerState(info())
    stream.begin()
    stream.begin()
    if answer == "begun":
        stream.on_listed(Begun(1, bytes(32)))
    else:
        stream.queue(slab(0, 1))
        stream.take(1)
    stream.fail(GeneratorError("boom"))
    assert stream.passed_by is None
    with refused(GeneratorError, match="boom"):
        stream.take(1)


@pytest.mark.parametrize("more", [{"shared_from": 0}, {"ranks": 2}])
def test_a_failure_ends_a_stream_that_others_share_at_once(more: dict[str, int]) -> None:
    stream = ConsumerState(info(), **more)  # type: ignore[arg-type]
    stream.begin()
    stream.queue(slab(0, 0))
    stream.fail(GeneratorError("boom"))
    stream.leave(0)
    with refused(GeneratorError, match="boom"):
        stream.begin()


def test_a_failure_that_was_not_reached_is_lost_with_its_connection() -> None:
    stream = ConsumerState(info())
    stream.begin()
    for number in range(3):
        stream.queue(slab(number, 0))
    stream.take(0)
    stream.fail(GeneratorError("boom"))
    stream.on_disconnected()
    assert stream.go_on_at(stream.place(), 0) == [Begin(0)]
    assert stream.take(0) is None
    stream.queue(slab(0, 0))
    assert isinstance(stream.take(0), Received)


def test_batches_that_were_lost_before_a_failure_are_the_error() -> None:
    stream = ConsumerState(info())
    stream.begin()
    stream.queue(slab(0, 0))
    stream.fail(GeneratorError("boom"))
    stream.fail_now(ConnectionLost("gone"))
    with refused(ConnectionLost, match="gone"):
        stream.take(0)


def test_slabs_that_became_void_when_the_daemon_may_not_have_heard_of_it_count_as_not_handed_over() -> None:
    stream = ConsumerState(info(), shared_from=0)
    stream.begin()
    for number in range(4):
        stream.queue(slab(number, 0))
    stream.take(0)
    assert stream.leave(0) == [Leave(0, 1)]
    stream.queue(slab(4, 0))
    stream.on_disconnected()  # and Leave is lost: the others get slabs 1 to 4
    assert stream.handed_before == 1

    stream.go_on_at(stream.place(), 1)
    stream.begin()
    stream.queue(slab(0, 1))
    stream.take(1)
    stream.begin()
    stream.queue(slab(1, 2))  # the daemon has heard that epoch 1 was left
    stream.take(2)
    stream.on_disconnected()
    assert stream.handed_before == 2

    stream.go_on_at(stream.place(), 2)
    stream.queue(slab(0, 2))
    stream.queue(slab(1, 2))
    stream.take(2)
    stream.close(StreamClosed("closed"))
    assert (stream.handed, stream.given) == (2, 1)
    stream.on_disconnected()
    assert (stream.handed_before, stream.given) == (1, 0)


def test_closing_after_a_loss_does_not_change_how_many_slabs_were_handed_over() -> None:
    stream = ConsumerState(info(), shared_from=0)
    stream.begin()
    stream.queue(slab(0, 0))
    stream.take(0)
    stream.on_disconnected()
    stream.close(StreamClosed("closed"))
    assert (stream.handed_before, stream.given) == (1, 0)


def test_slabs_of_a_lost_connection_are_not_handed() -> None:
    stream, error = ConsumerState(info()), GeneratorError("gone")
    stream.begin()
    stream.queue(slab(0, 0))
    stream.fail_now(error)
    with refused(GeneratorError, match="gone"):
        stream.take(0)


@pytest.mark.parametrize("bad", [slab(1, 0), slab(0, 1)])
def test_a_slab_that_was_not_to_come_breaks_the_protocol(bad: Received) -> None:
    stream = ConsumerState(info())
    stream.begin()
    with pytest.raises(ProtocolError, match="slab 0 of epoch 0 was due"):
        stream.queue(bad)


def test_what_comes_behind_the_end_or_was_not_asked_for_changes_nothing() -> None:
    stream = ConsumerState(info())
    stream.begin()
    stream.queue(slab(0, 0))
    stream.end_epoch(End(0, 1, 1, 4))
    for wrong in (
        lambda: stream.queue(slab(1, 0)),
        lambda: stream.on_passed(SentElsewhere(0, 0, 1, 1, 4)),
        lambda: stream.on_passed(LaneEnded(0, 0, 0, 1, 0, b"")),
        lambda: stream.end_epoch(End(0, 1, 1, 4)),
        lambda: stream.end_epoch(End(1, 0, 0, 0)),
        lambda: stream.on_passed(SentElsewhere(1, 0, 0, 1, 4)),
        lambda: stream.on_passed(LaneEnded(1, 0, 0, 0, 0, b"")),
        lambda: stream.on_listed(Begun(1, bytes(32))),
    ):
        with pytest.raises(ProtocolError):
            wrong()
    assert isinstance(stream.take(0), Received)
    assert isinstance(stream.take(0), End)
    assert stream.ack() == Ack(1, (), 1)
    assert stream.progress.newest().batches == 0
    assert stream.progress.newest().epoch == 1


def test_another_list_of_splits_fails_the_stream_and_is_not_taken_into_its_position() -> None:
    stream = ConsumerState(info())
    stream.begin()
    stream.on_listed(Begun(0, bytes(32)))
    stream.on_listed(Begun(0, bytes(32)))
    stream.queue(slab(0, 0))
    stream.take(0)
    stream.on_listed(Begun(0, b"1" * 32))
    with refused(StateMismatch, match="the list of splits of epoch 0 has changed"):
        stream.take(0)
    assert stream.progress.newest().digest == bytes(32)


def test_counts_that_differ_are_an_error_and_no_end() -> None:
    stream = ConsumerState(info())
    stream.begin()
    stream.queue(slab(0, 0))
    stream.end_epoch(End(0, 1, 1, 5))
    stream.take(0)
    with refused(IncompleteEpoch, match="1 batches and 4 rows, but the daemon counted 1, 1 and 5"):
        stream.take(0)


def test_an_epoch_shorter_than_promised_is_an_error() -> None:
    stream = ConsumerState(info(batches=2))
    stream.begin()
    stream.queue(slab(0, 0))
    stream.end_epoch(End(0, 1, 1, 4))
    stream.take(0)
    with refused(IncompleteEpoch, match="had 1 batches and 4 rows, but the feed promises 2"):
        stream.take(0)


def test_the_last_epoch_is_followed_by_the_end_of_the_stream() -> None:
    stream = ConsumerState(info(epochs=1))
    stream.begin()
    with refused(EndOfStream, match="epochs=1"):
        stream.begin()
    stream.queue(slab(0, 0))
    assert isinstance(stream.take(0), Received)  # the refusal did not disturb the open epoch


@given(st.lists(st.sampled_from("slab take begin leave end release".split()), max_size=60))
def test_every_slab_is_accounted_for_once_whatever_happens(steps: list[str]) -> None:
    stream = ConsumerState(info())
    sent, epoch_sent, wanted, ended, taken = 0, 0, -1, True, []
    released: list[int] = []
    for step in steps:
        if step == "begin":
            stream.begin()
            wanted, epoch_sent, ended = wanted + 1, 0, False
        elif step == "slab" and not ended:
            stream.queue(slab(sent, wanted))
            sent, epoch_sent = sent + 1, epoch_sent + 1
        elif step == "end" and not ended:
            stream.end_epoch(End(wanted, epoch_sent, epoch_sent, 4 * epoch_sent))
            ended = True
        elif step == "leave":
            stream.leave(wanted)
        elif step == "take" and wanted >= 0:
            item = stream.take(wanted)
            if isinstance(item, Received):
                taken.append(item.slab.seq)
                assert stream.handed == item.slab.seq + 1
        elif step == "release" and taken and taken[-1] not in released:
            stream.release(taken[-1])
            released.append(taken[-1])
        assert stream.handed <= sent
    assert taken == sorted(set(taken))
    stream.leave(wanted)
    assert stream.handed == sent
    ack = stream.ack()
    assert (ack.handed if ack else 0) == sent
    assert list(ack.released if ack else ()) == released


def test_a_groups_consumer_that_was_cut_off_while_epochs_ended_for_the_others_goes_on_where_they_are() -> None:
    stream = ConsumerState(info(epochs=5), shared_from=1)
    assert stream.begin() == [Begin(1)]
    stream.queue(slab(0, 1))
    assert isinstance(stream.take(1), Received)
    stream.on_disconnected()
    assert stream.go_on_at(stream.place(), 1) == [Begin(1)]  # it is still being read
    stream.on_disconnected()
    assert stream.go_on_at(stream.place(), 3) == []
    assert isinstance(stream.take(1), End)
    assert stream.begin() == [Begin(3)]
    stream.on_disconnected()
    assert stream.go_on_at(stream.place(), 5) == []
    assert isinstance(stream.take(3), End)
    with refused(EndOfStream, "all 5 epochs"):
        stream.begin()
