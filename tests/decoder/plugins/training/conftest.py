import pytest

from decoder.plugins.training import course, head_trainer
from tests.decoder.plugins.training.teaching import StepClock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StepClock:
    """Count the time of trainings in steps, which are small."""
    made = StepClock()
    for module in (course, head_trainer):
        monkeypatch.setattr(module, "time", made)
    monkeypatch.setattr(head_trainer, "BATCH_TOKENS", 256)
    return made
