"""Rules with one error each, which the tests must find."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray

from decoder.sampling import choice, processors as paths, rule
from decoder.sampling.verification import PassContext, uniforms
from tests.oracles.exactness.drafts import Drafts
from tests.oracles.exactness.trials import Case, TrialOutcome, run


def _by_the_drafts_probability(
    _p: torch.Tensor, q: torch.Tensor, points: torch.Tensor
) -> torch.Tensor:
    return points < q


def _the_target_itself(target: torch.Tensor, _proposal: torch.Tensor) -> torch.Tensor:
    return target


def _residual_as_it_is(target: torch.Tensor, proposal: torch.Tensor) -> torch.Tensor:
    return (target - proposal).clamp(min=0)


def _proposal_as_it_is(
    proposal: torch.Tensor, tokens: torch.Tensor, is_gone: torch.Tensor
) -> torch.Tensor:
    return proposal.scatter(1, tokens, proposal.gather(1, tokens).masked_fill(is_gone, 0))


def _one_number(seed: int, context: PassContext, count: int) -> NDArray[np.float64]:
    return np.repeat(uniforms(seed, context, 1), count)


_before_constraint = paths.Processing.before_constraint


def _prompt_and_output(
    processing: paths.Processing,
    tokens: torch.Tensor,
    scores: torch.Tensor,
    _num_prompt_tokens: int,
) -> torch.Tensor:
    return _before_constraint(processing, tokens, scores, 0)


_BUSH: Final = Case("temperature 1", "bush", "drawn", coupled=False)
_CHAIN: Final = Case("temperature 1", "chain", "certain", coupled=True)
_PENALTY: Final = Case("presence penalty", "mixed", "certain", coupled=True)

PLANTED: Final[dict[str, tuple[Case, Any, str, Callable[..., Any]]]] = {
    "accepting with the draft's probability": (
        _BUSH,
        choice,
        "accepts",
        _by_the_drafts_probability,
    ),
    "drawing from the target, not the residual": (_BUSH, choice, "residual", _the_target_itself),
    "residual not renormalised": (_BUSH, choice, "residual", _residual_as_it_is),
    "proposal not renormalised": (_BUSH, choice, "without", _proposal_as_it_is),
    "one random number for all depths": (_CHAIN, rule, "uniforms", _one_number),
    "a presence penalty on the prompt": (
        _PENALTY,
        paths.Processing,
        "before_constraint",
        _prompt_and_output,
    ),
}
"""What is wrong, where it shows, and what is put in which function's place."""

SORTED: Final = "siblings in the order of their tokens"


@contextmanager
def planted(error: str) -> Iterator[Case]:
    """Have an error in the rule for the block's time; gives the case where it shows."""
    case, owner, name, wrong = PLANTED[error]
    with patch.object(owner, name, wrong):
        yield case


def run_planted(draws: int) -> dict[str, TrialOutcome]:
    """Test every planted error."""
    outcomes = {}
    for error in PLANTED:
        with planted(error) as case:
            outcomes[error] = run(case, draws)
    outcomes[SORTED] = run(_BUSH, draws, drafts=Drafts("bush", "drawn", sorts_siblings=True))
    return outcomes
