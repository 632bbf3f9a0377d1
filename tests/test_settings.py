"""What a user can do wrong, in one table, and the flags: plumbing/settings.py."""

import dataclasses
import io
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cli import FLAGS, run, stage, write_rows
from data.files import UserError
from plumbing.models import load_function
from plumbing.settings import read_flags, script

# What is done in the folder of a run (a line of sh); the command -> what its message contains.
# "sft", "rm", "ppo" mean a training script with --data DIR/data --out DIR --overwrite.
TABLE = r"""
sft --learning_rate 1 -> unrecognized arguments: --learning_rate 1 (-h explains the flags)
sft --lr nan -> --lr nan: should be at least 0 (-h
sft --steps 0 -> --steps 0: should be at least 1 (-h
ppo --micro_batch -1 -> --micro_batch -1: should be at least 0
sft --heads 3 -> channels (16): not a multiple of heads (3) (-h
sft --device cuda -> --device cuda: PyTorch finds only cpu here
sft --resume -> --resume continues ... --overwrite starts over: give one of them
ppo --kl_coef 0 --kl_target 5 -> --kl_target multiplies --kl_coef, which is 0
ppo --temperature 0 -> temperature (0.0): should be above 0
variations/rloo.py --k 1 -> k (1): should be at least 2
examples/iterate.py --device gpu --out DIR/1 -> --device gpu: PyTorch finds only cpu here
variations/rloo.py --temperature 0 -> temperature (0.0): should be above 0
variations/dpo.py --minibatches 9 --batch_size 8 -> minibatches (9), batch_size (8): a minibatch
variations/dpo.py --kl_coef 0 -> kl_coef (0.0) and temperature (1.0): should be above 0
rm rm.pt; ppo -> rm.pt: not found; train_rm.py makes it
echo damaged > rm.pt; ppo -> rm.pt: damaged, or no checkpoint ... train_rm.py makes it
rm sft.pt; ppo --models DIR -> sft.pt: not found; train_sft.py makes it
ppo --reward bad -> bad: ... should be module:function, for instance my:score
ppo --reward bad:few --separate_critic -> --separate_critic starts from the reward model
ppo --reward bad:few -> --reward: should return a list of 8 numbers, none beyond 1,000,000, not [1.0]
ppo --reward bad:holes -> none beyond 1,000,000, not nan for '
ppo --reward bad:words -> none beyond 1,000,000, not ['good', '
sample.py -> required: CHECKPOINT PROMPT (-h
sample.py DIR/sft.pt a --n 0 -> --n 0: should be at least 1
sample.py DIR/sft.pt a --temperature 0 -> temperature (0.0): should be above 0
sample.py DIR a -> the folder of a run; give a file in it, such as ... other.pt
sample.py DIR/ppo.pt a -> ppo.pt: not found; train_ppo.py makes it
sample.py DIR/rm.pt a -> rm.pt: holds 'rm', not 'ppo' or 'sft'; train_ppo.py makes it
sample.py DIR/other.pt a --trace -> other.pt: was not made from
bench/results.py seed sums -> seed: should be among seeds, settings, passes, equals, neighbours, sums
plumbing/hf.py import DIR/sft.pt DIR/new -> export CHECKPOINT FOLDER
plumbing/hf.py export DIR/sft.pt -> export CHECKPOINT FOLDER
"""
REWARDS = """
def few(p, r): return [1.0]
def words(p, r): return ["good"] * len(p)
def holes(p, r): return [float("nan")] * len(p)
"""


