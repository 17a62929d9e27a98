"""How many answers ended at a limit, in words for whoever waits for them."""

from dataclasses import dataclass

from decoder.generate import Answer, FinishReason
from decoder.sampling.grammar import Grammar
from decoder.statistics import counted


@dataclass(slots=True)
class Endings:
    """Counts answers, and those that ended because a limit was reached.

    Attributes:
        max_new_tokens: the limit that was asked for.
        pattern: what answers match once they are whole, if anything.
        num_answers: all of them.
        num_limited: those with so many tokens as were asked for.
        num_full: those that filled the room that the model has for prompt and output.
        num_unmatched: those of both whose pattern was not complete.
    """

    max_new_tokens: int
    pattern: Grammar | None = None
    num_answers: int = 0
    num_limited: int = 0
    num_full: int = 0
    num_unmatched: int = 0

    def count(self, result: Answer) -> None:
        """Count an answer in."""
        self.num_answers += 1
        if result.finish_reason is not FinishReason.LENGTH:
            return
        if len(result.token_ids) < self.max_new_tokens:
            self.num_full += 1
        else:
            self.num_limited += 1
        if self.pattern is not None and not self.pattern.is_match(result.token_ids):
            self.num_unmatched += 1

    def summary(self) -> str:
        """Return what is to be told behind the figures; nothing where no limit was reached."""
        limit = counted(self.max_new_tokens, "token")
        parts = [
            self._told(self.num_limited, f"ended at the limit of {limit}"),
            self._told(self.num_full, "ended at the model's limit for prompt and output"),
            self._told(self.num_unmatched, "broke off before the pattern was complete"),
        ]
        return "".join(f"; {part}" for part in parts if part)

    def _told(self, count: int, what: str) -> str:
        share = "" if self.num_answers == 1 else f"{count} of {self.num_answers} answers "
        return f"{share}{what}" if count else ""
