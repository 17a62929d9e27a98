import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from indexer.sources.chats.conversations import Turn
from indexer.sources.recordings import RecordingTally
from retriever.drafter import DraftRequest, Prediction, SequenceOptions
from retriever.errors import TraceError
from retriever.limits import Limits
from retriever.plugins.replay.replay_cli import app
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.traces import traces as encoding
from retriever.traces.trace_spool import trace_spool
from retriever.tree import Source


def write(path: Path, rows: list[Any]) -> Path:
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        path.write_text(lines)
    return path


def run(*arguments: object) -> Any:
    result = CliRunner().invoke(app, ["replay", *map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_steps_and_tokens_are_counted_by_hand(tmp_path: Path) -> None:
    """Nothing is known of 1; after 2 and 3 the prompt is copied to the end."""
    traces = write(tmp_path / "t.jsonl", [{"prompt_ids": [2, 3, 4, 5], "output_ids": [2, 3, 4, 5]}])
    report = run(traces, "--budget", 8)
    assert report["tokens"] == 4
    assert report["steps"] == 2  # the model's own 2, then 3, 4, 5 from the draft
    assert report["tokens_per_step"] == 2
    assert report["accepted_by_source"] == {"context": 1.0}
    assert report["draft_us"]["p99"] >= report["draft_us"]["p50"] > 0


def test_without_a_budget_every_step_commits_one_token(tmp_path: Path) -> None:
    traces = write(tmp_path / "t.jsonl.gz", [{"prompt_ids": [1], "output_ids": [1] * 9}])
    report = run(traces, "--budget", 0)
    assert (report["steps"], report["mean_nodes"]) == (9, 0)


def test_warm_outputs_serve_as_generations(tmp_path: Path) -> None:
    traces = write(tmp_path / "t.jsonl", [{"prompt_ids": [9], "output_ids": [1, 2, 3, 4, 5, 6]}])
    warm = write(tmp_path / "w.jsonl", [{"output_ids": [1, 2, 3, 4, 5, 6]}])
    assert run(traces)["steps"] == 6
    report = run(traces, "--warm", warm)
    assert report["steps"] == 2  # 1, then 2 to 6
    assert report["accepted_by_source"] == {"generations": 1.0}


def test_index_is_drafted_from(tmp_path: Path, index: Path) -> None:
    traces = write(tmp_path / "t.jsonl", [{"prompt_ids": [9], "output_ids": list(range(20))}])
    assert run(traces, "--index", index)["mean_nodes"] > run(traces)["mean_nodes"]


def test_earlier_traces_warm_later_ones_and_limit_stops(tmp_path: Path) -> None:
    row = {"prompt_ids": [9], "output_ids": [1, 2, 3, 4, 5, 6]}
    traces = write(tmp_path / "t.jsonl", [row, row, row])
    assert run(traces, "--limit", 1)["steps"] == 6
    assert run(traces)["steps"] == 10  # 6, and 2 for each later one


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a"}, "`output` is missing"),
        ({"prompt": 7, "output": "a"}, "`prompt` is not text"),
        ([1, 2], "a trace is a JSON object"),
        ({"prompt_ids": ["x"], "output_ids": []}, "holds 'x', which is not a token id"),
        ({"prompt_ids": [True], "output_ids": []}, "holds True, which is not a token id"),
        ({"prompt_ids": "12", "output_ids": []}, "is not a list"),
        ({"prompt_ids": [1.7], "output_ids": []}, "holds 1.7"),
        ({"prompt_ids": [1 << 40], "output_ids": []}, "not a token id: they fit into four bytes"),
        ({"prompt_ids": [1], "output_ids": [-1]}, "`output_ids` holds -1, which is not a token id"),
    ],
)
def test_row_that_is_no_trace_is_skipped_and_named_by_line_and_fault(
    tmp_path: Path, row: Any, reason: str
) -> None:
    usable = {"prompt_ids": [1], "output_ids": [1]}
    traces = write(tmp_path / "t.jsonl", [usable, row, usable])
    result = CliRunner().invoke(app, ["replay", str(traces), "--json"])
    assert (result.exit_code, json.loads(result.stdout)["traces"]) == (0, 2)
    said = result.stderr.splitlines()[-1]
    assert said.startswith("skipped: 1 ")
    assert f"first: {traces}:2; " in said
    assert reason in said
    assert "Error" not in said
    assert reason in refused(write(tmp_path / "alone.jsonl", [row]))
    with pytest.raises(TraceError, match=f"{traces}:2: "):
        list(encoding.read_traces(traces, encoding.ChatEncoder(None)))


