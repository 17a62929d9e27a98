"""Logs of the days before become an index, and a server drafts from it while it runs."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from decoder.engines.transformers.custom_generate import Foredraft
from decoder.model.pretrained import LanguageModel, ModelOptions, load_model
from examples.nightly.request_log import App, Message, Receive, RequestLog, Send
from indexer.build import build_from_texts
from indexer.reader import Index
from retriever.client.resilient import ResilientDrafter
from retriever.client.strict import RemoteDrafter
from retriever.tree import Source
from tests.decoder.decoding import SIZES
from tests.decoder.engines.transformers.generating import foredraft, generated
from tests.decoder.model_fixtures import STOP
from tests.examples.asgi import asked, body_of, chat_chunks, events
from tests.retriever.conftest import start_service, stop_service

NIGHTLY = Path(__file__).parents[2] / "examples" / "nightly" / "nightly.sh"
PATIENCE_S = 30.0
NUM_TOKENS = 48
QUESTIONS = [f"What is {what}?" for what in ("a trie", "a heap", "a queue", "a rope", "a graph")]
TODAY = datetime.now(UTC).date()

RECORDS = """#!/bin/sh
printf '%s\\n' "$*" >>"{folder}/calls"
case $1 in
    inspect) [ -e "$2/of-nightly" ] || exit 1 ;;
esac
exit "${{STATUS-0}}"
"""


def day(ago: int) -> str:
    return f"{TODAY - timedelta(days=ago)}.jsonl"


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with logs, and the `foredraft` of this environment in `bin`."""
    (tmp_path / "logs").mkdir()
    command = f'#!/bin/sh\nexec "{sys.executable}" -m foredraft "$@"\n'
    executable(tmp_path / "bin" / "foredraft", command)
    return tmp_path


@pytest.fixture
def recording(place: Path) -> Path:
    """The same with a `foredraft` that notes what it is called with."""
    executable(place / "bin" / "foredraft", RECORDS.format(folder=place))
    return place


def variables(place: Path, **more: str) -> dict[str, str]:
    path = f"{place / 'bin'}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "BUILD_FLAGS": "--strict 0.1", **more}


