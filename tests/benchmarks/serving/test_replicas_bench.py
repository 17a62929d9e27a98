"""The measurement of replicas, in short: what is drained and killed under it costs no output."""

import pytest

from benchmarks.serving.replicas import measure
from tests.patience import can_be_kept, must_hold


@pytest.mark.faults
@can_be_kept
def test_engines_notice_little_of_services_that_come_and_go() -> None:
    report = measure(seconds=4, every_s=4, engines=2, deadline_s=0.05, pass_s=0.01, width=2)
    seen = report["engines"]
    must_hold(seen["outputs"] > 4, "sequences are decoded to their end")
    must_hold(seen["wrong"] == 0, "outputs are those of plain decoding")
    must_hold(report["tracebacks"] == 0, "services end without a traceback")
    must_hold(seen["accepted"] > seen["steps"], "services draft")
    assert (report["ends"]["drains"], report["ends"]["kills"]) == (1, 1)
    assert report["ends"]["longest_drain_s"] < 6  # sessions have moved, so it ends early
    assert seen["late"] <= 0.01 * seen["steps"] + report["control"]["late"]
