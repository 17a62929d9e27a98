"""Logs on disk: what is read is what was written, and kinds are told apart."""

from typing import Any

import numpy as np
import pytest

from decoder.plugins.estimate.options import NO_FIELD
from decoder.plugins.estimate.token_log import MAX_KINDS, OTHERS, token_log
from retriever.errors import TraceError
from retriever.traces.traces import Trace

Rows = list[tuple[Trace, dict[str, Any]]]


def trace(prompt: int, output: int, seed: int = 0) -> Trace:
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, 1 << 31, prompt + output).astype(np.int32)
    return Trace(drawn[:prompt], drawn[prompt:])


def test_records_come_back_as_written_each_time() -> None:
    rows: Rows = [
        (trace(3, 5, 1), {"task": "a"}),
        (trace(0, 2, 2), {"task": "b"}),
        (trace(7, 0, 3), {"task": "a"}),
    ]
    with token_log(iter(rows)) as log:
        for _ in range(2):
            back = list(log)
            assert [record.kind for record in back] == ["a", "b", "a"]
            for record, (written, _row) in zip(back, rows, strict=True):
                assert record.trace.prompt.tolist() == written.prompt.tolist()
                assert record.trace.output.tolist() == written.output.tolist()
        assert (log.num_records, log.num_tokens, log.field) == (3, 7, "task")


@pytest.mark.parametrize(
    ("row", "field", "kind"),
    [
        ({"model": "m", "category": "c"}, None, "c"),
        ({"model": "m"}, None, "m"),
        ({"model": "m"}, NO_FIELD, "all"),
        ({"prompt": "p"}, None, "all"),
        ({"tier": 3, "model": "m"}, "tier", "3"),
        ({"request": {"model": "m"}, "response": {}}, None, "m"),
    ],
)
def test_the_field_of_kinds_is_found_or_as_stated(
    row: dict[str, Any], field: str | None, kind: str
) -> None:
    with token_log([(trace(1, 2), row)], field) as log:
        assert log.kinds == [kind]


def test_a_field_that_is_not_there_is_answered_with_those_that_are() -> None:
    with (
        pytest.raises(TraceError, match=r"--by tier: .*prompt, model"),
        token_log([(trace(1, 2), {"prompt": "", "model": ""})], "tier"),
    ):
        pass


def test_kinds_beyond_what_a_screen_shows_are_one() -> None:
    rows: Rows = [(trace(1, 2), {"kind": f"k{number}"}) for number in range(40)]
    with token_log(rows) as log:
        assert log.kinds == [*(f"k{number}" for number in range(MAX_KINDS)), OTHERS]
        assert sum(record.kind == OTHERS for record in log) == 40 - MAX_KINDS


def test_a_log_without_two_tokens_to_draft_is_refused() -> None:
    with pytest.raises(TraceError, match="two tokens"), token_log([(trace(9, 1), {})]):
        pass
