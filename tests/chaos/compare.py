"""Compares the batches that consumers were handed with the model. Returns the differences in words, or an empty list.

The log of a consumer (reading.py) is a list of events:

    ["batch", [[epoch, split, number, checksum], ...]]    it was handed this batch
    ["end", epoch]  ["break"]  ["resumed"]                the epoch ended; it left the epoch; it resumed from a state
    ["in", epoch]                                         the first batch of a connection follows, in this epoch
    ["not left"]                                          the stream had failed, so the epoch that it left goes on
    ["closed"]  ["over"]                                  it closed; the feed has no more epochs
    ["failed", kind, text]                                the stream failed
    ["wrong", text]                                       a batch is damaged, or is not the batch that it claims to be
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator
from itertools import chain, islice, product
from typing import Any

from .model import Batch, Cuts, Sample, batches, blocks, groups, lanes_of, rows, splits_of
from .sample import ROWS
from .scenario import FeedCase, Job

Event = list[Any]
Epoch = list[Batch]
MOST_BEFORE = 5000
"""The most batches of an epoch that a late consumer may have missed."""


class Known:
    """The epochs of a feed according to the model. Unshuffled epochs are computed batch by batch, when needed."""

    def __init__(self, case: FeedCase, turn: int) -> None:
        self.case, self.turn = case, turn
        self._begun: dict[Any, tuple[Iterator[Batch], Epoch]] = {}

    def exact(self, variant: int, cuts: Cuts, wanted: int) -> Epoch:
        """Return the first `wanted` batches of an epoch, or all if it has fewer."""
        key = variant, tuple(sorted(cuts.items()))
        if key not in self._begun:
            self._begun[key] = batches(self.case, self.turn, variant, cuts), []
        source, known = self._begun[key]
        known += islice(source, max(0, wanted - len(known)))
        return known[:wanted]

    def all_cuts(self, epoch: int, variant: int) -> list[Cuts]:
        """Return all possible cuts of an epoch. A permanent failure always cuts its split, a passing one perhaps."""
        if self.case.on_error != "skip":
            return [{}]
        choices = []
        for failure in self.case.failures:
            theirs = self.case.segment is None and failure.split // 1000 != variant
            ours = failure.epoch in (-1, epoch) and not theirs
            if failure.what == "raise" and ours:
                choices.append(
                    [(failure.split, failure.number)] if not failure.times else [None, (failure.split, failure.number)]
                )
        found = []
        for cut in product(*choices):
            cuts: dict[int, int] = {}
            for split, number in filter(None, cut):
                cuts[split] = min(number, cuts.get(split, number))
            found.append(cuts)
        return found


def without_refused(log: Iterable[Event]) -> list[Event]:
    """Return the log without each "break" that a "not left" takes back."""
    out: list[Event] = []
    for event in log:
        if event[0] == "not left":
            del out[max(at for at, earlier in enumerate(out) if earlier[0] == "break")]
        else:
            out.append(event)
    return out


def words(batch: Batch) -> str:
    shown = ", ".join(f"{split}:{number}" for split, number in batch[:8])
    return f"[{shown}{', ...' if len(batch) > 8 else ''}] ({len(batch)} rows)"


def exactly(expected: Epoch, got: Epoch, complete: bool, where: str) -> list[str]:
    """Compare batch by batch. `complete`: the epoch was read to its end."""
    if got == expected[: len(got)] and (not complete or len(got) == len(expected)):
        return []
    at = next((i for i, (one, other) in enumerate(zip(expected, got, strict=False)) if one != other), None)
    if at is None:
        at = min(len(expected), len(got))
    text = f"{where}, batch {at} of {len(expected)}: "
    if at < len(got) and at < len(expected):
        text += f"{words(got[at])} came instead of {words(expected[at])}"
    elif at < len(got):
        text += f"{words(got[at])} came after the last batch"
    else:
        text += f"the epoch ended, and {words(expected[at])} did not come"
    wanted = expected if complete else expected[: len(got)]
    lost, more = counted(wanted) - counted(got), counted(got) - counted(wanted)
    return [f"{text}; {telling(lost, more, complete)}"]


def counted(epoch: Epoch) -> Counter[Sample]:
    return Counter(sample for batch in epoch for sample in batch)


def telling(lost: Counter[Sample], more: Counter[Sample], complete: bool) -> str:
    said = []
    if lost and complete:
        said.append(f"{lost.total()} samples are lost: {words(tuple(sorted(lost)))}")
    if more:
        said.append(f"{more.total()} came twice or from elsewhere: {words(tuple(sorted(more)))}")
    return "; ".join(said) or "the samples are the same, in another order"


def mixed(
    known: Known, variant: int, cuts: Cuts, got: Epoch, complete: bool, where: str, in_order: bool = True
) -> list[str]:
    """Compare an epoch that is shuffled, or in fast order: each sample once, in full batches, from known lanes."""
    case = known.case
    found = []
    doubled = Counter({sample: n - 1 for sample, n in counted(got).items() if n > 1})
    if doubled:
        found.append(f"{where}: {telling(Counter(), doubled, complete)}")
    if case.kind != "endless":
        all_rows = rows(case, variant, cuts)
        strange = Counter({sample: n for sample, n in counted(got).items() if sample not in all_rows})
        if strange:
            found.append(f"{where}: {telling(Counter(), strange, complete)}")
        missing = Counter(all_rows - counted(got).keys())
        short = missing.total()
        dropped = len(all_rows) % (case.batch_size or 1) if case.drop_remainder else 0
        if complete and short != dropped:
            found.append(
                f"{where}: {short} samples are missing instead of {dropped}: {telling(missing, Counter(), True)}"
            )
    if case.batch_size is not None:
        small = [i for i, batch in enumerate(got) if len(batch) != case.batch_size]
        if case.order == "exact" and small and (small[0] != len(got) - 1 or (not complete and case.kind == "endless")):
            found.append(f"{where}: batch {small[0]} of {len(got)} has {len(got[small[0]])} rows")
        if len(small) > 1:
            found.append(f"{where}: {len(small)} batches are not full")
    if not found and case.order == "fast" and case.order_is_known and case.batch_size is not None:
        found += of_lanes(known, variant, cuts, got, where)
    if not found and in_order and case.order == "exact" and case.shuffle and case.kind in ("segment", "endless"):
        found += of_blocks(known, got, cuts, where)
    return found


def of_lanes(known: Known, variant: int, cuts: Cuts, got: Epoch, where: str) -> list[str]:
    """Compare an epoch in fast order: each batch comes from one lane, or is made of lanes' leftover rows."""
    case, size = known.case, known.case.batch_size or 1
    whole: set[Batch] = set()
    for lane in lanes_of(case, known.turn, variant, cuts):
        few = list(islice(lane, sum(map(len, got)) + size))
        whole |= {tuple(few[at : at + size]) for at in range(0, len(few) - size + 1, size)}
    inside = {sample for batch in whole for sample in batch}
    for at, batch in enumerate(got):
        if batch not in whole and not inside.isdisjoint(batch):
            return [f"{where}, batch {at}: {words(batch)} is neither a batch of a lane nor made of leftovers"]
    return []