def refused(*arguments: object) -> str:
    """Return the one line that a replay is refused with, before any tokenizer is loaded."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(encoding, "load_core", None)
        result = CliRunner().invoke(app, ["replay", *map(str, arguments)])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def test_files_that_cannot_be_used_are_refused_before_a_tokenizer_is_loaded(
    tmp_path: Path,
) -> None:
    traces = write(tmp_path / "t.jsonl", [{"prompt": "a", "output": "b"}])
    nowhere = tmp_path / "nowhere"
    assert "there is no index at" in refused(traces, "--index", nowhere)
    assert "no such file" in refused(traces, "--warm", nowhere)
    assert "cannot be read" in refused(traces, "--phrases", nowhere)
    assert "it is a folder: name a file" in refused(traces, "--warm", tmp_path)


def test_what_is_cut_in_the_middle_is_used_as_far_as_it_goes(tmp_path: Path) -> None:
    row = json.dumps({"prompt_ids": [1], "output_ids": [1]}) + "\n"
    whole = gzip.compress(row.encode() * 99)
    cut = {
        "lines.jsonl": (row * 99 + row[:20]).encode(),
        "warm.jsonl": (row * 99 + '{"output_ids": [1').encode(),
        "packed.jsonl.gz": whole[:-9],
        "array.json": ("[" + ",".join([row] * 99) + ',{"prompt_ids": [').encode(),
    }
    for name, content in cut.items():
        path = tmp_path / name
        path.write_bytes(content)
        result = CliRunner().invoke(app, ["replay", str(path), "--warm", str(path), "--json"])
        assert (result.exit_code, json.loads(result.stdout)["traces"]) == (0, 99)
        (said,) = result.stderr.splitlines()
        assert said.startswith("skipped: 2 ")  # once each for the traces and what is warm
        assert f"(first: {path}" in said
        with pytest.raises(TraceError, match="cannot be read: 1 "):
            list(encoding.read_traces(path, encoding.ChatEncoder(None)))


def test_a_budget_beyond_the_limit_is_a_usage_error(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["replay", str(tmp_path), "--budget", "257"])
    assert result.exit_code == 2
    assert "256" in result.stderr


def test_a_file_without_a_trace_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("\n\n")
    assert "holds no recorded output: expected keys are `messages`" in refused(tmp_path / "t.jsonl")
    (tmp_path / "t.jsonl").write_text('{"body": "x", "id": 1}\n')
    assert "skipped: 1 no conversation (first: " in refused(tmp_path / "t.jsonl")
    assert "its keys are 'body', 'id': expected keys are" in refused(tmp_path / "t.jsonl")


def test_a_log_without_an_answer_is_said_to_have_none(tmp_path: Path) -> None:
    asked = {"messages": [{"role": "user", "content": "?"}]}
    log = write(tmp_path / "t.jsonl", [{"request": asked, "response": {"error": {"code": 503}}}])
    assert refused(log) == (
        f"error: {log} holds no recorded output: {log}: requests and responses of a server, 0 "
        "outputs of 1 conversation; left out: 1 x response without an answer\n"
    )


def test_a_file_that_cannot_be_opened_is_named_once(tmp_path: Path) -> None:
    path = tmp_path / "none.jsonl"
    assert refused(path) == f"error: cannot read {path}: there is no such file\n"
    assert refused(tmp_path) == f"error: cannot read {tmp_path}: it is a folder: name a file\n"


def test_unreadable_traces_are_a_clear_error(tmp_path: Path) -> None:
    damaged = tmp_path / "t.jsonl.gz"
    damaged.write_bytes(b"no gzip")
    assert "damaged gzip (first: " in refused(damaged)
    for named, content in (("t.jsonl", gzip.compress(b"x")), ("t.csv", b"PK\x03\x04")):
        (tmp_path / named).write_bytes(content)
        assert "not text but " in refused(tmp_path / named)


def test_report_for_people_shows_the_same_figures(tmp_path: Path) -> None:
    traces = write(tmp_path / "t.jsonl", [{"prompt_ids": [2, 3], "output_ids": [2, 3]}])
    result = CliRunner().invoke(app, ["replay", str(traces)])
    assert "tokens_per_step" in result.stdout


def test_every_turn_of_the_assistant_is_replayed_with_all_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding.ChatEncoder, "encode_turns", lambda _, turns: [len(turns)])
    monkeypatch.setattr(encoding.ChatEncoder, "encode_output", lambda _, text: [ord(text)])
    said = [("user", "?"), ("assistant", "a"), ("user", "?"), ("assistant", "b")]
    messages = [{"role": role, "content": text} for role, text in said]
    log = {"request": {"messages": messages[:1]}, "response": {"choices": [{"text": "c"}]}}
    path = write(tmp_path / "log.jsonl", [{"messages": messages}, log, {"messages": []}])
    expected = [([1], [97]), ([3], [98]), ([1], [99])]
    for name in ("log.jsonl", "log.json"):
        (tmp_path / "log.json").write_text(json.dumps([{"messages": messages}, log]))
        encoder = encoding.ChatEncoder(None)
        read = list(encoding.read_traces(tmp_path / name, encoder))
        assert [(t.prompt.tolist(), t.output.tolist()) for t in read] == expected
        assert [ids.tolist() for ids in encoding.read_outputs(tmp_path / name, encoder)] == [
            [97],
            [98],
            [99],
        ]
    assert len(list(encoding.read_traces(path, encoder, 2))) == 2
    found = RecordingTally()
    assert len(list(encoding.read_traces(path, encoder, skipped=found))) == 3
    assert found.describe() == [
        f"{path}: OpenAI messages, 2 outputs of 2 conversations",
        f"{path}: requests and responses of a server, 1 output of 1 conversation",
    ]


class Refusing:
    """A tokenizer whose template takes no tools' turns."""

    chat_template = "x"

    def apply_chat_template(self, messages: list[dict[str, str]], **_: object) -> str:
        if any(message["role"] == "tool" for message in messages):
            raise ValueError("no tools here")
        return "x"

    def encode(self, text: str, **_: object) -> list[int]:
        return [1] * len(text)


