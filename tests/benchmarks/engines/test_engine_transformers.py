"""The benchmark of drafts inside transformers, on a tiny model."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines.engine_report import OVERALL, Whose
from benchmarks.engines.in_transformers import main
from benchmarks.engines.lookup_settings import num_lookup_steps
from benchmarks.engines.transformers_runs import Contender, Engine
from decoder.model.pretrained import ModelOptions, load_model
from tests.decoder.model_fixtures import byte_tokenizer, model_directory  # noqa: F401  fixtures

NEW_TOKENS = 24


@pytest.mark.parametrize(("num_tokens", "longest"), [(3, 1), (10, 2), (20, 3)])
def test_replayed_prompt_lookup_takes_the_steps_that_the_real_one_takes(
    num_tokens: int,
    longest: int,
    model_directory: Path,  # noqa: F811
) -> None:
    engine = Engine(load_model(ModelOptions(str(model_directory))), NEW_TOKENS)
    settings = {"prompt_lookup_num_tokens": num_tokens, "max_matching_ngram_size": longest}
    saved = 0
    for text in ("the the the", "abcabc", "hello hello"):
        run = engine.run(Contender("", Whose.ENGINE, settings), text)
        prompt = engine.language_model.encode(text)
        steps = num_lookup_steps((num_tokens, longest), prompt, run.token_ids)
        assert steps == run.num_steps
        saved += len(run.token_ids) - steps
    assert saved


def test_a_benchmark_reports_every_way_and_goes_on_where_it_was(
    model_directory: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the the the\nabcabc\nhello hello\nonce upon a time\n")
    options: dict[str, Any] = {
        "prompts": prompts,
        "output": tmp_path / "report.json",
        "index": [],
        "model": str(model_directory),
        "per_category": 2,
        "warm_per_category": 2,
        "max_new_tokens": NEW_TOKENS,
        "answers": tmp_path / "answers.json",
    }
    main(**options)
    report = json.loads(options["output"].read_text())
    # The best setting of look-ups is a way of its own, unless it is one of the others.
    assert len(report["ways"]) in {5, 6}
    for figures in report["ways"].values():
        assert figures[OVERALL]["num_identical"] == figures[OVERALL]["num_prompts"] == 2
        assert figures[OVERALL]["tokens_per_step"] >= 1
    assert report["num_warm"] == 2
    main(**options)
    again = json.loads(options["output"].read_text())
    assert again["ways"] == report["ways"]  # the seconds, too: nothing was run again
