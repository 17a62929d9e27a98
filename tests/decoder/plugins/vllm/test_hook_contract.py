"""What changed in a version of vLLM is told from its source.

`FOREDRAFT_VLLM_SOURCE` names the folder `vllm` of a version that is not installed, such as that of
an unpacked wheel, to have it compared, too.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decoder.plugins.vllm.hook_contract import (
    ContractError,
    Sources,
    foreign_sources,
    hook_changes,
    request_changes,
    step_of,
)

RUNNER = """
def propose_draft_token_ids(self, scheduler_output, sampled_token_ids, slot_mappings):
    spec_config = self.speculative_config
    if spec_config.method == "ngram":
        drafts = self.drafter.propose(num_spec_tokens, sampled_token_ids)
    elif spec_config.method == "custom_class":
        drafts = cast(Any, self.drafter).propose(
            sampled_token_ids,
            self.input_batch.num_tokens_no_spec,
            self.input_batch.token_ids_cpu,
            slot_mappings=slot_mappings,
        )
    return drafts
"""
BATCH = """
class CachedRequestState:
    req_id: str
    sampling_params: SamplingParams | None

class InputBatch:
    def __init__(self): self._req_ids = []
    @property
    def req_ids(self): return self._req_ids
"""
SAMPLING = """
class SamplingParams(PydanticMsgspecMixin, msgspec.Struct):
    n: int = 1
    extra_args: dict[str, Any] | None = None
"""
KNOWN = Sources(RUNNER, BATCH, SAMPLING)


def test_the_tested_hook_has_not_changed() -> None:
    assert hook_changes(KNOWN) == ""
    assert request_changes(KNOWN) == ""


def test_a_source_that_cannot_be_read_changes_nothing() -> None:
    assert hook_changes(Sources()) == ""
    assert request_changes(Sources()) == ""


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("            sampled_token_ids,\n", "", "calls propose(num_tokens_no_spec, token_ids_cpu"),
        (
            "            self.input_batch.num_tokens_no_spec,\n",
            "            self.input_batch,\n",
            "calls propose(sampled_token_ids, input_batch, token_ids_cpu",
        ),
        (
            "propose(\n            sampled_token_ids,",
            "propose(\n            k,\n            sampled_token_ids,",
            "calls propose(k, sampled_token_ids",
        ),
        ('"custom_class"', '"user_class"', "does not call `propose` for the method 'custom_class'"),
        (".propose(", ".draft(", "does not call `propose`"),
    ],
)
def test_another_call_is_told_as_it_is(old: str, new: str, told: str) -> None:
    assert old in RUNNER
    assert told in hook_changes(replace(KNOWN, runner=RUNNER.replace(old, new)))


def test_arguments_by_name_are_as_good() -> None:
    named = RUNNER.replace("self.input_batch.token_ids_cpu,", "token_ids_cpu=table,")
    assert hook_changes(replace(KNOWN, runner=named)) == ""


@pytest.mark.parametrize(
    ("part", "old", "told"),
    [
        ("batch", "sampling_params", "CachedRequestState has no sampling_params"),
        ("batch", "req_ids", "InputBatch has no req_ids"),
        ("sampling", "extra_args", "SamplingParams has no extra_args"),
    ],
)
def test_what_of_requests_is_gone_is_named(part: str, old: str, told: str) -> None:
    changed = replace(KNOWN, **{part: getattr(KNOWN, part).replace(old, "moved")})
    assert request_changes(changed) == told


def test_the_installed_version_is_as_tested() -> None:
    vllm = pytest.importorskip("vllm", reason="vLLM is not installed: make test-engine-vllm")
    sources = foreign_sources(Path(vllm.__file__).parent)
    assert hook_changes(sources) == request_changes(sources) == ""


def test_a_version_that_is_not_installed_is_as_tested() -> None:
    folder = os.environ.get("FOREDRAFT_VLLM_SOURCE")
    if folder is None:
        pytest.skip("FOREDRAFT_VLLM_SOURCE names no folder")
    sources = foreign_sources(Path(folder))
    assert hook_changes(sources) == request_changes(sources) == ""


LENGTHS = np.array([3, 2, 0], np.int32)
TABLE = np.zeros((3, 8), np.int32)


def test_what_the_hook_passes_is_taken_by_position_and_by_name() -> None:
    by_position = step_of(([[1], []], LENGTHS, TABLE), {"slot_mappings": None})
    by_name = step_of(([[1], []],), {"num_tokens_no_spec": LENGTHS, "token_ids_cpu": TABLE})
    for step in (by_position, by_name):
        assert step.sampled == [[1], []]
        assert step.lengths is LENGTHS
        assert step.table is TABLE


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((np.array([[1]]), LENGTHS, TABLE), "sampled_token_ids is a ndarray instead of a list"),
        (([1], LENGTHS, TABLE), "sampled_token_ids is a list instead of a list of lists"),
        (([[1]], None, TABLE), "num_tokens_no_spec is NoneType"),
        (([[1]] * 4, LENGTHS, TABLE), r"num_tokens_no_spec is ndarray\(3,\) instead"),
        (([[1]], LENGTHS, LENGTHS), r"token_ids_cpu is ndarray\(3,\) instead of an array"),
        (([[1]], LENGTHS.astype(float), TABLE), "num_tokens_no_spec is ndarray"),
        (([[1]], LENGTHS), "it does not pass token_ids_cpu"),
        ((4, [[1]], LENGTHS, TABLE), "it passes 4 positional arguments"),
    ],
)
def test_what_it_passes_otherwise_is_told(given: tuple[Any, ...], told: str) -> None:
    with pytest.raises(ContractError, match=told):
        step_of(given, {})
