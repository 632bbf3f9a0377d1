"""What the texts say can be typed and found. Run: python -m pytest tests/test_readme.py"""

import re
import shlex

import pytest

from cli import ROOT, run
from train_ppo import StageConfig

NAMES = (
    "README.md RESULTS.md CONTRIBUTING.md docs/using.md data/README.md tests/EXERCISES.md".split()
)
TEXTS = {ROOT / name: (ROOT / name).read_text(encoding="utf-8") for name in NAMES}
OURS = "plumbing", "data", "variations", "bench"
FILES = [*ROOT.glob("*.py"), *(path for name in OURS for path in (ROOT / name).glob("*.py"))]
CODE = "\n".join(path.read_text(encoding="utf-8") for path in FILES)
# In a code block, a docstring or between backticks; what two spaces divide from it is a remark.
COMMAND = r"(?m)(?:^    +|`)(?:\.venv/bin/)?(?:python3?|torchrun)(?: --\w+ \d+)* (?:-m "
COMMAND += rf"((?:{'|'.join(OURS)})\.\w+)|([\w/]+\.py))\b((?: [^\s`#|]+)*)"
FOREIGN = {"--index", "--init_kl_coef", "--eps_clip", "--nproc_per_node"}  # of other programs


def commands():
    """(script, words) of each command in the texts and in docstrings"""
    found = re.findall(COMMAND, "\n".join([*TEXTS.values(), CODE]))
    return {(f"{a.replace('.', '/')}.py" if a else b, words) for a, b, words in found}


@pytest.mark.parametrize("script, words", sorted(commands()))
def test_every_command_is_there_and_knows_its_flags(script, words):
    assert (ROOT / script).exists()
    flags = {*re.findall(r"--\w+", words)}
    if flags:
        status, printed, error = run(script, *shlex.split(words.replace("$i", "1")), "-h")
        assert (status, error) == (0, "") and flags <= {*re.findall(r"--\w+", printed)}


@pytest.mark.parametrize("path", TEXTS, ids=NAMES)
def test_every_link_file_target_and_flag_is_there(path):
    text, makefile = TEXTS[path], (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:`|    )make (\w+)", text):
        assert f"\n{target}:" in makefile, target
    for link in re.findall(r"\]\(([^):#]+)", text):
        assert (path.parent / link).exists() or link == "https", link
    for name in re.findall(rf"`((?:{'|'.join(OURS)}|tests|docs)/[\w/]+\.\w+)`", text):
        assert (ROOT / name).exists(), name
    for flag in {*re.findall(r"--[a-z]\w+", text)} - FOREIGN:
        assert re.search(rf"\b{flag[2:].removeprefix('no_')}\b", CODE), flag


def test_what_the_readme_quotes_of_minippo_stands_there():
    source = (ROOT / "minippo.py").read_text(encoding="utf-8")
    lines = {line.split("  #")[0].strip() for line in source.splitlines()}
    quoted = re.findall(r"(?m)^    +((?:for |\w+ = )\S.*?)(?:   .*)?$", TEXTS[ROOT / "README.md"])
    assert len(quoted) > 3 and {*quoted} <= lines
    sampled = f"{StageConfig.steps * StageConfig.batch_size:,} in train_ppo.py"
    assert sampled in source.replace("\n#", "")
