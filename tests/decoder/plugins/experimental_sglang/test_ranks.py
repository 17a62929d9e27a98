import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

RANK = """
import sys
from types import SimpleNamespace
import numpy as np
import torch
from decoder.plugins.experimental_sglang.corpus import sharing
rank, store = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
group = SimpleNamespace(world_size=2, ranks=[0, 1], cpu_group=torch.distributed.group.WORLD)
nodes = np.full((2, 3, 4), rank, np.int64) + np.arange(4) * (1 - rank)
sharing(group)(nodes)
print(nodes.tolist())
torch.distributed.destroy_process_group()
"""
"""What a rank does: the first of them in the process of the test."""


def test_a_model_on_one_device_shares_nothing() -> None:
    from decoder.plugins.experimental_sglang.corpus import sharing  # noqa: PLC0415  (needs torch)

    alone: Any = SimpleNamespace(world_size=1)
    assert sharing(alone) is None


def test_every_rank_gets_the_nodes_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = str(tmp_path / "store")
    second = subprocess.Popen(
        [sys.executable, "-c", RANK, "1", store], stdout=subprocess.PIPE, text=True
    )
    monkeypatch.setattr(sys, "argv", ["-c", "0", store])
    exec(RANK, {})  # noqa: S102  as the other process does
    printed, _ = second.communicate(timeout=60)
    assert capsys.readouterr().out == printed == f"{[[[0, 1, 2, 3]] * 3] * 2}\n"