def nightly(place: Path, *arguments: str, **more: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [str(NIGHTLY), *(arguments or ("MODEL",))],
        cwd=place,
        env=variables(place, **more),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def calls(place: Path) -> list[str]:
    path = place / "calls"
    return path.read_text().splitlines() if path.exists() else []


def wait_until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def running(group: int) -> list[str]:
    """The names of the processes of a session that have not ended."""
    listed = subprocess.run(
        ["ps", "-o", "stat=,comm=", "-g", str(group)], capture_output=True, text=True, check=False
    )
    states = (line.split() for line in listed.stdout.splitlines())
    return [name for state, name, *_ in states if not state.startswith("Z")]


def write_log(place: Path, ago: int, *answers: str) -> Path:
    path = place / "logs" / day(ago)
    records = [
        {"request": {"messages": [{"role": "user", "content": "q"}]}, "response": {"output": each}}
        for each in answers or ("an answer",)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_finished_days_that_are_kept_are_indexed_and_older_logs_deleted(recording: Path) -> None:
    for ago in (0, 1, 2, 7, 8, 400):
        write_log(recording, ago)
    others = [recording / "logs" / name for name in ("notes.jsonl", f"{day(9)}.bak", "2020-1-1")]
    for path in others:
        path.write_text("not ours")
    (recording / "logs" / day(3)).touch()  # made on a full disk
    done = nightly(recording, KEEP_DAYS="7")
    assert done.returncode == 0, done.stderr
    logs = " ".join(f"logs/{day(ago)}" for ago in (7, 2, 1))
    (call,) = calls(recording)
    assert call == f"build {logs} --tokenizer MODEL --output answers.index --overwrite --strict 0.1"
    left = {path.name for path in (recording / "logs").iterdir()}
    kept = {day(ago) for ago in (0, 1, 2, 3, 7)}
    assert left == kept | {path.name for path in others}
    assert done.stdout.count("deleted") == 2


def test_flags_are_those_of_a_careful_build_where_none_are_given(recording: Path) -> None:
    write_log(recording, 1)
    environment = variables(recording)
    del environment["BUILD_FLAGS"]
    subprocess.run([str(NIGHTLY), "M"], cwd=recording, env=environment, check=True)
    assert calls(recording)[0].endswith("--overwrite --redact --strict 0.1")


def test_nothing_is_done_without_a_log_of_a_finished_day(recording: Path) -> None:
    write_log(recording, 0)
    done = nightly(recording)
    assert (done.returncode, calls(recording)) == (0, [])
    assert "no log of a finished day in logs: nothing to do" in done.stdout


def test_an_index_of_which_every_day_is_too_old_goes_with_its_logs(recording: Path) -> None:
    log, index = write_log(recording, 9), recording / "answers.index"
    index.mkdir()
    (index / "of-another").touch()
    done = nightly(recording, KEEP_DAYS="7")
    assert done.returncode == 1
    assert log.exists()
    assert index.exists(), "it is no index: not ours to remove"
    (index / "of-nightly").touch()
    done = nightly(recording, KEEP_DAYS="7")
    assert done.returncode == 0
    assert not log.exists()
    assert not index.exists()
    assert "is removed; restart the service" in done.stdout


def test_a_failed_build_deletes_no_log_and_is_told(recording: Path) -> None:
    logs = [write_log(recording, ago) for ago in (1, 9)]
    done = nightly(recording, KEEP_DAYS="7", STATUS="1")
    assert done.returncode == 1
    assert all(log.exists() for log in logs)


@pytest.mark.parametrize(
    ("arguments", "given", "said"),
    [
        (["--daily"], {}, "name the model"),
        (["MODEL", "more"], {}, "name the model"),
        (["MODEL"], {"KEEP_DAYS": "0"}, "KEEP_DAYS is a number of days, not '0'"),
        (["MODEL"], {"KEEP_DAYS": "a week"}, "not 'a week'"),
        (["MODEL"], {"REQUEST_LOG": "nowhere"}, "no folder nowhere"),
    ],
)
def test_mistakes_are_named(
    recording: Path, arguments: Sequence[str], given: dict[str, str], said: str
) -> None:
    write_log(recording, 1)
    done = nightly(recording, *arguments, **given)
    assert (done.returncode, calls(recording)) == (2, [])
    assert said in done.stderr


def test_it_waits_for_the_next_night_until_it_is_ended(recording: Path) -> None:
    write_log(recording, 1)
    process = subprocess.Popen(
        [str(NIGHTLY), "--daily", "MODEL"],
        cwd=recording,
        env=variables(recording, STATUS="1"),
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stderr is not None
        assert "the index stays as it is until tomorrow" in process.stderr.readline()
        wait_until(lambda: "sleep" in running(process.pid))
        process.terminate()
        assert process.wait(PATIENCE_S) == 143
    assert not running(process.pid), "nothing of it sleeps on"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose tokens are the characters of ASCII, so that its texts can be read back."""
    pieces = [chr(code) for code in range(33, 127)]
    vocabulary = {piece: number for number, piece in enumerate([STOP, "Ġ", *pieces])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=STOP)  # type: ignore[no-untyped-call]
    torch.manual_seed(5)
    config = LlamaConfig(
        **SIZES, vocab_size=len(vocabulary), num_hidden_layers=2, eos_token_id=0, bos_token_id=0
    )
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def language_model(model_folder: Path) -> LanguageModel:
    return load_model(ModelOptions(str(model_folder)))


class TinyServer:
    """Answers chat completions, streamed or not, with a tiny model."""

    def __init__(self, model: LanguageModel, drafts: Foredraft | None = None) -> None:
        self._model = model
        self._options: Any = {} if drafts is None else {"custom_generate": drafts}

    async def __call__(self, _scope: Message, receive: Receive, send: Send) -> None:
        request = json.loads(await body_of(receive))
        text = self._answer(request["messages"][-1]["content"])
        whole = {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}}]}
        pieces = [{"content": text[at : at + 5]} for at in range(0, len(text), 5)]
        is_streamed = request.get("stream", False)
        body = events(*chat_chunks(*pieces)) if is_streamed else json.dumps(whole).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    def _answer(self, question: str) -> str:
        prompt = self._model.encode(question)
        options = {"max_new_tokens": NUM_TOKENS, **self._options}
        ids = generated(self._model.model, prompt, **options)[0, len(prompt) :]
        return str(self._model.tokenizer.decode(ids, skip_special_tokens=True))


def answers(app: App, *, stream: bool = False) -> list[bytes]:
    return [
        asked(app, {"messages": [{"role": "user", "content": question}], "stream": stream})
        for question in QUESTIONS
    ]


def night_passes(logs: Path) -> None:
    """Call today's log yesterday's."""
    (logs / day(0)).rename(logs / day(1))


def drafted_from(address: str, index: Path) -> bool:
    with RemoteDrafter(address) as client:
        return any(info.num_documents for info in client.list_indexes() if index.name in info.name)


@pytest.mark.programs
def test_a_running_service_drafts_from_yesterdays_answers(
    place: Path, model_folder: Path, language_model: LanguageModel
) -> None:
    """The first day is answered without drafts, so that all of the second's are the index's."""
    index, model = place / "answers.index", str(model_folder)
    options = ["--missing-indexes", "skip", "--refresh", "0.2", "--tokenizer", model]
    address = f"unix:{place / 'draft.sock'}"
    process, _ = start_service("--address", address, "--index", str(index), *options)
    try:
        log = RequestLog(TinyServer(language_model), place / "logs")
        truth = [*answers(log), *answers(log, stream=True)]
        log.close()
        night_passes(place / "logs")
        for _ in range(2):  # another run changes nothing
            done = nightly(place, model)
            assert done.returncode == 0, done.stderr
            assert Index.open(index).num_documents == len(QUESTIONS), "equal answers count once"
        wait_until(lambda: drafted_from(address, index))
        with ResilientDrafter([address], deadline_s=10.0, local=False) as drafter:
            assert drafter.wait(PATIENCE_S)
            plugin = foredraft(language_model.model, drafter)
            log = RequestLog(TinyServer(language_model, plugin), place / "logs")
            assert answers(log) == truth[: len(QUESTIONS)]
            assert answers(log, stream=True) == truth[len(QUESTIONS) :]
            log.close()
    finally:
        stop_service(process)
    statistics = plugin.statistics
    assert statistics.accepted[Source.CORPUS] > NUM_TOKENS
    assert statistics.num_tokens > 2 * statistics.num_passes
    assert len((place / "logs" / day(0)).read_text().splitlines()) == 2 * len(QUESTIONS)


@pytest.mark.programs
@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_the_index_of_the_night_before(
    place: Path, model_folder: Path, by: signal.Signals
) -> None:
    model, index = str(model_folder), place / "answers.index"
    build_from_texts([("the first", "the first answer")], index, model)
    write_log(place, 2, "the first answer")
    write_log(place, 1, *(f"answer {number} of very many" for number in range(3000)))
    process = subprocess.Popen(
        [str(NIGHTLY), model], cwd=place, env=variables(place), start_new_session=True
    )
    wait_until(lambda: any(place.glob(".answers.index*")))  # it builds beside the index
    if by == signal.SIGKILL:
        os.killpg(process.pid, by)
    else:
        process.send_signal(by)
    process.wait()
    wait_until(lambda: not running(process.pid))
    assert Index.open(index).num_documents == 1
    assert nightly(place, model).returncode == 0
    assert Index.open(index).num_documents == 3001
    left = {path.name for path in place.iterdir()}
    assert left <= {"answers.index", "bin", "logs"}, "what was begun is gone"