def test_turns_that_a_template_refuses_and_too_long_ones_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(role: str, answer: str) -> dict[str, Any]:
        said = [("user", "?"), (role, "!"), ("user", "?"), ("assistant", answer)]
        return {"messages": [{"role": role, "content": text} for role, text in said]}

    rows = [asked("tool", "a"), asked("system", "a" * 40), asked("system", "b")]
    path = write(tmp_path / "log.jsonl", rows)
    monkeypatch.setattr(encoding, "load_core", lambda _: Refusing())
    monkeypatch.setattr(encoding, "Limits", lambda: Limits(max_sequence_tokens=9))
    found = RecordingTally()
    read = encoding.read_traces(path, encoding.ChatEncoder("x"), skipped=found)
    assert [trace.output.tolist() for trace in read] == [[1]]
    assert found.skipped == {"refused by the chat template": 1, "too long": 1}
    assert "no tools here" in found.describe_skipped()
    assert "has at most 9 tokens: leave it out" in found.describe_skipped()
    alone = encoding.read_traces(
        write(tmp_path / "alone.jsonl", rows[:1]), encoding.ChatEncoder("x"), skipped=found
    )
    with pytest.raises(
        TraceError, match=r"holds no recorded output: .*2 refused by the chat template"
    ):
        list(alone)


def test_a_damaged_table_of_traces_is_refused_with_its_cause(tmp_path: Path) -> None:
    cut = tmp_path / "cut.json"
    cut.write_text('[{"prompt": "c"')
    assert "not JSON (first: " in refused(cut)
    columns = tmp_path / "columns.csv"
    columns.write_text("id,body\n1,x\n")
    assert "`messages`" in refused(columns)


TEXT_IDS = list(range(40, 80))


@pytest.mark.parametrize(
    "stated",
    [
        {"predictions": [{"ids": TEXT_IDS, "label": "plan"}]},
        {"predictions": [{"ids": [9, 9, 9]}, {"ids": TEXT_IDS}]},
    ],
)
def test_what_was_predicted_of_an_output_is_drafted_from(
    tmp_path: Path, stated: dict[str, Any]
) -> None:
    row = {"prompt_ids": [9], "output_ids": TEXT_IDS}
    plain = run(write(tmp_path / "plain.jsonl", [row]))
    report = run(write(tmp_path / "t.jsonl", [{**row, **stated}]))
    assert plain["steps"] == len(TEXT_IDS)
    assert report["steps"] <= 3
    assert report["accepted_by_source"] == {"predictions": 1.0}
    assert "predictions" not in plain["accepted_by_source"]


