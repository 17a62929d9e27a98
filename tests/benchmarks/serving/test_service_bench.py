"""What the service costs is measured without a failure, on every path."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.programs
def test_every_path_of_the_service_is_measured(tmp_path: Path) -> None:
    output = tmp_path / "service.json"
    options = ["--steps", "100", "--streams", "4", "--seconds", "0.4", "--json", "--output", output]
    command = [sys.executable, "-m", "benchmarks.serving.service", *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    figures = json.loads(done.stdout)
    assert figures == json.loads(output.read_text())
    for part in ("one_sequence", "large_steps"):
        assert figures[part]["failed"] == 0
    assert figures["large_steps"]["sequence_drafts_per_s"] > 100
    assert figures["large_steps"]["nodes_per_draft"] > 2
    for part in ("alone", "beside_wide", "streams"):
        assert figures[part]["errors"] == 0
        assert figures[part]["steps"] > 10
