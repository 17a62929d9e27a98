"""A service at its ceiling for some seconds refuses, makes room, and says what it has."""

from benchmarks.serving.ceiling import Pressed, press

CEILING = 150 << 20


def test_a_service_at_its_ceiling_says_what_it_has() -> None:
    pressed = press(seconds=10.0, max_bytes=CEILING, num_tenants=3)
    assert pressed.status == 0
    assert pressed.answers["ok"] > 100
    assert pressed.answers["max_bytes"] + pressed.answers["max_tenant_bytes"] > 0
    assert CEILING / 2 < max(pressed.reserved) <= CEILING
    off = sorted(map(abs, pressed.off))
    assert off[len(off) // 2] < 0.12  # 5% at a gibibyte, see the program; tens of MiB are threads'


def test_differences_are_parts_of_what_is_resident() -> None:
    figures = Pressed([90.0, 104.0], [100.0, 100.0], [50.0, 60.0]).figures(100)
    assert figures["largest_difference"] == figures["p95_difference"] == 1.0 - 0.9
    assert figures["reserved_of_ceiling"] == [0.5, 0.6]
