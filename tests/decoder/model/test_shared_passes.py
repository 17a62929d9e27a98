"""Two processes share a model's passes, and only the first one decides what is read."""

import os
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from functools import cache, partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from queue import Empty, SimpleQueue
from traceback import format_exc
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

from decoder.budget.budget import FixedBudget, MeasuredBudget
from decoder.budget.cost_store import CostStore, known_costs
from decoder.budget.costs import CostSurface
from decoder.budget.pass_timing import measure_costs
from decoder.drafters.draft_model import DraftModel
from decoder.drafters.following import NoDrafter
from decoder.engines.transformers.custom_generate import Foredraft
from decoder.errors import (
    DecoderBusyError,
    DecoderError,
    OutOfMemoryError,
    SharedPassError,
    UnsupportedModelError,
)
from decoder.loop import Decoder, Request
from decoder.model.capability_check import ModelVerdict
from decoder.model.compatibility import Capability
from decoder.model.passes import Reading
from decoder.model.ranks import Ranks, ranks_of
from decoder.model.target import Target
from decoder.observation import ObservedPass
from decoder.sampling.rule import accept_rule
from decoder.sampling.sampling_settings import SamplingSettings
from decoder.sampling.verification import AcceptRule, accept_greedy
from retriever.drafter import Drafter
from retriever.tree import DraftTree
from tests.decoder.decoding import (
    ScriptedDrafter,
    decoded,
    oracle_tree,
    plainly,
    prompt_of,
    tiny_llama,
)

NUM_TOKENS = 16
PROMPTS = [prompt_of(length, seed=length) for length in (3, 9, 5, 14, 7, 11)]
PATIENCE_S = 240.0


@cache
def truths() -> list[list[int]]:
    """Return what follows each of the prompts."""
    return [plainly(tiny_llama(), prompt, NUM_TOKENS) for prompt in PROMPTS]


def truth(prompt: list[int], num_tokens: int = NUM_TOKENS) -> list[int]:
    return truths()[PROMPTS.index(prompt)][:num_tokens]


def drafting(rank: int) -> Drafter:
    """Draft the truth among wrong branches, at each process another tree."""
    rng = np.random.default_rng(rank)

    def guess(tokens: list[int], budget: int) -> DraftTree:
        for prompt in PROMPTS:
            if tokens[: len(prompt)] == prompt:
                rest = truth(prompt)[len(tokens) - len(prompt) :]
                return oracle_tree(rng, rest, min(budget, int(rng.integers(1, 12)) + 5 * rank))
        return DraftTree.empty()

    return ScriptedDrafter(guess)


def sampling(seed: int) -> AcceptRule:
    return accept_rule(SamplingSettings(temperature=1.3, seed=seed))


def together(target: Target, rank: int, **options: Any) -> Decoder:
    """Return a decoder that differs from process to process in all that may differ."""
    return Decoder(target, drafting(rank), FixedBudget(12 + 20 * rank), **options)


