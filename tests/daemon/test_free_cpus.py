"""The CPU time that the daemon could have used in addition is added up from readings."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock_server.machine.cgroups import Quota
from penstock_server.machine.cpus import CpuReading
from penstock_server.machine.free_cpus import FreeCpus


def test_free_time_is_idle_time_that_quotas_allow_whenever_it_is_asked_for() -> None:
    now = [0.0]

    def read(seconds: float) -> CpuReading:
        """Four CPUs, of which 2.5 are idle; a quota of 2, of which 1 is used in the first ten seconds and 2 later."""
        used = min(seconds, 10) + 2 * max(0, seconds - 10)
        return CpuReading(seconds, 4, 100 + 2.5 * seconds, 7 + 0.1 * seconds, {Path("/a"): Quota(2, used, 0, 0)})

    cpus = FreeCpus(lambda: now[0], read)
    for now[0] in (0.1, 0.5, 3, 3.2, 10):
        found = cpus.now()
        assert (found.count, found.free_seconds) == (4, pytest.approx(now[0]))
        assert (found.idle_seconds, found.stolen_seconds) == pytest.approx((2.5 * now[0], 0.1 * now[0]))
    now[0] = 30
    assert cpus.now().free_seconds == pytest.approx(10)
    now[0] = 30.0
    assert cpus.now().free_seconds == pytest.approx(10), "no time has passed"