def words(text: str) -> list[int]:
    return [ord(letter) for letter in text]


class Letters:
    """Encodes letter by letter."""

    def encode_prompt(self, text: str) -> list[int]:
        return words(text)

    def encode_turns(self, turns: tuple[Turn, ...]) -> list[int]:
        return words("".join(turn.text for turn in turns))

    def encode_output(self, text: str) -> list[int]:
        return words(text)


def predicted_in(path: Path, *rows: Any) -> list[list[tuple[str, list[int]]]]:
    traces = encoding.read_traces(write(path, list(rows)), Letters())
    return [[(each.label, each.tokens.tolist()) for each in t.predictions] for t in traces]


def test_what_a_growing_log_repeats_is_replayed_once(tmp_path: Path) -> None:
    turns = [
        {"role": role, "content": f"{letter}{role[0]}"}
        for letter in "abcde"
        for role in ("user", "assistant")
    ]
    whole = list(
        encoding.read_traces(write(tmp_path / "w.jsonl", [{"messages": turns}]), Letters())
    )
    growing = [{"messages": turns[:end]} for end in range(2, 11, 2)]
    for rows in (growing, growing[::-1], [*growing, *growing]):
        tally = RecordingTally()
        path = write(tmp_path / "g.jsonl", rows)
        found = list(encoding.read_traces(path, Letters(), skipped=tally))
        sides = {(tuple(each.prompt.tolist()), tuple(each.output.tolist())) for each in found}
        assert len(found) == len(sides) == 5
        assert sides == {(tuple(t.prompt.tolist()), tuple(t.output.tolist())) for t in whole}
        repeats = sum(len(row["messages"]) // 2 for row in rows) - 5
        assert tally.skipped == {encoding.REPEATED: repeats}
        assert tally.describe()[-1].startswith(f"skipped: {repeats} answer that was read before")


def test_samples_of_one_prompt_are_a_group(tmp_path: Path) -> None:
    path = write(tmp_path / "n.jsonl", [{"prompt": "a", "response": ["b", "c"]}, {"prompt": "a"}])
    found = list(encoding.read_traces(path, Letters(), limit=2))
    assert [each.output.tolist() for each in found] == [words("b"), words("c")]
    assert {each.group for each in found} == {f"{path}:1"}


def test_predictions_of_records_and_requests_are_read(tmp_path: Path) -> None:
    row = {"prompt": "a", "output": "b"}
    content = {"type": "content", "content": [{"type": "text", "text": "x"}]}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    assert predicted_in(
        tmp_path / "t.jsonl",
        row,
        {**row, "prediction": "xy"},
        {**row, "prediction": content},
        {**row, "prediction": None, "predictions": ["x", {"text": "y", "label": "z"}]},
        {**row, "output": "c", "request": {"prediction": content}},
        {"messages": messages, "prediction": "d"},
    ) == [
        [],
        [("prediction", words("xy"))],
        [("prediction", words("x"))],
        [("prediction 0", words("x")), ("z", words("y"))],
        [("prediction", words("x"))],
        [],  # the first answer of the conversation
        [("prediction", words("d"))],
    ]


@pytest.mark.parametrize(
    ("stated", "reason"),
    [
        ({"prediction": 7}, '"type": "content"'),
        ({"predictions": [7]}, "`predictions` are texts"),
        ({"predictions": [{"text": 7}]}, "a text that is not a string"),
        ({"predictions": [{"ids": [-1]}]}, "`predictions` holds -1"),
        ({"predictions": [{"ids": [1]}] * 65}, "beyond the limit of 64"),
    ],
)
def test_a_record_with_another_prediction_is_skipped_by_name(
    tmp_path: Path, stated: dict[str, Any], reason: str
) -> None:
    row = {"prompt_ids": [1], "output_ids": [1]}
    tally = RecordingTally()
    path = write(tmp_path / "t.jsonl", [row, {**row, **stated}])
    assert len(list(encoding.read_traces(path, Letters(), skipped=tally))) == 1
    assert reason in " ".join(tally.describe())
    with pytest.raises(TraceError, match=r"invalid prediction|no trace"):
        list(encoding.read_traces(path, Letters()))


def test_traces_come_back_from_disk_with_their_predictions() -> None:
    predictions = (
        Prediction(np.arange(3, dtype=np.int32), "\u00e4"),
        Prediction(np.zeros(1, np.int32)),
    )
    with trace_spool() as spool:
        spool.write(encoding.Trace(np.arange(2, dtype=np.int32), np.arange(4, dtype=np.int32)), 1)
        spool.write(encoding.Trace(np.zeros(0, np.int32), np.ones(1, np.int32), predictions), 2)
        spool.write(encoding.Trace(np.zeros(5, np.int32), np.ones(2, np.int32)), 3)
        for _ in range(2):
            read = list(spool.labelled())
            assert [label for label, _ in read] == [1, 2, 3]
            assert [len(trace.prompt) for _, trace in read] == [2, 0, 5]
            assert [(each.label, each.tokens.tolist()) for each in read[1][1].predictions] == [
                ("\u00e4", [0, 1, 2]),
                ("", [0]),
            ]
            assert not read[0][1].predictions
            assert not read[2][1].predictions


def grouped(rng: np.random.Generator, num_groups: int, num_rows: int) -> list[dict[str, Any]]:
    """Records of groups whose outputs are about the same, in an order that mixes them."""
    rows = []
    for group in range(num_groups):
        text = rng.integers(0, 300, 60)
        for _ in range(num_rows):
            output = np.where(rng.random(60) < 0.1, rng.integers(0, 300, 60), text)
            output = output[: rng.integers(20, 60)]
            rows.append({"prompt_ids": [5, group], "output_ids": output.tolist(), "group": group})
    return [rows[place] for place in rng.permutation(len(rows))]


def test_one_lane_is_the_replay_of_its_rows_in_order(tmp_path: Path) -> None:
    rows = grouped(np.random.default_rng(0), 4, 5)
    ordered = [row for group in dict.fromkeys(r["group"] for r in rows) for row in rows
               if row["group"] == group]  # fmt: skip
    plain = run(write(tmp_path / "ordered.jsonl", ordered))
    lanes = run(write(tmp_path / "t.jsonl", rows), "--lanes", 1)
    for figure in ("steps", "tokens", "traces", "mean_nodes"):
        assert plain[figure] == lanes[figure]


def test_lanes_are_replayed_step_by_step_as_by_hand(tmp_path: Path) -> None:
    """The same with a drafter that is told of each step here; siblings are what is gained."""
    rows = grouped(np.random.default_rng(1), 3, 6)
    report = run(write(tmp_path / "t.jsonl", rows), "--lanes", 4)
    steps, with_siblings = by_hand(rows, 4, in_groups=True)
    assert report["steps"] == steps
    assert report["tokens"] == sum(len(row["output_ids"]) for row in rows)
    assert report["traces"] == len(rows)
    assert report["accepted_by_source"]["siblings"] > 0
    without, _ = by_hand(rows, 4, in_groups=False)
    assert steps < without
    assert with_siblings > 0


def by_hand(rows: list[dict[str, Any]], num_lanes: int, *, in_groups: bool) -> tuple[int, int]:
    drafter = EmbeddedDrafter()
    steps = from_siblings = number = 0
    for group in dict.fromkeys(row["group"] for row in rows):
        waiting = [row for row in rows if row["group"] == group]
        running: list[list[Any]] = []
        while waiting or running:
            while waiting and len(running) < num_lanes:
                row = waiting.pop(0)
                options = SequenceOptions(group=f"{group}" if in_groups else "")
                drafter.open(f"{number}", row["prompt_ids"], options)
                running.append([f"{number}", row, 0, []])
                number += 1
            requests = [
                DraftRequest(name, np.array(new, np.int32), 2 + done, 32)
                for name, _, done, new in running
            ]
            for each, tree in zip(running, drafter.draft(requests), strict=True):
                name, row, done, _ = each
                output = row["output_ids"]
                path = tree.follow(np.array(output[done:], np.int32))
                from_siblings += int((tree.sources[path] == Source.SIBLINGS).sum())
                each[2:] = [min(len(output), done + len(path) + 1), output[done:][: len(path) + 1]]
                steps += 1
                if each[2] == len(output):
                    drafter.close(name, np.array(each[3], np.int32))
            running = [each for each in running if each[2] < len(each[1]["output_ids"])]
    return steps, from_siblings


def test_rows_of_one_lane_follow_one_another(tmp_path: Path) -> None:
    """Turns of an agent: the second begins when the first is at its end."""
    row: dict[str, Any] = {"prompt_ids": [5], "group": "task"}
    rows = [
        {**row, "output_ids": list(range(100, 120)), "lane": "a"},
        {**row, "output_ids": list(range(100, 120)), "lane": "a"},
        {**row, "output_ids": [1, 2, 3], "lane": 2},
    ]
    lanes = run(write(tmp_path / "t.jsonl", rows), "--lanes", 4)
    alone = [{**each, "lane": None} for each in rows]
    at_once = run(write(tmp_path / "u.jsonl", alone), "--lanes", 4)
    assert lanes["accepted_by_source"]["generations"] > 0.9
    assert lanes["steps"] < at_once["steps"]
    without_group = [{"prompt_ids": [5], "output_ids": each["output_ids"]} for each in rows]
    follow = run(write(tmp_path / "v.jsonl", without_group), "--lanes", 4)
    assert follow["steps"] == run(tmp_path / "v.jsonl")["steps"]


def test_traces_come_back_from_disk_with_their_lanes() -> None:
    with trace_spool() as spool:
        for number, (group, lane) in enumerate(
            [("g", "a"), ("", ""), ("\u00e4", ""), ("g", ""), ("g", "a"), ("", "")]
        ):
            prompt = np.full(number, 7, np.int32)
            spool.write(encoding.Trace(prompt, prompt, (), group, lane), number)
        for _ in range(2):
            numbers = [
                [[len(trace.prompt) for trace in lane()] for lane in lanes]
                for lanes in spool.lanes()
            ]
            assert numbers == [[[0, 4], [3]], [[1]], [[2]], [[5]]]
        assert [trace.group for trace in spool] == ["g", "", "\u00e4", "g", "g", ""]


def test_a_conversation_that_branches_counts_each_answer_once(tmp_path: Path) -> None:
    def said(*texts: str) -> dict[str, Any]:
        roles = ("user", "assistant") * len(texts)
        pairs = zip(roles, texts, strict=False)
        return {"messages": [{"role": role, "content": text} for role, text in pairs]}

    path = tmp_path / "log.jsonl"
    records = [
        said("When?", "At nine."),
        said("When?", "At ten."),  # asked again
        said("When?", "At nine.", "Sure?", "Yes."),
        said("When then?", "At nine."),  # edited
        {"request": said("When?"), "response": {"output": "At nine."}},  # in another shape
        {"no": "shape"},
    ]
    path.write_text("".join(f"{json.dumps(each)}\n" for each in records))
    tally = RecordingTally()
    found = list(encoding.read_traces(path, Letters(), None, tally))
    answers = ["".join(map(chr, each.output)) for each in found]
    assert answers == ["At nine.", "At ten.", "Yes.", "At nine."]
    assert tally.skipped == {encoding.REPEATED: 2, "no conversation": 1}


def test_outputs_are_replayed_under_a_constraint(tmp_path: Path) -> None:
    pytest.importorskip("llguidance", reason="an extra: run pip install '.[grammar]'")
    answers = [json.dumps({"place": place, "is_open": True}) for place in ("Rome", "Oslo", "Bern")]
    rows = [{"prompt": f"Which, {n}?", "output": each} for n, each in enumerate(answers)]
    path = write(tmp_path / "log.jsonl", [*rows, {"prompt": "?", "output": "I do not know."}])
    properties = {"place": {"type": "string"}, "is_open": {"type": "boolean"}}
    schema = tmp_path / "schema.json"
    schema.write_text(
        json.dumps({"type": "object", "properties": properties, "required": [*properties]})
    )
    plain = run(path, "--limit", 3)
    constrained = run(path, "--json-schema", schema)
    assert constrained["traces"] == plain["traces"] == 3  # the last does not match
    assert constrained["tokens"] == plain["tokens"]
    assert constrained["tokens_per_step"] > 1.3 * plain["tokens_per_step"]
    assert constrained["accepted_by_source"]["grammar"] > 0.2
    assert "grammar" not in plain["accepted_by_source"]
    assert "--choice and --tools" in refused(path, "--json-schema", schema, "--regex", "a")
    assert "is not JSON" in refused(path, "--json-schema", write(tmp_path / "a", []))
    assert "cannot be read" in refused(path, "--tools", tmp_path / "none")