@pytest.fixture
def folder(made, tmp_path, monkeypatch):
    """-> a copy of it, to be spoilt, with another SFT model, other.pt, and rewards in bad.py."""
    (tmp_path / "bad.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    folder = shutil.copytree(made, tmp_path / "run")
    contents = torch.load(folder / "sft.pt")
    contents["model"]["trunk.norm.bias"] += 1
    torch.save(contents, folder / "other.pt")
    yield folder
    sys.modules.pop("bad", None)


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
    else:
        status, _, error = run(script, *flags)
    name = f"train_{script}.py" if script in FLAGS else script.split("/")[-1]
    assert status == 2 and error.startswith(f"{name}: ") and error.count("\n") == 1, error
    assert all(part in error for part in says.split(" ... ")), error
    assert all(path.read_bytes() == data for path, data in before.items())


EXTREME = {
    "sft": "--lr 0",
    "rm": "--warmup 99999999999",
    "ppo": """--kl_coef 0 --clip_eps inf --value_clip inf --max_grad_norm inf --gamma 0 --lam 0
        --temperature 99 --vf_coef 0 --max_new_tokens 99999 --minibatches 8""",
}
ODD = ["\x00\x1b[31m", "\u202eabc", "😀 é ñ 日本", "<|endoftext|>", " \t\n", "x" * 20, "\ud800"]


def test_odd_text_missing_files_and_extreme_settings_are_no_mistakes(folder):
    shutil.rmtree(folder / "data")
    rows = [[text + end for end in ("prompt", "chosen", "rejected")] for text in ODD * 3]
    write_rows(folder / "data", pref_train=rows)
    for kind, flags in EXTREME.items():
        status, printed, error = stage(kind, folder / "data", folder / "new", *flags.split())
        assert (status, error) == (0, "") and "\x1b" not in printed


def test_a_reward_is_looked_for_in_the_current_folder_last(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [x for x in sys.path if x.startswith("/")])
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    monkeypatch.chdir(tmp_path)
    Path("colorsys.py").write_text("def rgb_to_hls(*_): return 7")
    assert load_function("colorsys:rgb_to_hls")(0, 0, 0) == (0.0, 0, 0.0)  # the standard library's


# Flags are the fields of dataclasses


@dataclasses.dataclass
class Base:
    share: float = 0.5  # of all


@dataclasses.dataclass
class Example(Base):
    size: int = 4  # how large, 100 % sure
    name: str = ""  # of it
    loud: bool = False  # say all
    calm: bool = True  # say little
    share: float = 0.25  # of the rest


@dataclasses.dataclass
class Later:
    models: str = ""  # folder of models


def read(*words, **more):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["x", *words])
        return read_flags("Text.", Example, **more)


def test_flags_are_the_fields_of_dataclasses_in_one_object(capsys):
    config = read("--size", "8", "--share", "inf", "--loud", "--no_calm", run=False)
    assert vars(config) == vars(Example(size=8, share=float("inf"), loud=True, calm=False))
    assert read("--name", "a b", run=False, size=7).size == 7
    config, words = read("a", "--size", "1", "b c", run=False, positional="TEXT")
    assert (config.size, words) == (1, ["a", "b c"])
    assert read("--share", "0", run=False).share == 0
    for wrong in ("--size=0", "--share=-0.1", "--calm", "--no_loud", "--siz=3", "more"):
        with pytest.raises(UserError, match=r"\(-h explains the"):
            read(wrong, run=False)
    with pytest.raises(SystemExit):
        read("-h", run=False)
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
    for there, device in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        config = read("--seed", "7", "--out", "new/er")
        assert [config.device, config.data, config.out] == [
            device,
            Path("data/zoo"),
            Path("new/er"),
        ]
        assert torch.initial_seed() == 7 and Path("new/er").is_dir()
    for words, folder in (((), "new"), (("--models", "a"), "a")):
        monkeypatch.setattr(sys, "argv", ["x", *words])
        assert read_flags("", Later, out="new/er").models == Path(folder)
    Path("new/er/sft.pt").touch()
    monkeypatch.setattr(sys, "argv", ["x"])
    assert read_flags("", Later, out="new/er").models == Path("new/er")


def fail(error):
    raise error


ERRORS = [
    (UserError("do this é\x1b[31m\n\u202e"), 2, "do this é\\x1b[31m\\n\\u202e\n"),
    (ModuleNotFoundError("", name="x.y"), 2, "the package x is missing; pip install x\n"),
    (
        FloatingPointError("nan\nmore"),
        2,
        "nan; in training, start over with --overwrite and a smaller --lr\n",
    ),
    (BrokenPipeError(32, "Broken pipe"), 2, "the output: Broken pipe\n"),
    (OSError(28, "No space left", "a.txt"), 2, "a.txt: No space left\n"),
    (RuntimeError("CUDA out of memory.\nall"), 2, "not enough memory (CUDA out of memory.)"),
    (MemoryError(), 2, "not enough memory (); --micro_batch 1 needs less"),
    (KeyboardInterrupt("stopped; step 3 is saved"), 130, "stopped; step 3 is saved\n"),
    (KeyboardInterrupt(), 130, "stopped; files written before are whole\n"),
]


@pytest.mark.parametrize("error, status, says", ERRORS)
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


def test_characters_that_a_stream_does_not_know_are_replaced(monkeypatch):
    @script
    def main(x, y):
        print("é")
        return sys.stdin and sys.stdin.read(), x, y

    out = io.TextIOWrapper(io.BytesIO(), "ascii", write_through=True)
    notebook, texts = SimpleNamespace(write=lambda _: None), io.BytesIO(b"\xff")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(texts, "utf-8"))
    for stream, read in ((out, "\ufffd"), (notebook, None)):
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(1, y=2) == (read, 1, 2) and sys.stdout is stream
        monkeypatch.setattr(sys, "stdin", None)  # closed
    assert out.buffer.getvalue() == b"?\n"
