"""How benchmarks/report.py updates the page, and how runs are compared. No benchmark runs here."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import compare
import gpu
import hosts
import hosts_tables
import report
import sharing
import sharing_others
import transport
from contestants import prebuilt
from measure import Quartiles, ratios

PAGE = """Ours.

<!-- transport: begin -->
old
<!-- transport: end -->

<!-- recovery: begin -->
<!-- recovery: end -->
"""


def test_the_report_replaces_what_is_between_its_marks_and_keeps_the_rest():
    once = report.replaced(PAGE, "transport", "new")
    assert once == PAGE.replace("\nold\n", "\n\nnew\n\n")
    assert report.replaced(once, "transport", "new") == once


@pytest.mark.parametrize("page", ["", PAGE + PAGE, PAGE.replace("transport: end", "transport: ende")])
def test_the_report_refuses_a_page_without_one_place_for_it(page):
    with pytest.raises(ValueError, match="needs one <!-- transport: begin -->"):
        report.replaced(page, "transport", "new")


def test_the_page_has_a_place_for_each_kind():
    page = report.PAGE.read_text()
    for kind in report.KINDS:
        report.replaced(page, kind, "new")


def test_a_loader_is_compared_with_the_unit_of_the_same_round():
    runs = [{"per_second": 30.0}, None, {"per_second": 80.0}, {"per_second": 5.0}]
    units = [{"per_second": 10.0}, {"per_second": 1.0}, {"per_second": 20.0}, None]
    assert ratios(runs, units) == [3.0, 4.0]
    assert Quartiles.of([1.0, 2.0, 3.0, 4.0, 5.0]) == Quartiles(3.0, 2.0, 4.0)


def test_checkouts_are_compared_within_a_round_in_all_that_a_case_has():
    now = [{"per_second": 2.0, "reduce_per_second": 3.0, "trainer_cpu": 0.1, "workers_cpu": 0.3, "memory": 5}] * 3
    before = [{**run, "per_second": speed, "memory": 4} for run, speed in zip(now, (1.0, 2.0, 4.0), strict=True)]
    cases = {
        "pipeline": {"now": now, "before": before},
        "100K/2:tcp": {"now": trials([1.0, 6.0]), "before": trials([2.0, 3.0])},
    }
    head, *rows = compare.table({"cases": cases}).splitlines()
    assert head.split()[-8:] == ["reduce", "trainer's", "CPU", "workers'", "CPU", "memory", "first", "batch"]
    assert rows[0].split() == ["pipeline", "3", "1", "(0.75-1.5)", "1", "1", "1", "1.25", "-"]
    assert rows[1].split() == ["100K/2:tcp", "2", "1.25", "(0.875-1.62)", "1.25", "(0.875-1.62)", "1", "-", "-", "-"]


def trials(speeds, cpu=0.001):
    extra = {"read_per_second": None, "latency": None}
    return [{"per_second": one, "trainer_cpu": cpu, "reduce_per_second": one * 2, **extra} for one in speeds]


def entry(nbytes, leaves, **results):
    return {"bytes": nbytes, "leaves": leaves, "results": results, "skipped": {}}


def test_figures_say_whether_what_is_aimed_at_was_reached():
    ours = trials([90.0, 70.0, 80.0], 0.0012)
    one = {"penstock-local": ours, "memcpy": trials([100.0] * 3), "generator": trials([1.0])}
    many = {"penstock-local": trials([45.0, 35.0, 40.0])}
    found = transport.figures([entry(16 << 20, 1, **one), entry(16 << 20, 64, **many)])
    assert [(one["name"], one["median"], one["reached"]) for one in found] == [
        ("shared memory, GB/s over memcpy's, 16 MiB", 0.8, True),
        ("trainer's CPU less bare from_generator's, ms a batch of 16 MiB", pytest.approx(0.2), True),
        ("16 MiB in 64 leaves, time over that of one leaf", 2.0, False),
    ]


def test_a_table_has_the_columns_that_were_measured_and_who_was_skipped():
    measured = {**entry(100 << 10, 2, memcpy=trials([5.0])), "skipped": {"msgpack-zmq": "not installed"}}
    head, columns, *rows = transport.table(measured).splitlines()
    assert head == "100 KiB a batch in 2 leaves; median (quartiles)"
    assert columns.split()[:2] == ["GB/s", "batches/s"]
    assert "latency" not in columns
    assert [row.strip().partition("  ")[0] for row in rows] == [
        "memcpy, one thread",
        "msgpack-numpy over ZMQ: skipped, not installed",
    ]


@pytest.mark.parametrize("text", ["16M/0", "0K", "16", "1K/3", "1K/128", "M/1", "1K/1+"])
def test_batches_that_cannot_be_are_refused(text):
    with pytest.raises(transport.argparse.ArgumentTypeError):
        transport.loads_of(text)


@pytest.mark.parametrize("load", transport.loads_of("1K/1+2+64"), ids=str)
def test_a_damaged_batch_is_noticed(load):
    batch = next(prebuilt.stream(load, prebuilt.pool(load)))
    prebuilt.check(batch, load)
    prebuilt.leaves(batch)[-1][-1] = np.nan
    with pytest.raises(ValueError, match="damaged"):
        prebuilt.check(batch, load)


def test_ways_of_feeding_a_gpu_are_compared_within_a_round():
    rates = {"tensor": [10.0, 20.0, 40.0], "penstock": [9.0, 18.0, 36.0], "generator": [5.0, 10.0, 20.0]}
    result = {
        "gpu": {"name": "H200", "driver": "580"},
        "framework": "torch",
        "labels": {"tensor": "a tensor", "penstock": "Penstock", "generator": "a generator"},
        "model": "ResNet-50",
        "batch_size": 128,
        "workers": 4,
        "feeds": [
            {
                "work": "jpeg",
                "trials": {name: [{"per_second": one, "idle": None} for one in some] for name, some in rates.items()},
                "pinning": {"reason": "no driver"},
            }
        ],
    }
    where, table, copies = gpu.tables(result)
    assert where == "ResNet-50, PyTorch, H200, driver 580"
    assert "no driver" in copies
    head, columns, *rows = table.splitlines()
    assert head == "samples are decoded from JPEG and cropped; batches of 128, 4 workers; median (quartiles)"
    assert columns.split() == ["steps/s", "images/s", "of", "the", "tensor", "idle,", "%"]
    assert [row.split()[-2] for row in rows] == ["1", "0.9", "0.5"]


def test_copies_that_could_not_be_timed_say_why():
    assert "no driver" in gpu.pinning_table({"reason": "no driver"})
    times = {"bytes": 10**9, "pageable": [0.1], "registered": [0.04], "registering": [0.2]}
    head, _, pageable, registered = gpu.pinning_table(times).splitlines()
    assert "registering it took 200 ms" in head
    assert (pageable.split()[-2:], registered.split()[-2:]) == (["100", "10"], ["40", "25"])


def test_a_stream_has_recovered_when_it_has_the_speed_again_that_it_keeps():
    before, after = np.arange(0, 5, 0.01), np.arange(7, 17, 0.02)
    found = hosts.effect([*before, *after], 5.0, batch=8)
    assert found["before"] == pytest.approx(800, rel=0.01)
    assert found["after"] == pytest.approx(400, rel=0.05)
    assert found["pause"] == pytest.approx(2.0)
    assert 1.75 <= found["recovered"] <= 2.0
    assert not any(found["steps"][:7])


def test_services_on_hosts_are_compared_with_penstock_in_the_same_round_and_with_one_host_of_their_own():
    def case(loader, hosts, speeds, failures=()):
        return {"loader": loader, "hosts": hosts, "megabytes_per_second": speeds, "failures": [*failures]}

    cases = [case("penstock", 1, [20.0, 10.0]), case("ray", 1, [10.0, 10.0])]
    cases += [case("penstock", 2, [40.0, 20.0]), case("ray", 2, [None, 10.0], ["it hung"])]
    found = {"versions": {"ray": "2.60.0"}, "left_out": {"tfdata": "No module"}, "cases": cases}
    _, *rows = hosts_tables.others_table(found).splitlines()
    assert [row.split()[-6:] for row in rows[1:4:2]] == [
        ["10", "(10-10)", "1", "(1-1)", "0.75", "(0.5-1)"],
        ["10", "(10-10)", "0.5", "(0.5-0.5)", "0.5", "(0.5-0.5)"],
    ]
    assert [row.strip() for row in rows[4:] if row] == [
        "Ray Data, 2 hosts: failed, it hung",
        "tf.data service: left out, No module",
        "Ray Data 2.60.0",
    ]


def test_a_trainer_on_a_third_machine_is_compared_with_one_at_the_head_and_keys_with_none():
    near = [{"megabytes_per_second": 20.0 * hosts, "head_ms_a_megabyte": 0.5} for hosts in (1, 2)]
    far = [{"megabytes_per_second": 15.0 * hosts, "head_ms_a_megabyte": 1.5} for hosts in (1, 2)]
    places = {"head": near, "trainer": far}
    found = [{"hosts": hosts, "at": at, "runs": [runs[hosts - 1]]} for hosts in (1, 2) for at, runs in places.items()]
    rows = hosts_tables.third_table(found).splitlines()
    assert rows[-1].split()[-8:] == "30 (30-30) 1 (1-1) 0.75 (0.75-0.75) 1.5 (1.5-1.5)".split()
    runs = {False: [500.0, 400.0], True: [250.0, 100.0]}
    found = [
        {
            "batch_bytes": 1 << 20,
            "keys": keys,
            "runs": [
                {"batches_per_second": speed, "head_ms_a_megabyte": 1.0, "host_ms_a_megabyte": 2.0} for speed in speeds
            ],
        }
        for keys, speeds in runs.items()
    ]
    rows = hosts_tables.keys_table(found).splitlines()
    assert rows[-1].split()[-8:-4] == "184 (105-262) 0.375 (0.25-0.5)".split()


def test_jobs_are_compared_with_one_that_is_alone_and_does_not_share():
    def case(jobs, share, speeds):
        figures = {"workers_cpu": 0.002, "cpu": 0.003, "made": 1.0, "memory": 1 << 20, "moved": 0}
        return {"feed": "big", "jobs": jobs, "share": share, "per_second": speeds, **figures}

    cases = [case(1, False, [50.0]), case(1, True, [100.0]), case(2, True, [40.0, 50.0]), case(2, False, [25.0, 25.0])]
    _, _, *rows = sharing.cases_table(cases).splitlines()
    assert [row.split()[:6] for row in rows] == [
        ["1", "True", "100.0", "100.0", "2.00", "2.00"],
        ["1", "False", "50.0", "50.0", "1.00", "1.00"],
        ["2", "True", "45.0", "40.0", "0.90", "0.80"],
        ["2", "False", "25.0", "25.0", "0.50", "0.50"],
    ]


def test_streams_of_jobs_that_differ_end_the_benchmark():
    sharing.check([(0, 1, [1, 2, 3]), (0, 1, [1]), (0, 2, [1, 3]), (1, 2, [2, 4])], "big")
    with pytest.raises(SystemExit, match="big: two jobs got different streams, from batch 1 on"):
        sharing.check([(0, 1, [1, 2, 3]), (0, 1, [1, 4])], "big")
    with pytest.raises(SystemExit, match="from batch 2 on"):
        sharing.check([(0, 1, [1, 2, 3]), (0, 2, [1, 4])], "big")


def test_jobs_are_told_apart_by_their_processes():
    case = {"feed": "big", "share": True, "per_second": [4.0], "workers_cpu": 0.1, "cpu": 0.2, "made": 1.0}
    case |= {"memory": 1 << 20, "moved": 0}
    cases = [{**case, "jobs": 3, "processes": [1, 2, 4]}, {**case, "jobs": 1}, {**case, "jobs": 1, "share": False}]
    *_, alone, last = sharing.cases_table(cases).splitlines()
    assert alone.split()[:3] == ["1", "False", "4.0"]
    assert last.startswith("  1, 2 ranks, 4 ranks ")


def test_a_loader_that_cannot_share_is_listed_with_the_reason():
    found = {"alone": 10.0, "per_second": [5.0] * 3, "missed": [0, 0, 2], "unordered": [0, 0, 0]}
    _, row, note = sharing_others.table({"tensorsocket": found, "tfdata": "not installed"}).splitlines()
    assert row.split() == "TensorSocket 10.0 0.50 0.50 0, 0, 2 all 0, 0, 0".split()
    assert note.strip() == "tf.data service: could not run, not installed"
