"""How long a speculator is taught, and what; `decoder.training.course` teaches it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CourseOptions:
    """How much is taught, and for how long.

    Attributes:
        minutes: for recording, starting, training and judging a head together.
        num_tokens: tokens of outputs to record, if half of the time suffices.
        own_share: share of them that the target writes itself, where there are other outputs.
        max_new_tokens: of an answer that it writes.
        held_out_share: of the prompts that judge and are not taught.
        num_columns: tokens that the head may draft, the most frequent ones.
        seed: of all that is random.
    """

    minutes: float = 50.0
    num_tokens: int = 1_000_000
    own_share: float = 0.7
    max_new_tokens: int = 224
    held_out_share: float = 0.05
    num_columns: int = 8192
    seed: int = 0
