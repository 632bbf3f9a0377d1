"""Mistakes of users, in one table, and the flags: plumbing/settings.py."""

import io
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from cli import FLAGS, read, run, stage, write_rows
from data.files import UserError
from plumbing.models import load_function
from plumbing.settings import script
from tiny import inf, nan

# What is done in the folder of a run (a line of sh); the command -> what its message contains.
# "sft", "rm", "ppo" mean a training script with --data DIR/data --out DIR --overwrite.
TABLE = r"""
sft --learning_rate 1 -> --learning_rate 1 (-h explains the flags)
sft --lr nan -> --lr nan: should be at least 0
sft --steps 0 -> --steps 0: should be at least 1
ppo --micro_batch -1 -> --micro_batch -1: should be at least 0
sft --device cuda -> --device cuda: PyTorch finds only cpu
sft --resume -> --resume continues
ppo --kl_coef 0 --kl_target 5 -> --kl_target multiplies --kl_coef
variations/rloo.py --k 1 -> k (1): should be at least 2
examples/iterate.py --device gpu --out DIR/1 -> --device gpu: PyTorch finds only cpu
variations/rloo.py --temperature 0 -> temperature (0.0): should be above 0
variations/dpo.py --minibatches 9 --batch_size 8 -> minibatches (9)
variations/dpo.py --kl_coef 0 -> kl_coef (0.0)
rm rm.pt; ppo -> rm.pt: not found; train_rm.py makes it
echo damaged > rm.pt; ppo -> rm.pt: damaged, or not a checkpoint ... train_rm.py makes it
ppo --adam_eps 0 -> --adam_eps 0.0: should be above 0
ppo --policy DIR/data/../ppo.pt -> ppo.pt: would be replaced; choose another --out
ppo --reward math -> math: ... should be module:function
ppo --reward math:pi -> math:pi: ... not a function; should be module:function
ppo --reward test_settings:few --separate_critic -> --separate_critic starts from the reward model
ppo --reward test_settings:few -> a list of 8 numbers, none beyond 1,000,000, not [1.0]
ppo --reward test_settings:holes -> not nan for '
ppo --reward test_settings:words -> not ['good', '
ppo --reward test_settings:pairs -> a list of 8 numbers, none beyond 1,000,000, not tensor
ppo --reward test_settings:huge -> a list of 8 numbers, none beyond 1,000,000, not [1000
sample.py -> required: CHECKPOINT PROMPT
sample.py DIR/sft.pt a --temperature 0 -> temperature (0.0): should be above 0
sample.py DIR a -> give a file in it, such as ppo.pt
rm ppo.pt; sample.py DIR/ppo.pt a -> ppo.pt: not found; train_ppo.py makes it
sample.py DIR/rm.pt a -> rm.pt: holds 'rm', not 'ppo' or 'sft'
bench/results.py seed sums -> seed: should be among seeds,
plumbing/hf.py import DIR/sft.pt DIR/new -> export CHECKPOINT FOLDER
plumbing/hf.py export DIR/sft.pt -> export CHECKPOINT FOLDER
plumbing/hf.py export DIR/sft.pt DIR/data -> data: already exists; give a new folder
"""


def few(prompts, responses):
    return [1.0]


def holes(prompts, responses):
    return [nan] * len(prompts)


def words(prompts, responses):
    return ["good"] * len(prompts)


def pairs(prompts, responses):
    return torch.ones(len(prompts), 2)


def huge(prompts, responses):
    return [10**400] * len(prompts)


@pytest.fixture
def folder(made, tmp_path):
    """-> a copy of it, to be spoilt."""
    return shutil.copytree(made, tmp_path / "run")


@pytest.mark.parametrize("line", TABLE.strip().splitlines())
def test_a_mistake_is_one_clear_line_and_loses_nothing(folder, monkeypatch, line):
    done, says = line.split(" -> ")
    done, _, command = done.rpartition("; ")
    subprocess.run(done, shell=True, cwd=folder, check=True)
    before = {path: path.read_bytes() for path in folder.glob("**/*") if path.is_file()}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    script, *flags = shlex.split(command.replace("DIR", str(folder)))
    if script in FLAGS:
        status, _, error = stage(script, folder / "data", folder, "--overwrite", *flags)
        script = f"train_{script}.py"
    else:
        status, _, error = run(script, *flags)
    assert status == 2 and error.startswith(f"{Path(script).name}: "), error
    assert error.count("\n") == 1, error
    assert all(part in error for part in says.split(" ... ")), error
    assert all(path.read_bytes() == data for path, data in before.items())


EXTREME = {
    "sft": "--lr 0",
    "rm": "--warmup 99999999999",
    "ppo": """--kl_coef 0 --clip_eps inf --value_clip inf --max_grad_norm inf --gamma 0 --lam 0
        --temperature 99 --vf_coef 0 --max_new_tokens 99999 --minibatches 8
        --warmup 0""",
}
ODD = ["\x00\x1b[31m", "\u202eabc", "😀 é ñ 日本", "<|endoftext|>", " \t\n", "x" * 20, "\ud800"]


