"""Restarts a service that has remembered much, and looks whether it is as warm as before.

    python -m benchmarks.serving.restart --tokens 5000000 --json

A real `foredraft serve --state` is told outputs over gRPC, and learns from traces. Then
other traces are replayed without being remembered. It is ended by SIGTERM and by SIGKILL in turn
and started again: how long from the start of the process until it says that it serves, and until
the first draft is answered; and whether the same traces get the same drafts, bit for bit. Files
are in the page cache, and kernels were compiled before.
"""

import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import typer
from numpy.typing import ArrayLike

from retriever.client.strict import RemoteDrafter
from retriever.drafter import DEFAULT, FORGOTTEN, DraftRequest, SequenceOptions, TokenIds
from retriever.plugins.replay.replay import replay
from retriever.predict.stores import ring_capacity
from retriever.traces.traces import ChatEncoder, Trace, read_outputs
from retriever.tree import DraftTree

_BUDGET_NODES: Final = 32
_NUM_PIECES: Final = 5000
_PIECES_PER_OUTPUT: Final = 12
_SYNTHETIC_VOCABULARY: Final = 40_000
_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Life:
    """What one life of the service came to.

    Attributes:
        ended_by: the signal that ended the life before; empty of the first.
        serving_s: from the start of the process until it says that it serves.
        first_draft_s: until the first draft was answered.
        tokens_per_step: of the replayed traces.
        steps: of these.
        drafts: digest of every draft that they got.
    """

    ended_by: str
    serving_s: float
    first_draft_s: float
    tokens_per_step: float
    steps: int
    drafts: str


