"""No step waits longer than it may, whatever its deadline, while the server is late every time."""

import time

import numpy as np
import pytest

from retriever.client.conversation import FailOpen
from retriever.client.resilient import ResilientDrafter
from retriever.drafter import DraftRequest
from tests.patience import ROUNDS, can_be_kept
from tests.retriever.service.decodes import PROMPT, proxy_to, wait_until

NUM_LATE = 8


def late_steps(
    address: str, deadline_s: float, width: int, num_late: int = NUM_LATE
) -> list[float]:
    """Decode sequences whose server is late at each step; return how long each took."""
    waits_s, length = [], len(PROMPT)
    names = [f"s{at}" for at in range(width)]
    with ResilientDrafter(address, deadline_s=deadline_s) as drafter:
        assert drafter.wait(60)
        for name in names:
            drafter.open(name, PROMPT)
        for _ in range(num_late):
            # Else it is not asked.
            assert wait_until(lambda: drafter.wait(0.0) and drafter.has_answered(address))
            length += 1
            step = [DraftRequest(name, np.array([3], np.int32), length, 8) for name in names]
            began = time.monotonic()
            trees = drafter.draft(step)
            waits_s.append(time.monotonic() - began)
            assert any(len(tree) for tree in trees)  # made locally
        assert set(drafter.fail_opens) == {FailOpen.TIMEOUT}
        assert drafter.fail_opens.total() == width * num_late
    return waits_s


@pytest.mark.faults
@pytest.mark.parametrize("deadline_s", [0.01, 0.02, 0.05, 0.1])
@pytest.mark.parametrize("width", [1, 64])
@can_be_kept
def test_late_step_ends_at_its_deadline(service: str, deadline_s: float, width: int) -> None:
    """What is late because the machine is busy comes in other steps in another round."""
    least_s = np.full(NUM_LATE, np.inf)
    with proxy_to(service, delay_s=1.3 * deadline_s) as proxy:
        for _ in range(4 * ROUNDS):  # one is enough on a machine with nothing else to do
            waits_s = late_steps(proxy.address, deadline_s, width)
            least_s = np.minimum(least_s, waits_s)
            if least_s.max() < 1.2 * deadline_s:
                return
    pytest.fail(f"a step is late in every round: {least_s}")