def test_odd_text_and_extreme_settings_are_no_mistakes(folder):
    shutil.rmtree(folder / "data")
    rows = [[text + end for end in ("prompt", "chosen", "rejected")] for text in ODD * 3]
    write_rows(folder / "data", pref_train=rows)
    for kind, flags in EXTREME.items():
        status, printed, error = stage(kind, folder / "data", folder / "new", *flags.split())
        assert (status, error) == (0, "") and "\x1b" not in printed


def test_a_reward_is_looked_for_in_the_current_folder_last(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [x for x in sys.path if x])
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    monkeypatch.chdir(tmp_path)
    Path("colorsys.py").write_text("def rgb_to_hls(*_): return 7")
    assert load_function("colorsys:rgb_to_hls")(0, 0, 0) == (0.0, 0, 0.0)  # the standard library's


# Flags are the fields of dataclasses


@dataclass
class Base:
    share: float = 0.5  # of all


@dataclass
class Example(Base):
    size: int = 4  # how large, 100 % sure
    name: str = ""  # of it
    loud: bool = False  # say all
    calm: bool = True  # say little
    share: float = 0.25  # of the rest
    models: str = ""  # folder of models


def test_flags_are_the_fields_of_dataclasses(capsys):
    config = read("--size 8 --share inf --loud --no_calm", Example, run=False)
    assert vars(config) == vars(Example(size=8, share=inf, loud=True, calm=False))
    assert read("--name 'a b'", Example, run=False, size=7).size == 7
    config, words = read("a --size 1 'b c'", Example, run=False, positional="TEXT")
    assert (config.size, words) == (1, ["a", "b c"])
    assert read("--share 0", Example, run=False).share == 0
    for wrong in ("--size=0", "--share=-0.1", "--calm", "--no_loud", "--siz=3", "more"):
        with pytest.raises(UserError, match="-h explains"):
            read(wrong, Example, run=False)
    with pytest.raises(SystemExit):
        read("-h", Example, run=False)
    printed = " ".join(capsys.readouterr().out.split())
    for says in (
        "Text.",
        "--size int how large, 100 % sure (4)",
        "--share float of the rest (0.25)",
        "--loud say all",
        "--no_calm switch off: say little",
    ):
        assert says in printed


def test_a_run_has_folders_a_device_and_a_seed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = "--seed 7 --out new/er"
    torch.set_float32_matmul_precision("high")
    for there, more, device in ((1, "", "cuda"), (1, " --device cpu", "cpu"), (0, "", "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        config = read(flags + more, Example)
        assert config.device == device and torch.initial_seed() == 7
    assert torch.get_float32_matmul_precision() == "highest"
    assert (config.data, config.out) == (Path("data/zoo"), Path("new/er")) and config.out.is_dir()
    assert config.models == Path("new")
    for folder in ("new/er", "new"):
        Path(folder, "sft.pt").touch()
        assert read(flags, Example).models == Path("new/er")
    assert read(flags + " --models a", Example).models == Path("a")


def fail(error):
    raise error


@pytest.mark.parametrize(
    "error, status, says",
    [
        (UserError("do this é\x1b[31m\n\u202e"), 2, "do this é\\x1b[31m\\n\\u202e\n"),
        (ModuleNotFoundError("", name="x.y"), 2, "the package x is missing; pip install x\n"),
        (FloatingPointError("nan\nmore"), 2, "nan; in training, start over with --overwrite"),
        (BrokenPipeError(32, "Broken pipe"), 2, "the output: Broken pipe\n"),
        (OSError(28, "No space left", "a.txt"), 2, "a.txt: No space left\n"),
        (RuntimeError("CUDA out of memory.\nall"), 2, "not enough memory (CUDA out of memory.)"),
        (MemoryError(), 2, "not enough memory (); in training, try --micro_batch 1"),
        (KeyboardInterrupt("stopped; step 3 is saved"), 130, "stopped; step 3 is saved\n"),
        (KeyboardInterrupt(), 130, "stopped; files written before are whole\n"),
    ],
)
def test_an_error_is_explained_in_one_line(monkeypatch, capsys, error, status, says):
    monkeypatch.setattr(sys, "argv", ["folder/x.py"])
    with pytest.raises(SystemExit) as stop:
        script(fail)(error)
    printed = capsys.readouterr().err
    assert stop.value.code == status
    assert printed.startswith(f"x.py: {says}") and printed.find("\n") == len(printed) - 1


@pytest.mark.parametrize("error", [TypeError("a"), ValueError(), RuntimeError("b"), OSError("c")])
def test_a_mistake_of_ours_keeps_its_traceback(error):
    with pytest.raises(type(error)):
        script(fail)(error)


def test_characters_unknown_to_a_stream_are_replaced(monkeypatch):
    @script
    def main(x, y):
        print("é")
        return sys.stdin and sys.stdin.read(), x, y

    out, typed = io.BytesIO(), io.BytesIO(b"\xff")
    terminal = io.TextIOWrapper(typed, "utf-8"), io.TextIOWrapper(out, "ascii", write_through=True)
    notebook = None, io.StringIO()  # standard input is closed
    for (stdin, stdout), text in ((terminal, "\ufffd"), (notebook, None)):
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(1, y=2) == (text, 1, 2) and sys.stdout is stdout
    assert out.getvalue() == b"?\n"