class Outputs:
    """Outputs put together from pieces of others, or of random ones: they repeat one another.

    Args:
        pieces: int32[n] each.
        seed: of the order.
    """

    def __init__(self, pieces: list[TokenIds], seed: int) -> None:
        self._pieces = pieces
        self._rng = np.random.default_rng(seed)

    def next(self) -> TokenIds:
        """Return int32[n], the next output."""
        chosen = self._rng.integers(0, len(self._pieces), _PIECES_PER_OUTPUT)
        return np.concatenate([self._pieces[at] for at in chosen])

    def of(self, num_tokens: int) -> Iterator[TokenIds]:
        """Give outputs until they have so many tokens, one more for the end of each."""
        while num_tokens > 0:
            output = self.next()
            num_tokens -= len(output) + 1
            yield output

    def traces(self, number: int) -> list[Trace]:
        """Return traces of half an output as the prompt."""
        outputs = [self.next() for _ in range(number)]
        return [Trace(each[: len(each) // 2], each[len(each) // 2 :]) for each in outputs]


class Recorder:
    """A drafter that keeps a digest of what another drafts, and has nothing remembered.

    Args:
        drafter: the other.

    Attributes:
        digest: of all drafts.
    """

    def __init__(self, drafter: RemoteDrafter) -> None:
        self._drafter = drafter
        self.digest = hashlib.sha256()

    def open(self, session: str, prompt: ArrayLike, options: SequenceOptions = DEFAULT) -> None:
        """Begin a sequence, which is not remembered."""
        del options
        self._drafter.open(session, prompt, FORGOTTEN)

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Draft, and add the drafts to the digest."""
        trees = self._drafter.draft(requests)
        for tree in trees:
            for array in (tree.token_ids, tree.parents, tree.probabilities, tree.sources):
                self.digest.update(array.tobytes())
        return trees

    def close(
        self, session: str, new_tokens: ArrayLike | None = None, *, remember: bool = True
    ) -> None:
        """End a sequence."""
        del remember
        self._drafter.close(session, new_tokens, remember=False)


def pieces_of(warm: Path | None, tokenizer: str | None, rng: np.random.Generator) -> list[TokenIds]:
    """Return pieces of 5 to 60 tokens, of the outputs in a file or of random tokens."""
    lengths = rng.integers(5, 60, _NUM_PIECES).tolist()
    if warm is None:
        return [rng.integers(0, _SYNTHETIC_VOCABULARY, each).astype(np.int32) for each in lengths]
    tokens = np.concatenate(list(read_outputs(warm, ChatEncoder(tokenizer))))
    begins = rng.integers(0, max(1, len(tokens) - 60), _NUM_PIECES).tolist()
    return [tokens[begin : begin + each] for begin, each in zip(begins, lengths, strict=True)]


class Served:
    """A service in a process of its own, and a client of it.

    Args:
        state: its state directory.
        capacity: tokens that it remembers.

    Attributes:
        serving_s: from the start of the process until it said that it serves.
        first_draft_s: until the first draft was answered.
        client: of the service.
    """

    def __init__(self, state: Path, capacity: int) -> None:
        command = [sys.executable, "-m", "retriever", "serve", "--address", "127.0.0.1:0"]
        options = ["--state", str(state), "--generations-tokens", str(capacity)]
        began = time.perf_counter()
        self._process = subprocess.Popen(
            [*command, *options, "--log-level", "warning"], stdout=subprocess.PIPE, text=True
        )
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        self.serving_s = time.perf_counter() - began
        self.client = RemoteDrafter(line.split()[-1], timeout_s=_TIMEOUT_S)
        self.client.draft_context([1, 2, 3], _BUDGET_NODES)
        self.first_draft_s = time.perf_counter() - began

    def end(self, number: signal.Signals) -> None:
        """End it by a signal, and wait until it is gone."""
        self.client.shut_down()
        self._process.send_signal(number)
        self._process.communicate(timeout=_TIMEOUT_S)

    def replayed(self, traces: list[Trace], ended_by: str) -> Life:
        """Replay traces without their being remembered, and return what came of it."""
        recorder = Recorder(self.client)
        report = replay(recorder, traces, _BUDGET_NODES)
        return Life(
            ended_by,
            round(self.serving_s, 3),
            round(self.first_draft_s, 3),
            report.tokens / report.steps,
            report.steps,
            recorder.digest.hexdigest(),
        )


def tell(client: RemoteDrafter, outputs: Iterable[TokenIds]) -> int:
    """Have a service remember outputs; return how many tokens, one more for the end of each."""
    num_tokens = 0
    for number, output in enumerate(outputs):
        client.open(f"told-{number}", output[:0])
        client.close(f"told-{number}", output)
        num_tokens += len(output) + 1
    return num_tokens


def run(  # noqa: PLR0913  (a command has as many options as it needs)
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to remember.")] = 5_000_000,
    traces: Annotated[int, typer.Option(min=1, help="Traces to replay in each life.")] = 40,
    restarts: Annotated[int, typer.Option(min=1, help="How often, by each signal.")] = 3,
    warm: Annotated[
        Path | None, typer.Option(help="Recorded outputs to take pieces of; else random ones.")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Of the texts in that file.")] = None,
    *,
    seed: Annotated[int, typer.Option(help="Of what is random.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Restart a service; end with status 1 if it drafts otherwise than before."""
    pieces = pieces_of(warm, tokenizer, np.random.default_rng(seed))
    outputs, replayed = Outputs(pieces, seed + 1), Outputs(pieces, seed + 2)
    learned, measured = replayed.traces(traces), replayed.traces(traces)
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder)
        capacity = ring_capacity(tokens + tokens // 4)
        served = Served(state, capacity)
        cold = served.replayed(measured, "")
        num_tokens = tell(served.client, outputs.of(tokens))
        replay(served.client, learned, _BUDGET_NODES)
        lives = [served.replayed(measured, "")]
        for number in [signal.SIGTERM, signal.SIGKILL] * restarts:
            served.end(number)
            served = Served(state, capacity)
            lives.append(served.replayed(measured, number.name))
        served.end(signal.SIGTERM)
        num_bytes = (state / "generations.mdb").stat().st_size
    same = len({life.drafts for life in lives}) == 1
    again = lives[1:]
    figures = {
        "tokens": num_tokens,
        "log_bytes": num_bytes,
        "pieces_of": warm.name if warm is not None else "random tokens",
        "serving_s_max": max(life.serving_s for life in again),
        "first_draft_s_median": float(np.median([life.first_draft_s for life in again])),
        "first_draft_s_max": max(life.first_draft_s for life in again),
        "tokens_per_step_cold": cold.tokens_per_step,
        "tokens_per_step_before": lives[0].tokens_per_step,
        "tokens_per_step_after": sorted({life.tokens_per_step for life in again}),
        "same_drafts": same,
        "lives": [asdict(life) for life in lives],
        "seed": seed,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
    }
    print(json.dumps(figures) if as_json else "\n".join(f"{k}: {v}" for k, v in figures.items()))
    if not same:
        sys.exit(1)


if __name__ == "__main__":
    typer.run(run)