class Brief:
    """Ends a sequence after some tokens, and keeps what it is shown."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.seen: list[int] = []

    def num_kept(self, tokens: Any) -> int | None:
        self.seen.extend(tokens)
        over = len(self.seen) - self.limit
        return None if over < 0 else len(tokens) - over


# What follows runs in two processes at once: each returns what the tests compare.


def greedy(model: PreTrainedModel, rank: int, folder: Path) -> Any:
    """More generations than differing processes survive, by measured costs."""
    target = Target(model)
    store = CostStore(folder / f"costs-{rank}")
    measure = partial(measure_costs, max_seconds=0.1)
    costs = known_costs(target, model, store, measure)
    decoder = Decoder(target, drafting(rank), MeasuredBudget(costs))
    outputs = [decoded(decoder, prompt, NUM_TOKENS) for prompt in PROMPTS[:4]]
    return outputs, costs.seconds


def sampled(model: PreTrainedModel, rank: int, _: Path) -> Any:
    decoder = together(Target(model), rank, accept=sampling(seed=5 + rank))
    return [decoded(decoder, prompt, NUM_TOKENS) for prompt in PROMPTS[:3]]


def plain(model: PreTrainedModel, rank: int, _: Path) -> Any:
    """Decode where only the first process has a drafter."""
    drafter = drafting(rank) if rank == 0 else NoDrafter()
    decoder = Decoder(Target(model), drafter, FixedBudget(12))
    generation = decoder.generate(PROMPTS[1], NUM_TOKENS)
    tokens = [token for step in generation for token in step]
    return tokens, generation.statistics


def many(model: PreTrainedModel, rank: int, _: Path) -> Any:
    rules = [Brief(7 if rank == 0 else 10_000) for _ in PROMPTS]
    requests = [
        Request(prompt, NUM_TOKENS, stop_rule=rule if at % 2 else None)
        for at, (prompt, rule) in enumerate(zip([*PROMPTS[:5], []], rules, strict=True))
    ]
    found: dict[int, list[int]] = {}
    failed: dict[int, str] = {}
    for generation, tokens in together(Target(model), rank).generate_many(requests, 3):
        found.setdefault(generation.number, []).extend(tokens)
        if generation.error is not None:
            failed[generation.number] = str(generation.error)
    return found, failed, rules[1].seen


def left(model: PreTrainedModel, rank: int, _: Path) -> Any:
    decoder = together(Target(model), rank)
    first = next(iter(decoder.generate(PROMPTS[0], NUM_TOKENS)))
    return first, decoded(decoder, PROMPTS[2], NUM_TOKENS)


def verdicts(model: PreTrainedModel, rank: int, folder: Path) -> Any:
    """Only the first process finds one kept."""
    store = CostStore(folder / f"verdicts-{rank}")
    if rank == 0:
        store.keep_verdict(model, ModelVerdict(Capability.CHAINS, "said before"))
    target = Target(model, verdicts=store)
    return target.capability, decoded(together(target, rank), PROMPTS[2], NUM_TOKENS)


def served(model: PreTrainedModel, rank: int, _: Path) -> Any:
    """In transformers' own generate."""
    foredraft = Foredraft(model, drafting(rank), budget=FixedBudget(8 + 9 * rank))
    generate: Any = model.generate
    torch.manual_seed(rank)
    tokens = torch.tensor([PROMPTS[3]])
    options = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 9}
    greedily = generate(tokens, custom_generate=foredraft, do_sample=False, **options)
    drawn = generate(tokens, custom_generate=foredraft, do_sample=True, **options)
    return greedily.tolist(), drawn.tolist()


def refused(model: PreTrainedModel, rank: int, _: Path) -> Any:
    """Try what is refused, a changed model last, and decode once that is restored."""
    decoder, head = together(Target(model), rank), model.lm_head

    def decode() -> list[int]:
        return decoded(decoder, PROMPTS[0], NUM_TOKENS)

    model.lm_head = torch.nn.Sequential(head)
    messages = []
    calls: list[Callable[[], Any]] = [
        lambda: Target(model, states=[1]),
        lambda: DraftModel(model),
        decode,
    ]
    for call in calls:
        with pytest.raises(UnsupportedModelError) as raised:
            call()
        messages.append(str(raised.value))
    model.lm_head = head
    return messages, decode()


def ended(model: PreTrainedModel, rank: int, _: Path) -> Any:
    """Tell a process much, and then more when it is at its end."""
    ranks = ranks_of(model)
    assert ranks is not None
    told = ranks.decided(lambda: [0] * (99_999 - rank), None)
    try:
        while rank == 0:
            ranks.decided(int, None)
    except SharedPassError as error:
        return len(told), str(error)
    return len(told), ""


SCENARIOS = (greedy, sampled, plain, many, left, verdicts, served, refused, ended)


