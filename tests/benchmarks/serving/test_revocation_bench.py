"""Tokens that are revoked at once are gone within a second; the long form is the benchmark."""

import json
import os
import subprocess
import sys


def test_no_revoked_token_is_served_and_no_valid_one_is_lost() -> None:
    options = ["--rounds", "2", "--user", str(os.geteuid()), "--json"]
    command = [sys.executable, "-m", "benchmarks.serving.revocation", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout)
    assert figures["revoked"] == 12
    assert figures["wrong"] == []
    assert figures["served_after_1s"] == figures["valid_refused"] == 0
    assert figures["answers_to_valid"] > 50