def of_blocks(known: Known, got: Epoch, cuts: Cuts, where: str) -> list[str]:
    """Compare the blocks of rows. Segments are not permuted, so the block of each row is known."""
    case, size = known.case, known.case.batch_size or 1
    if any(cuts) or (case.on_error == "skip" and case.failures):
        return []
    lanes = case.lanes if case.kind == "endless" else min(case.lanes, len(list(splits_of(case, 0))))
    room = -(-case.shuffle // (lanes * size)) * size
    made = [blocks(case, lane) for lane in range(lanes)]
    known_blocks: list[list[set[Sample]]] = [[] for _ in range(lanes)]
    at = [0] * lanes

    def block(lane: int, number: int) -> set[Sample]:
        known_blocks[lane] += islice(made[lane], number + 1 - len(known_blocks[lane]))
        return known_blocks[lane][number] if number < len(known_blocks[lane]) else set()

    number = 0
    # `like` has the rows that these batches take from each lane. Mixing changes only the places of the rows.
    for size_of_group, like in groups(case, known.turn):
        together = got[number : number + size_of_group]
        if len(together) < size_of_group:
            break
        batch = tuple(chain.from_iterable(together))
        number += size_of_group
        rest = set(batch if case.batch_size is not None else ((split, row // ROWS) for split, row in batch))
        for lane, count in Counter(split % lanes for split, _ in like).items():
            for place in range(at[lane], at[lane] + (count if case.batch_size is not None else 1)):
                mine = rest & block(lane, place // room)
                if not mine:
                    block_of = f"block {place // room} of lane {lane}"
                    return [f"{where}, up to batch {number}: {words(batch)} has no row of {block_of}"]
                if case.batch_size is not None:
                    rest.discard(min(mine))
                else:
                    rest -= mine
            at[lane] += count if case.batch_size is not None else 1
        if rest:
            return [f"{where}, up to batch {number}: {words(batch)} has rows of blocks whose turn it was not"]
    return []


def single(job: Job, turn: int, log: list[Event], *, late: bool = False) -> list[str]:
    """Compare the log of a consumer that gets the whole stream, or its rest from anywhere on if it came `late`."""
    return _walk(job, Known(job.feed, turn), log, lambda epoch: epoch, late=late)[0]


def from_where(expected: Epoch, got: Epoch) -> Epoch:
    """Return the rest of an epoch, from the first batch that was read on."""
    return expected[expected.index(got[0]) :] if got and got[0] in expected else expected


def rank(job: Job, turn: int, log: list[Event], number: int) -> list[str]:
    """Compare the log of one rank. Rank j mod n gets batch j of an epoch. The last round is dropped, or filled up."""
    world = len(job.consumers)

    def dealt(epoch: Epoch) -> Epoch:
        left = len(epoch) % world
        mine = epoch[: len(epoch) - left][number::world]
        if left and job.together == "pad":
            mine = [*mine, epoch[len(epoch) - left + number % left]]
        return mine

    return _walk(job, Known(job.feed, turn), log, dealt, world)[0]


def _walk(
    job: Job, known: Known, log: list[Event], dealt: Any, world: int = 1, *, late: bool = False
) -> tuple[list[str], int]:
    """Compare each epoch of the log. Return the differences, and the number of epochs that are over."""
    case = job.feed
    found: list[str] = []
    epoch, got = 0, []
    resumed = False
    begins = late

    def over(complete: bool) -> None:
        nonlocal epoch, got, late
        found.extend(_epoch(known, epoch, got, complete, dealt, world, late))
        epoch, got, late = epoch + 1, [], False

    for event in log:
        if event[0] == "over" and resumed and got:  # the state was at the end of the last epoch
            over(True)
        resumed = event[0] == "resumed"
        if event[0] == "batch":
            got.append([tuple(row[:3]) for row in event[1]])
        elif event[0] == "end":
            over(True)
        elif event[0] == "break":
            over(False)
        elif event[0] == "in" and begins:
            epoch, begins = event[1], False
        elif event[0] == "in" and event[1] > epoch:  # the state was at the end of the epoch
            over(True)
        elif event[0] == "wrong":
            found.append(event[1])
        elif event[0] == "over" and begins and case.epochs is not None:
            pass  # the others read the last epoch, so a late job finds none that begins
        elif event[0] == "over" and (case.epochs is None or epoch < case.epochs):
            found.append(f"the feed has no more epochs after {epoch} of {case.epochs}")
        if found:
            return found, epoch
    if got:
        over(False)
    return found, epoch


def _variant(case: FeedCase, got: list[Any]) -> int:
    return got[0][0][1] // 1000 if case.kind == "function" and got else 0


def _labels(case: FeedCase, epoch: int, got: list[Any], where: str) -> list[str]:
    label = epoch if case.labels_epochs else -1
    for at, batch in enumerate(got):
        for row in batch:
            if row[0] != label:
                return [f"{where}, batch {at}: a row is of epoch {row[0]} (split {row[1]}, number {row[2]})"]
    return []


def _expected_most(case: FeedCase, got: list[Any], complete: bool, world: int) -> int:
    return len(got) * world + world if case.kind == "endless" else 10**9


def _epoch(known: Known, epoch: int, got: list[Any], complete: bool, dealt: Any, world: int, late: bool) -> list[str]:
    case, where = known.case, f"epoch {epoch}"
    wrong = _labels(case, epoch, got, where)
    if wrong:
        return wrong
    variant = _variant(case, got)
    best: list[str] = []
    for cuts in known.all_cuts(epoch, variant):
        found = _with_cuts(known, variant, cuts, got, complete, dealt, world, late, where)
        if not found:
            return []
        best = best or found
    return best


def _with_cuts(
    known: Known,
    variant: int,
    cuts: Cuts,
    got: list[Any],
    complete: bool,
    dealt: Any,
    world: int,
    late: bool,
    where: str,
) -> list[str]:
    """Return the differences if splits end where `cuts` says. `late`: the epoch was read from anywhere on."""
    case = known.case
    mine: Epoch = [tuple((split, number) for _, split, number in batch) for batch in got]
    if case.order == "fast" or not case.order_is_known:
        if world > 1:
            return []  # `ranks` compares all of them at once
        return mixed(known, variant, cuts, mine, complete and not late, where, in_order=not late)
    more = MOST_BEFORE if late else 0
    expected = dealt(known.exact(variant, cuts, _expected_most(case, got, complete, world) + more))
    if late:
        expected = from_where(expected, mine)
        if case.kind == "endless":
            expected = expected[: len(mine) + 1]
    return exactly(expected, mine, complete, where)


def ranks(job: Job, turn: int, logs: list[list[Event]]) -> list[str]:
    """Compare each rank alone and, if the order is not known, the batches of all ranks together."""
    found = [f"rank {r}: {text}" for r, log in enumerate(logs) for text in rank(job, turn, log, r)]
    if found or job.feed.order_is_known:
        return found
    known, together = Known(job.feed, turn), _by_epoch(logs)
    ends = Counter(event[1] for log in logs for event in log if event[0] == "end")
    for epoch, batches_of in together.items():
        seen: Counter[Batch] = Counter(batches_of)
        most = 1 if job.together == "drop" else len(logs)  # the last round may be one batch and its copies
        if job.together == "pad":
            batches_of = list(seen)
        variant = batches_of[0][0][0] // 1000 if job.feed.kind == "function" else 0
        if max(seen.values()) > most or seen.total() - len(seen) >= len(logs):
            return [f"epoch {epoch}: {words(max(seen, key=seen.__getitem__))} came {max(seen.values())} times"]
        complete = ends[epoch] == len(logs) and job.together == "pad"
        tries = [
            mixed(known, variant, cuts, _small_last(batches_of), complete, f"epoch {epoch}", False)
            for cuts in known.all_cuts(epoch, variant)
        ]
        if all(tries):
            return tries[0]
        counts = {sum(event[0] == "batch" and event[1][0][0] == epoch for event in log) for log in logs}
        if ends[epoch] == len(logs) and len(counts) > 1:
            return [f"epoch {epoch}: ranks were handed {sorted(counts)} batches"]
    return []


def _small_last(epoch: Epoch) -> Epoch:
    return sorted(epoch, key=len, reverse=True)


def _by_epoch(logs: list[list[Event]]) -> dict[int, Epoch]:
    together: dict[int, Epoch] = {}
    for log in logs:
        for event in log:
            if event[0] == "batch":
                together.setdefault(event[1][0][0], []).append(tuple((row[1], row[2]) for row in event[1]))
    return together


def group(
    job: Job, turn: int, logs: list[list[Event]], killed: Iterable[int] = (), unheard: Iterable[int] = ()
) -> list[str]:
    """Compare a group: each batch goes to one living consumer. `killed` are the numbers of the killed consumers.

    A killed consumer may have been handed a batch that it had no time to log. Its batches over TCP may come again. So
    may the last batches of `unheard` consumers, which closed when their daemon was perhaps killed: as many as the
    daemon may not have heard of.
    """
    killed = set(killed)
    case, known = job.feed, Known(job.feed, turn)
    found = [event[1] for log in logs for event in log if event[0] == "wrong"]
    ended = {event[1] for log in logs for event in log if event[0] == "end"}
    tcp = [consumer.transport == "tcp" for consumer in job.consumers]
    last = [
        [event for event in logs[number] if event[0] == "batch"][-(16 if tcp[number] else 4) :] for number in unheard
    ]
    again = _by_epoch([*(logs[number] for number in killed if tcp[number]), *last])
    for epoch, got in sorted(_by_epoch(logs).items()):
        had = Counter(got)
        had -= Counter(again.get(epoch, [])) & Counter({batch: n - 1 for batch, n in had.items()})
        variant = got[0][0][0] // 1000 if case.kind == "function" else 0
        tries = [
            _dealt_once(known, variant, cuts, epoch, had, epoch in ended, len(killed))
            for cuts in known.all_cuts(epoch, variant)
        ]
        if all(tries):
            found += tries[0]
    return found


def _dealt_once(
    known: Known, variant: int, cuts: Cuts, epoch: int, had: Counter[Batch], ended: bool, may_miss: int
) -> list[str]:
    """Compare the batches of a group's epoch: each came once, and all of them came if the epoch ended."""
    where = f"epoch {epoch} of the group"
    expected = known.exact(variant, cuts, 10**9)
    doubled = Counter({batch: n - 1 for batch, n in had.items() if n > 1})
    if doubled:
        return [f"{where}: {doubled.total()} batches came twice, {words(next(iter(doubled)))} is the first"]
    if not known.case.order_is_known:
        found = mixed(known, variant, cuts, _small_last(list(had)), False, where, False)
        missing = [()] * max(0, len(expected) - len(had))
    else:
        found = [f"{where}: {words(batch)} is not a batch of it" for batch in had if batch not in set(expected)][:1]
        missing = [batch for batch in expected if batch not in had]
    if ended and len(missing) > may_miss:
        first = words(missing[0])
        found.append(f"{where}: it ended, and {len(missing)} of {len(expected)} batches came to nobody: {first}")
    return found


def quiet(
    case: FeedCase, logs: list[list[Event]], reference: list[Event], compares_order: bool, late: Container[int] = ()
) -> list[str]:
    """Compare the numbers that the generator drew, and the shuffled order, with a quiet run of one worker. `late`: the
    numbers of the logs of consumers that came late."""
    sums: dict[Any, int] = {}
    epochs: dict[int, Epoch] = {}
    at = 0
    for event in reference:
        if event[0] == "batch":
            epochs.setdefault(at, []).append(tuple((row[1], row[2]) for row in event[1]))
            for row in event[1]:
                sums[(at, row[1], row[2])] = row[3]
        elif event[0] in ("end", "break"):
            at += 1
    for number, log in enumerate(logs):
        at, place = 0, 0
        begins = within = number in late
        for event in log:
            if event[0] == "batch":
                epoch = event[1][0][0] if case.labels_epochs else at
                for row in event[1]:
                    if sums.get((epoch, row[1], row[2]), row[3]) != row[3]:
                        return [f"epoch {epoch}: sample {row[1]}:{row[2]} has other random numbers than in a quiet run"]
                batch = tuple((row[1], row[2]) for row in event[1])
                like = epochs.get(epoch, [])
                if within:
                    place, within = like.index(batch) if batch in like else len(like), False
                if compares_order and place < len(like) and like[place] != batch:
                    return [f"epoch {epoch}, batch {place}: {words(batch)} came, in a quiet run {words(like[place])}"]
                place += 1
            elif event[0] in ("end", "break"):
                at, place, within = at + 1, 0, False
            elif event[0] == "in" and (begins or event[1] > at):
                at, place, begins = event[1], 0, False
    return []