def work(rank: int, folder: Path, results: Any) -> None:
    """Run all scenarios in one of two processes."""
    torch.set_num_threads(1)
    stated = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "FOREDRAFT_CACHE": "none"}
    os.environ.update({name: str(value) for name, value in stated.items()})
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    loaded: Any = LlamaForCausalLM.from_pretrained(folder / "model", tp_plan="auto")
    model = loaded.eval()
    assert torch.distributed.tensor.DTensor in {type(each.data) for each in model.parameters()}
    for scenario in SCENARIOS:
        try:
            results.put((rank, scenario.__name__, scenario(model, rank, folder)))
        except Exception:  # noqa: BLE001  the test tells it
            results.put((rank, scenario.__name__, format_exc()))
            break
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the model lies, in double precision: two processes add its sums in another order."""
    made = tmp_path_factory.mktemp("ranks")
    tiny_llama(dtype=torch.float64).save_pretrained(made / "model")
    return made


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, list[Any]]:
    """What each scenario returned in the first and in the second process."""
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])  # torch is loaded once, by who forks them
    results = context.Queue()
    workers = [context.Process(target=work, args=(rank, folder, results)) for rank in range(2)]
    for worker in workers:
        worker.start()
    found: dict[str, list[Any]] = {scenario.__name__: [None, None] for scenario in SCENARIOS}
    try:
        for _ in range(2 * len(SCENARIOS)):
            rank, name, outcome = results.get(timeout=PATIENCE_S)
            found[name][rank] = outcome
            if isinstance(outcome, str):
                break
    except Empty:
        pass
    finally:
        for worker in workers:
            worker.join(5)
            worker.kill()
            worker.join()
    return found


def alike(outcomes: dict[str, list[Any]], name: str) -> Any:
    """Return what both processes returned."""
    first, second = outcomes[name]
    assert not isinstance(first, str), first
    assert not isinstance(second, str), second
    assert first == second
    assert first is not None
    return first


def test_processes_that_draft_and_cut_differently_decode_as_one_does(
    outcomes: dict[str, list[Any]],
) -> None:
    outputs, _ = alike(outcomes, "greedy")
    assert outputs == [truth(prompt) for prompt in PROMPTS[:4]]


def test_the_first_process_draws(outcomes: dict[str, list[Any]], folder: Path) -> None:
    model: Any = LlamaForCausalLM.from_pretrained(folder / "model")
    assert model.dtype == torch.float64
    alone = together(Target(model.eval()), 0, accept=sampling(seed=5))
    drawn = [decoded(alone, prompt, NUM_TOKENS) for prompt in PROMPTS[:3]]
    assert alike(outcomes, "sampled") == drawn


def test_only_the_first_process_needs_a_drafter(outcomes: dict[str, list[Any]]) -> None:
    tokens, statistics = alike(outcomes, "plain")
    assert tokens == truth(PROMPTS[1])
    assert statistics.num_passes < statistics.num_tokens == NUM_TOKENS
    assert statistics.num_accepted > 0


def test_many_sequences_end_where_the_first_process_says(outcomes: dict[str, list[Any]]) -> None:
    found, failed, seen = alike(outcomes, "many")
    expected = {at: truth(PROMPTS[at], 7 if at % 2 else NUM_TOKENS) for at in range(5)}
    assert found == {**expected, 5: []}
    assert failed.keys() == {5}
    assert seen[:7] == expected[1]


def test_a_generation_that_all_leave_ends_in_all(outcomes: dict[str, list[Any]]) -> None:
    first, whole = alike(outcomes, "left")
    assert first == truth(PROMPTS[0])[: len(first)]
    assert whole == truth(PROMPTS[2])


def test_the_verdict_of_the_first_process_holds(outcomes: dict[str, list[Any]]) -> None:
    capability, tokens = alike(outcomes, "verdicts")
    assert capability is Capability.CHAINS
    assert tokens == truth(PROMPTS[2])


def test_generate_of_transformers_returns_the_same_everywhere(
    outcomes: dict[str, list[Any]],
) -> None:
    greedily, drawn = alike(outcomes, "served")
    assert greedily == [[*PROMPTS[3], *truth(PROMPTS[3], 9)]]
    assert drawn[0][:14] == PROMPTS[3]


def test_what_is_untested_on_a_divided_model_is_refused(outcomes: dict[str, list[Any]]) -> None:
    messages, tokens = alike(outcomes, "refused")
    assert all("tp_plan" in each for each in messages)
    assert "Nothing may be changed" in messages[-1]
    assert tokens == truth(PROMPTS[0])


def test_a_message_may_be_long_and_a_process_that_ends_is_missed(
    outcomes: dict[str, list[Any]],
) -> None:
    (sent, message), (received, _) = outcomes["ended"]
    assert sent == received == 99_999
    assert "has ended: start all" in message


# What follows needs no processes: threads with targets of their own, and a channel between them.


class Line:
    """A channel between two threads."""

    def __init__(self, queue: SimpleQueue[bytes], *, is_first: bool) -> None:
        self._queue = queue
        self.is_first = is_first
        self.sizes: list[int] = []

    def send(self, message: object) -> None:
        content = pickle.dumps(message)
        self.sizes.append(len(content))
        self._queue.put(content)

    def receive(self) -> Any:
        return pickle.loads(self._queue.get(timeout=30))  # noqa: S301  sent above


def pair() -> list[Target]:
    queue: SimpleQueue[bytes] = SimpleQueue()
    targets = [Target(tiny_llama()), Target(tiny_llama())]
    for target, is_first in zip(targets, (True, False), strict=True):
        channel: Any = Line(queue, is_first=is_first)
        target.ranks = Ranks(channel)
    return targets


def both(act: Callable[[Target, int], Any], targets: list[Target]) -> list[Any]:
    """Return what each of two threads returned or raised."""

    def tried(rank: int) -> Any:
        try:
            return act(targets[rank], rank)
        except DecoderError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(tried, range(2)))


def test_a_step_sends_one_small_message() -> None:
    targets = pair()
    passes = [0]

    def act(target: Target, rank: int) -> Any:
        decoder = Decoder(target, drafting(0) if rank == 0 else NoDrafter(), FixedBudget(8))
        generation = decoder.generate(PROMPTS[4], NUM_TOKENS)
        tokens = [token for step in generation for token in step]
        if rank == 0:
            passes[0] = generation.statistics.num_passes
        return tokens

    assert both(act, targets) == [truth(PROMPTS[4])] * 2
    line: Any = targets[0].ranks._channel  # type: ignore[union-attr]
    beginning, end = 1, 1  # places are made; the end is told
    assert len(line.sizes) == beginning + passes[0] + end
    assert max(line.sizes) < 4096


def test_other_prompts_in_another_process_are_an_error_there() -> None:
    def act(target: Target, rank: int) -> Any:
        return decoded(Decoder(target, NoDrafter(), FixedBudget(0)), PROMPTS[rank], 4)

    first, second = both(act, pair())
    assert first == truth(PROMPTS[0], 4)
    assert isinstance(second, SharedPassError)
    assert "different prompts" in str(second)


@pytest.mark.parametrize("num_steps", [2, NUM_TOKENS])
def test_a_first_process_that_leaves_is_missed(num_steps: int) -> None:
    def act(target: Target, rank: int) -> Any:
        decoder = Decoder(target, NoDrafter(), FixedBudget(0))
        requests = [Request(prompt, NUM_TOKENS) for prompt in PROMPTS[:2]]
        steps = decoder.generate_many(requests, 1)
        with closing(steps):  # type: ignore[type-var]  # a generator
            return list(islice(steps, num_steps if rank == 0 else None))

    first, second = both(act, pair())
    assert len(first) == num_steps
    assert isinstance(second, SharedPassError)
    assert "left" in str(second)


def test_an_error_of_the_first_process_is_one_in_all() -> None:
    def raising(*_: Any) -> Any:
        raise DecoderError("no token can be chosen")

    def act(target: Target, rank: int) -> Any:
        rule: Any = raising if rank == 0 else accept_greedy
        return decoded(Decoder(target, NoDrafter(), FixedBudget(0), rule), PROMPTS[0], 4)

    assert [str(each) for each in both(act, pair())] == ["no token can be chosen"] * 2


def test_an_observer_that_fails_at_the_end_is_an_error_in_all() -> None:
    def failing(_: ObservedPass) -> None:
        raise DecoderError("nothing to see")

    def act(target: Target, rank: int) -> Any:
        decoder = Decoder(target, NoDrafter(), FixedBudget(0))
        observer = failing if rank == 0 else None
        requests = [Request(prompt, 1, observer=observer) for prompt in PROMPTS[:3]]
        steps = decoder.generate_many(requests, 1)
        ended = dict.fromkeys(generation for generation, _ in steps)
        return [(each.number, str(each.error)) for each in ended]

    assert both(act, pair()) == [[(at, "nothing to see") for at in range(3)]] * 2


@pytest.mark.parametrize("rank_without", [0, 1])
def test_memory_that_runs_out_in_a_shared_pass_ends_it(rank_without: int) -> None:
    targets = pair()

    def failing(_: Reading) -> Any:
        raise OutOfMemoryError("out of memory at 9 tokens of context")

    vars(targets[rank_without])["_read_alone"] = failing

    def act(target: Target, _: int) -> Any:
        return decoded(Decoder(target, NoDrafter(), FixedBudget(0)), PROMPTS[0], 4)

    if rank_without == 0:
        # The second one would wait in the middle of the pass: nobody is left to tell it more.
        with pytest.raises(SharedPassError) as raised:
            act(targets[0], 0)
        error: Any = raised.value
        with pytest.raises(SharedPassError, match="start again"):
            act(targets[0], 0)
    else:
        _, error = both(act, targets)
        with pytest.raises(SharedPassError, match="start again"):
            act(targets[1], 1)
    assert isinstance(error, SharedPassError)
    assert "at 9 tokens" in str(error)
    assert "fewer sequences" in str(error)


def test_two_decoders_of_a_shared_model_take_turns() -> None:
    target = pair()[0]
    one, other = (Decoder(target, NoDrafter(), FixedBudget(0)) for _ in range(2))
    steps: Iterator[Any] = iter(one.generate(PROMPTS[0], 4))
    next(steps)
    with pytest.raises(DecoderBusyError, match="close that decoding first"):
        next(iter(other.generate(PROMPTS[1], 4)))


def test_what_fails_in_the_first_process_is_not_found_in_another() -> None:
    def failing(_: Target) -> CostSurface:
        raise DecoderError("no clock")

    def act(target: Target, _: int) -> Any:
        return known_costs(target, tiny_llama(), None, measure=failing)

    first, second = both(act, pair())
    assert str(first) == "no clock"
    assert isinstance(second, SharedPassError)
    assert "first of the processes failed" in str(second)


def test_costs_are_those_of_the_first_process() -> None:
    surfaces = [CostSurface.flat((1, 2), (0.1 + rank, 0.2 + rank)) for rank in range(2)]

    def act(target: Target, rank: int) -> Any:
        return known_costs(target, tiny_llama(), None, measure=lambda _: surfaces[rank])

    assert both(act, pair()) == [surfaces[0]] * 2


def test_passes_are_timed_by_the_first_process_alone() -> None:
    def act(target: Target, rank: int) -> Any:
        times = iter(np.linspace(1, 2 + rank, 1000).tolist())
        return measure_costs(target, (1, 2, 4), (4,), timed=lambda *_: next(times))

    first, second = both(act, pair())
    assert first == second
    assert first.widths == (1, 2, 4)


def test_a_model_of_one_process_has_no_ranks() -> None:
    assert ranks_of(tiny_llama()) is None
    assert Target(tiny_llama()).ranks is None


def test_weights_that_another_library_divides_are_refused() -> None:
    model = tiny_llama()
    next(model.parameters()).ds_id = 0  # type: ignore[attr-defined]  # as DeepSpeed marks them
    with pytest.raises(UnsupportedModelError, match="tp_plan"):
        Target(model)


@pytest.mark.parametrize("option", ["fsdp_size", "pp_size", "ep_size"])
def test_other_divisions_of_transformers_are_refused(option: str) -> None:
    model = tiny_llama()
    next(model.parameters()).ds_id = 0  # type: ignore[attr-defined]  # divided in some way
    config: Any = DistributedConfig(tp_plan="auto", tp_size=2)
    setattr(config, option, 2)
    model.config.distributed_config = config
    with pytest.raises(UnsupportedModelError, match=option):
        Target(model)
