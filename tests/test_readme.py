"""What the texts say can be typed and found."""

import re
import shlex

import pytest

from cli import ROOT, run
from data.convert import FLAGS

NAMES = "README.md RESULTS.md CONTRIBUTING.md docs/using.md data/README.md tests/EXERCISES.md"
TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in NAMES.split()}
FOLDERS = "plumbing", "data", "variations", "examples", "bench"
FILES = [*ROOT.glob("*.py"), *(path for name in FOLDERS for path in (ROOT / name).glob("*.py"))]
CODE = "\n".join(path.read_text(encoding="utf-8") for path in FILES)
# In a code block, a docstring or between backticks, up to two spaces
COMMAND = r"(?m)(?:^    +|`)(?:\.venv/bin/)?(?:python3?|torchrun)(?: --\w+ \d+)* (?:-m "
COMMAND += rf"((?:{'|'.join(FOLDERS)})\.\w+)|([\w/]+\.py))\b((?: [^\s`#|]+)*)"
COMMANDS = {*re.findall(COMMAND, "\n".join([*TEXTS.values(), CODE]))}
FOREIGN = {"--index", "--nproc_per_node"}  # flags of other programs


@pytest.mark.parametrize("module, script, words", sorted(COMMANDS))
def test_every_command_is_there_and_knows_its_flags(module, script, words):
    script = script or f"{module.replace('.', '/')}.py"
    assert (ROOT / script).exists()
    flags = {*re.findall(r"--\w+", words)}
    if flags:
        status, printed, error = run(script, *shlex.split(words.replace("$i", "1")), "-h")
        assert (status, error) == (0, "") and flags <= {*re.findall(r"--\w+", printed)}


@pytest.mark.parametrize("name", TEXTS)
def test_every_link_file_target_and_flag_is_there(name):
    text, makefile = TEXTS[name], (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:`|    )make (\w+)", text):
        assert f"\n{target}:" in makefile, target
    for link in re.findall(r"\]\(([^):#]+)", text):
        assert ((ROOT / name).parent / link).exists() or link == "https", link
    for path in re.findall(rf"`((?:{'|'.join(FOLDERS)}|tests|docs)/[\w/]+\.\w+)`", text):
        assert (ROOT / path).exists(), path
    for flag in {*re.findall(r"--[a-z]\w+", text)} - FOREIGN:
        field = flag[2:].removeprefix("no_")
        assert re.search(rf"(?m)^    {field}: |[\"']{flag}[\"']", CODE) or flag in FLAGS, flag


def test_make_run_resumes_each_stage():
    stages = re.findall(r"train_\w+\.py --resume\n", (ROOT / "Makefile").read_text())
    assert stages == [f"train_{x}.py --resume\n" for x in ("sft", "rm", "ppo")]
