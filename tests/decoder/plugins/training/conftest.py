from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.decoder.plugins.training.teaching import StepClock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> "StepClock":
    """Count the time of trainings in steps, which are small."""
    # Here, as this file is loaded where the plugin is absent, too.
    from decoder.plugins.training import course, head_trainer  # noqa: PLC0415
    from tests.decoder.plugins.training.teaching import StepClock  # noqa: PLC0415

    made = StepClock()
    for module in (course, head_trainer):
        monkeypatch.setattr(module, "time", made)
    monkeypatch.setattr(head_trainer, "BATCH_TOKENS", 256)
    return made
