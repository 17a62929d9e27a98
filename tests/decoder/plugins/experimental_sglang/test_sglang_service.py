"""Drafts of a service that is killed in the middle."""

import pytest

from decoder.engines.engine_sequences import EngineSequences
from decoder.plugins.experimental_sglang.corpus import DrafterCorpus
from retriever.client.resilient import ResilientDrafter
from tests.decoder.plugins.experimental_sglang.sglang_decoding import Request, plain, step
from tests.retriever.conftest import start_service, stop_service

WIDTH = 8


@pytest.mark.faults
def test_decoding_goes_on_when_the_service_is_killed() -> None:
    process, address = start_service("--address", "127.0.0.1:0")
    try:
        with ResilientDrafter(address, deadline_s=0.5, local=False) as drafter:
            assert drafter.wait(60)
            corpus = DrafterCorpus(EngineSequences(drafter), WIDTH)
            requests = [Request.of(str(seed), [seed, 1, 2, 3]) for seed in range(3)]
            num_steps = [steps_until(60, corpus, requests)]
            process.kill()
            process.wait()
            num_steps.append(steps_until(120, corpus, requests))
            corpus.erase_match_state([request.rid for request in requests])
    finally:
        stop_service(process)
    for request in requests:
        wanted = plain(request.origin_input_ids_unpadded, len(request.output_ids))
        assert list(request.output_ids) == wanted
    assert num_steps[0] < 50  # with drafts
    assert num_steps[1] > num_steps[0]  # without
    assert corpus.num_errors == 0
    assert len(corpus) == 0


def steps_until(num_tokens: int, corpus: DrafterCorpus, requests: list[Request]) -> int:
    count = 0
    while min(len(request.output_ids) for request in requests) < num_tokens:
        step(corpus, requests, WIDTH)
        count += 1
    return count
