"""The benchmark for a GPU. Run: python -m pytest tests/test_gpu.py"""

import os
import re
import subprocess
import sys

import pytest

from cli import ROOT

if not os.environ.get("NO_SKIP"):
    pytest.importorskip("transformers")


def test_the_benchmark_for_a_gpu_runs_on_a_tiny_model_too():
    command = [sys.executable, "-m", "bench.gpu", "--try"]
    lines = subprocess.check_output(command, cwd=ROOT, encoding="utf-8").splitlines()
    assert (
        sum(
            re.match(r"(64|256) prompts, eager: rollout \d.*, scoring \d.*, update \d", line)
            is not None
            for line in lines
        )
        == 2
    )
    assert sum("transformers: generate()" in line for line in lines) == 2
