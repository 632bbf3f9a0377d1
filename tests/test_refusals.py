"""What a user can do wrong, in one table. Each ends in one clear line and status 2, without a
traceback, and leaves every model and report as it was.

Run: python -m pytest tests/test_refusals.py. How damaged checkpoints are recognised is in
test_checkpoints.py, what --resume compares in test_state.py.
"""

import dataclasses
import gzip
import io
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

import train_ppo
import train_rm
import train_sft
from cli import FLAGS, run, shell, write_data
from minippo import GPT, GPTConfig, PPOConfig
from plumbing.checkpoints import load_checkpoint, save_checkpoint
from plumbing.errors import UserError, explain, run_script
from plumbing.models import load_function
from plumbing.settings import RunConfig, explanations, read_flags
from plumbing.tokenizer import Tokenizer
from plumbing.training import FitConfig

REWARDS = """import torch
def fails(prompts, responses): raise ZeroDivisionError("no words")
def late(prompts, responses): return {}["missing"]
def square(prompts, responses): return torch.zeros(len(prompts), 2)
def few(prompts, responses): return [1.0]
def none(prompts, responses): pass
def nan(prompts, responses): return [0.0] * (len(prompts) - 1) + [float("nan")]
def infinite(prompts, responses): return [float("inf")] * len(prompts)
def large(prompts, responses): return [1e6] * (len(prompts) - 1) + [-1.1e6]
def huge(prompts, responses): return [10**400] * len(prompts)
def keys(prompts, responses): return {float(i): 0.0 for i in range(len(prompts))}
def letters(prompts, responses): return "1" * len(prompts)
def several(prompts, responses): return {float(i) for i in range(len(prompts))}
def escape(prompts, responses): raise ValueError("\\x1b[31m\\n")
def words(prompts, responses): return ["good"] * len(prompts)
def nested(prompts, responses): return fails(prompts, responses)
number = 7
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """-> a folder with data, models and a finished run of each stage."""
    folder = tmp_path_factory.mktemp("finished")
    write_data(folder / "data")
    for kind, flags in FLAGS.items():
        given = ["--data", folder / "data", "--out", folder, *flags]
        assert run(f"train_{kind}.py", *given)[0] == 0
    return folder


@pytest.fixture
def folder(finished, tmp_path, monkeypatch):
    """-> a copy of it, to be spoilt, with modules of rewards."""
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "badrewards.py").write_text(REWARDS)
    (tmp_path / "wrongrewards.py").write_text("def score(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "run"
    for name in ("badrewards", "wrongrewards"):
        sys.modules.pop(name, None)


# What a user spoils: functions of that folder


def rows(task, *lines, split="train"):
    """These lines (bytes, or objects that become JSON) in a file of the data."""
    data = [x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines]
    return put(f"data/{task}_{split}.jsonl", b"\n".join(data))


def put(name, data):
    return lambda folder: (folder / name).write_bytes(data)


def copy(source, name):
    return lambda folder: shutil.copy(folder / source, folder / name)


def remove(*names):
    return lambda folder: [(folder / name).unlink() for name in names]


def folder_in_place_of(name):
    return lambda folder: ((folder / name).unlink(), (folder / name).mkdir())


def without(name, key):
    def spoil(folder):
        contents = torch.load(folder / name)
        del contents[key]
        torch.save(contents, folder / name)

    return spoil


def interrupted(kind, *more):
    """The state of a run that is not finished; more: (key, value) of its contents."""

    def spoil(folder):
        state = torch.load(folder / f"{kind}_state.pt")
        torch.save(state | {"step": 1, "done": False} | dict(more), folder / f"{kind}_state.pt")

    return spoil


def foreign(name, kind):
    """A model of the same size, with another vocabulary."""

    def spoil(folder):
        model, tokenizer, facts = load_checkpoint(folder / "sft.pt", ["sft"])
        save_checkpoint(
            folder / name, kind, model, Tokenizer([*tokenizer.tokens[:-1], b"\0\0"]), **facts
        )

    return spoil


def smaller(name, kind):
    """A model of another size, with the same vocabulary."""

    def spoil(folder):
        tokenizer = load_checkpoint(folder / "sft.pt", ["sft"])[1]
        model = GPT(GPTConfig(tokenizer.vocab_size, 32, 1, 2, 16))
        save_checkpoint(folder / name, kind, model, tokenizer)

    return spoil


def trained_again(kind):
    def spoil(folder):
        model, tokenizer, facts = load_checkpoint(folder / f"{kind}.pt", [kind])
        save_checkpoint(folder / f"{kind}.pt", kind, model, tokenizer, **facts | {"val_loss": 0.5})

    return spoil


GOOD = {"prompt": "a", "completion": "b"}
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}

# (stage, flags, what is spoilt, words of the message)
FLAG_CASES = [
    ("sft", "--learning_rate 1", ["--learning_rate", "(-h explains the flags)"]),
    ("sft", "--epoch 1", ["--epoch", "-h"]),  # no guessing at abbreviations
    ("sft", "extra", ["extra", "-h"]),
    ("sft", "--lr", ["--lr", "-h"]),
    ("sft", "--lr fast", ["--lr", "fast", "-h"]),
    ("sft", "--epochs 1.5", ["--epochs", "1.5"]),
    ("sft", "--lr nan", ["--lr nan: should be between 0 and inf"]),
    ("sft", "--vocab_size 256", ["--vocab_size 256: should be between 257 and 1e+06"]),
    ("sft", "--dropout 1", ["--dropout 1.0: should be between 0 and 0.9"]),
    ("sft", "--seed -1", ["--seed -1: should be between 0"]),
    ("sft", "--heads 3", ["channels (16): not a multiple of heads (3)", "-h"]),
    ("sft", "--separate_critic", ["--separate_critic"]),  # of stage 3 alone
    ("sft", "--device tpu", ["--device tpu: should be auto, cpu or cuda"]),
    ("sft", "--dtype float16", ["--dtype float16: should be float32 or bfloat16"]),
    ("sft", "--resume --overwrite", ["--resume", "--overwrite", "one of them"]),
    ("sft", "--init {folder}", ["--vocab_size has no effect with --init; leave it out"]),
    ("sft", "--max_steps 9", ["--max_steps has no effect with --epochs"]),
    ("rm", "--answers 1", ["--answers 1: should be between 2 and inf"]),
    ("rm", "--layers 2", ["--layers"]),
    ("ppo", "--temperature 0", ["--temperature 0.0: should be between 0.01 and inf"]),
    ("ppo", "--lam 1.5", ["--lam 1.5: should be between 0 and 1"]),
    ("ppo", "--batch_size 1", ["--minibatches 2: more than --batch_size 1"]),
    ("ppo", "--group_size 3", ["--batch_size 8: should be a multiple of 3, the group size"]),
    ("ppo", "--kl_target 3", ["--kl_target has no effect without --kl_horizon"]),
    ("ppo", "--kl_coef 0 --kl_horizon 9", ["--kl_horizon has no effect with --kl_coef 0"]),
    ("ppo", "--max_grad_norm 0", ["--max_grad_norm 0.0: should be between 1e-06 and inf"]),
    ("ppo", "--critic_lr 0.1", ["--critic_lr has no effect without --separate_critic"]),
    ("ppo", "--report_prompts 9", ["--report_prompts has no effect with --no_report"]),
]
DATA_CASES = [
    ("rm", "", remove("data/pref_train.jsonl"), ["pref_train.jsonl: cannot be read", "chosen"]),
    ("sft", "--data {folder}/none", None, ["none/sft_train.jsonl: cannot be read (No such file"]),
    ("sft", "--data {folder}/sft.pt", None, ["should be a folder", "data/convert.py"]),
    ("sft", "", folder_in_place_of("data/sft_train.jsonl"), ["sft_train.jsonl", "directory"]),
    ("sft", "", rows("sft", b"", b"  "), ["sft_train.jsonl: no rows; it should hold one JSON obj"]),
    ("sft", "", rows("sft", b"prompt,completion"), ["sft_train.jsonl, line 1: not JSON"]),
    ("sft", "", rows("sft", b"", GOOD, b'{"prompt": "a"'), ["sft_train.jsonl, line 3: not JSON"]),
    ("sft", "", rows("sft", GOOD, b"\x00"), ["line 2: not JSON"]),
    ("sft", "", rows("sft", b"[" * 99999), ["line 1", "a JSON array"]),
    ("sft", "", rows("sft", GOOD, b"[" * 99999), ["line 2: not JSON"]),
    ("sft", "", rows("sft", b"7"), ["line 1: found int; it should hold"]),
    ("sft", "", rows("sft", [GOOD]), ["line 1: found list", "data/convert.py makes such a file"]),
    ("sft", "", rows("sft", b"[", GOOD, b"]"), ["line 1: a JSON array; data/convert.py makes"]),
    ("sft", "", rows("sft", {}), ["line 1: no key 'prompt'; found no key at all"]),
    ("sft", "", rows("sft", {"prompt": "a", "x": 1}), ["no key 'completion'; found 'prompt', 'x'"]),
    (
        "sft",
        "",
        rows("sft", {"messages": []}),
        ["no key 'prompt'", "'messages'; data/convert.py w"],
    ),
    ("rm", "", rows("pref", {"chosen": "x", "rejected": "y"}), ["no key 'prompt'", "data/convert"]),
    ("sft", "", rows("sft", GOOD | {"completion": None}), ["value of 'completion'", "found null"]),
    ("sft", "", rows("sft", GOOD | {"prompt": {"a": 1}}), ["'prompt' should be a string, found {"]),
    (
        "rm",
        "",
        rows("pref", PAIR | {"chosen": [{}]}),
        ["'chosen'", "found [{}]; data/convert.py wr"],
    ),
    ("sft", "", rows("sft", GOOD, b'{"prompt": "\xff"}'), ["line 2: not UTF-8 (", "at byte 12"]),
    ("sft", "", rows("sft", json.dumps(GOOD).encode("utf-16")), ["line 1: not UTF-8"]),
    (
        "sft",
        "",
        rows("sft", {"prompt": 7}, split="val"),
        ["sft_val.jsonl, line 1", "'prompt'", "7"],
    ),
    ("rm", "", rows("pref", GOOD, split="val"), ["pref_val.jsonl, line 1: no key 'chosen'"]),
    ("ppo", "", rows("prompts", {"question": "a"}, split="val"), ["prompts_val.jsonl, line 1"]),
    (
        "sft",
        "",
        rows("sft", GOOD | {"prompt": "why " * 99}),
        ["no prompt leaves room", "--context"],
    ),
    ("rm", "", rows("pref", PAIR | {"rejected": "b"}), ["no two answers differ"]),
    ("ppo", "", rows("prompts", {"prompt": ""}), ["no prompt leaves room in the context of 48"]),
    (
        "sft",
        "--data {folder}",
        put("sft_train.jsonl.gz", gzip.compress(b"x" * 999)[:-20]),
        ["sft_train.jsonl.gz: cannot be read"],
    ),
    ("sft", "--data {folder}", put("sft_train.jsonl.gz", b"x"), ["gz: cannot be read", "gzip"]),
]
FILE_CASES = [
    ("rm", "", remove("sft.pt"), ["sft.pt: not found; train_sft.py makes it"]),
    ("ppo", "", remove("rm.pt"), ["rm.pt: not found; train_rm.py makes it"]),
    ("ppo", "--models {folder}/none", None, ["none/sft.pt: not found"]),
    ("ppo", "", copy("sft.pt", "rm.pt"), ["rm.pt: holds 'sft', not 'rm'", "train_rm.py"]),
    (
        "ppo",
        "",
        foreign("sft.pt", "sft"),
        ["rm.pt was not made from sft.pt; run train_rm.py again"],
    ),
    ("ppo", "", smaller("sft.pt", "sft"), ["rm.pt was not made from sft.pt"]),
    ("ppo", "", trained_again("sft"), ["rm.pt was not made from sft.pt"]),
    ("ppo", "--policy {folder}/x", foreign("x", "ppo"), ["x: was not made from", "sft.pt"]),
    ("ppo", "--policy {folder}/x", smaller("x", "ppo"), ["x: was not made from", "sft.pt"]),
    ("ppo", "--reference {folder}/rm.pt", None, ["rm.pt: holds 'rm', not 'ppo' or 'sft'"]),
    ("sft", "", interrupted("sft"), ["sft_state.pt: a run is there; --resume goes"]),
    ("rm", "", None, ["rm_state.pt: a run is there", "--overwrite begins again"]),
    ("ppo", "--lr 1", None, ["ppo_state.pt: a run is there", "--resume", "--overwrite"]),
    ("ppo", "", remove("ppo_state.pt"), ["ppo.pt: a model is there", "--overwrite"]),
    ("ppo", "--resume --lam 0.5", interrupted("ppo"), ["saved with lam = 1.0;", "--overwrite"]),
    ("ppo", "--resume --seed 5", interrupted("ppo"), ["ppo_state.pt was saved with seed = 0"]),
    ("sft", "--resume --batch_size 9", interrupted("sft"), ["saved with batch_size = 16"]),
    ("sft", "--resume --layers 2", interrupted("sft"), ["saved with layers = 1"]),
    ("rm", "--resume --lr 1", interrupted("rm"), ["saved with lr = 0.001"]),
    ("ppo", "--resume", put("ppo_state.pt", b"x"), ["ppo_state.pt: damaged", "--overwrite"]),
    (
        "ppo",
        "--resume",
        without("ppo_state.pt", "settings"),
        ["another version or algorithm; --overwrite"],
    ),
    (
        "ppo",
        "--resume",
        without("ppo_state.pt", "random"),
        ["another version's (KeyError); --over"],
    ),
    ("ppo", "--resume", interrupted("ppo", ("optimizer", {})), ["damaged, or another version's"]),
    ("ppo", "--resume", rows("prompts", {"prompt": "What?"}), ["data or vocabulary have changed"]),
    ("sft", "--resume", rows("sft", GOOD), ["data or vocabulary have changed"]),
    ("rm", "--resume", rows("pref", PAIR, split="val"), ["data or vocabulary have changed"]),
    ("sft", "--resume", rows("sft", GOOD, split="val"), ["data or vocabulary have changed"]),
    ("rm", "--resume", remove("rm.pt"), ["rm.pt is gone; --overwrite makes it again"]),
    ("rm", "--resume", trained_again("sft"), ["sft.pt has been made again since"]),
    ("ppo", "--resume", trained_again("rm"), ["rm.pt has been made again since", "--overwrite"]),
    ("sft", "--out {folder}/rm.pt", None, ["rm.pt: File exists"]),
    ("ppo", "--overwrite", folder_in_place_of("ppo.jsonl"), ["ppo.jsonl: Is a directory"]),
]
REWARD_CASES = [
    ("badrewards", ["--reward badrewards: ", "should be module:function, for instance my:score"]),
    (":", ["module:function"]),
    ("nowhere:score", ["nowhere", "ModuleNotFoundError"]),
    ("wrongrewards:score", ["SyntaxError", "wrongrewards.py, line 1", "module:function"]),
    ("badrewards:missing", ["AttributeError", "missing"]),
    ("badrewards:number", ["number is no function"]),
    ("badrewards:few --separate_critic", ["--separate_critic starts from the reward model"]),
    ("badrewards:fails", ["--reward: ZeroDivisionError: no words (", "badrewards.py, line 2)"]),
    ("badrewards:nested", ["ZeroDivisionError: no words (", "badrewards.py, line 2)"]),
    ("badrewards:late", ["KeyError: 'missing'", "line 3"]),
    ("badrewards:square", ["8 responses should get a list of 8 numbers", "torch.Size([8, 2])"]),
    ("badrewards:few", ["8 numbers from -1,000,000 to 1,000,000, got 1"]),
    ("badrewards:none", ["8 numbers", "got None"]),
    ("badrewards:nan", ["8 numbers", "got nan for '"]),
    ("badrewards:infinite", ["got inf for '"]),
    ("badrewards:large", ["to 1,000,000, got -1100000.0 for '"]),
    ("badrewards:huge", ["8 numbers", "got [1000"]),
    ("badrewards:keys", ["8 numbers", "got {0.0: 0.0, "]),
    ("badrewards:letters", ["8 numbers", "got '11111111'"]),
    ("badrewards:several", ["8 numbers", "got {0.0, 1.0"]),
    ("badrewards:words", ["8 numbers", "got ['good', "]),
    ("badrewards:escape", ["ValueError: \\x1b[31m\\n ("]),
]
CASES = [
    *[(kind, flags, None, says) for kind, flags, says in FLAG_CASES],
    *DATA_CASES,
    *FILE_CASES,
    *[("ppo", f"--overwrite --reward {reward}", None, says) for reward, says in REWARD_CASES],
]


def contents(folder):
    return {path: path.read_bytes() for path in folder.glob("*.*") if path.is_file()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[1]} {case[3][0]}")
def test_a_mistake_is_one_clear_line_and_loses_nothing(folder, case):
    kind, flags, spoil, says = case
    if spoil:
        spoil(folder)
    before, script = contents(folder), f"train_{kind}.py"
    given = ["--data", folder / "data", "--out", folder, *FLAGS[kind]]
    status, _, error = run(script, *given, *flags.format(folder=folder).split())
    assert status == 2 and error.startswith(f"{script}: ") and error.count("\n") == 1, error
    assert "Traceback" not in error and not [part for part in says if part not in error], error
    after = contents(folder)
    assert all(after[path] == data for path, data in before.items())


def test_what_is_no_mistake(folder):
    """Another answer of the table would be one: options that change no gradient; missing files that
    others replace; odd text."""
    given = ["--data", folder / "data", "--out", folder]
    interrupted("sft")(folder)
    free = ["--resume", "--micro_batch", 2, "--save_every", 9, "--grad_checkpoint"]
    assert run("train_sft.py", *given, *FLAGS["sft"], *free)[0] == 0
    remove("data/sft_train.jsonl", "data/prompts_train.jsonl", "data/prompts_val.jsonl")(folder)
    given += ["--overwrite"]
    for kind in ("sft", "ppo"):
        assert run(f"train_{kind}.py", *given, *FLAGS[kind])[0] == 0
    odd = ["\x00\x1b[31m", "\u202eabc", "😀 é ñ 日本", "<|endoftext|>", " \t\n", "x" * 25, "\ud800"]
    for task, row in {"sft": GOOD, "pref": PAIR, "prompts": {"prompt": ""}}.items():
        lines = [{key: text + key for key in row} for text in odd] * 3
        for split in ("train", "val"):
            rows(task, *lines, split=split)(folder)
    for kind, flags in FLAGS.items():
        status, printed, error = run(f"train_{kind}.py", *given, *flags, "--out", folder / "odd")
        assert (status, error) == (0, "") and "\x1b" not in printed


def test_what_validation_and_lengths_do_not_tell_is_not_said_and_what_they_do_is(folder):
    """One row has no standard error; completions that PPO will not write are no mistake either."""
    given = ["--data", folder / "data", "--out", folder, "--overwrite"]
    for task, row in {"sft": GOOD, "pref": PAIR}.items():
        rows(task, row, split="val")(folder)
    rows("sft", *[GOOD | {"completion": "x y " * 40}] * 3)(folder)
    status, printed, _ = run("train_sft.py", *given, *FLAGS["sft"], "--context", 99)
    assert status == 0 and "validation loss" in printed and "±" not in printed
    assert "warning" in printed and "train_ppo.py --max_new_tokens " in printed
    status, printed, _ = run("train_rm.py", *given, *FLAGS["rm"])
    assert status == 0 and "% of the validation pairs right" in printed and "±" not in printed


def test_a_reward_is_looked_for_in_the_current_folder_last(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [x for x in sys.path if Path(x).is_absolute()])
    monkeypatch.chdir(tmp_path)
    for name in ("colorsys", "mytaste"):  # the first is in the standard library
        (tmp_path / f"{name}.py").write_text("def rgb_to_hls(): return 7")
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert load_function("mytaste:rgb_to_hls")() == 7
    assert load_function("colorsys:rgb_to_hls")(0, 0, 0) == (0.0, 0, 0.0)
    monkeypatch.delitem(sys.modules, "mytaste")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no such device here")
@pytest.mark.parametrize("kind", FLAGS)
def test_a_full_disk_is_one_clear_line_and_the_model_that_was_there_stays(
    folder, kind, monkeypatch
):
    kept = [folder / f"{kind}.{end}" for end in ("pt", "jsonl")]
    real, before = open, [path.read_bytes() for path in kept]

    def full(name, *args, **more):
        return real("/dev/full" if str(name).endswith(".tmp") else name, *args, **more)

    monkeypatch.setattr("builtins.open", full)
    given = ["--data", folder / "data", "--out", folder, "--overwrite", *FLAGS[kind]]
    status, _, error = run(f"train_{kind}.py", *given)
    assert status == 2 and error.count("\n") == 1
    assert "cannot be written" in error and "is still there" in error
    assert [path.read_bytes() for path in kept] == before


# Flags: dataclasses whose comments are the help and the ranges


@dataclasses.dataclass
class Example:
    size: int = 4  # how large, 100 % sure [1, 8]
    share: float = 0.5  # of all [0, inf]
    name: str = ""  # of a folder
    loud: bool = False  # say all
    calm: bool = True  # say little


def read(*args, **more):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["x", *args])
        return read_flags("Text.", Example(), FitConfig(), **more), sys.argv[1:]


def test_flags_are_the_fields_of_dataclasses():
    (example, fit), _ = read("--size", "8", "--share", "inf", "--loud", "--no_calm", "--lr", "0.5")
    assert example == Example(8, float("inf"), "", True, False) and fit == FitConfig(lr=0.5)
    (example, _), _ = read("--name", "a b")
    assert example == Example(name="a b")
    assert read(without=["lr"])[0] == [Example(), FitConfig()]
    found, left = read("more", "--size", "2", "--other", partly=True)
    assert found[0].size == 2 and left == ["more", "--other"]
    (_, _, texts), _ = read("a", "--size", "2", "b c", positional="TEXT")
    assert texts == ["a", "b c"]
    for wrong in (["--size", "0"], ["--size", "9"], ["--share", "-0.1"], ["--calm"], ["--no_loud"]):
        with pytest.raises(UserError, match=r"\(-h explains the flags\)"):
            read(*wrong)


@pytest.mark.parametrize("flag", ["vocab_size", "context", "layers", "heads", "channels"])
def test_a_model_that_is_read_brings_its_shape(flag, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x", "--init", "gpt2", f"--{flag}", "300"])
    with pytest.raises(UserError, match=f"--{flag} has no effect with --init"):
        read_flags("Text.", GPTConfig(), train_sft.InitConfig())


SCRIPTS = {
    "train_sft.py": (RunConfig, GPTConfig, FitConfig, train_sft.InitConfig),
    "train_rm.py": (RunConfig, FitConfig, train_rm.AnswerConfig),
    "train_ppo.py": (RunConfig, PPOConfig, train_ppo.StageConfig),
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_field_has_a_help_text_and_every_number_a_range_that_holds_its_default(script):
    status, printed, _ = run(script, "-h")
    words = " ".join(printed.split())
    assert status == 0
    for owner in SCRIPTS[script]:
        found = explanations(owner)
        assert found.keys() == {field.name for field in dataclasses.fields(owner)}
        for field in dataclasses.fields(owner):
            text, low, high = found[field.name]
            assert (low is not None) == (field.type in (int, float)), f"{field.name}: a range?"
            assert low is None or low <= field.default <= high
            if (script, field.name) == ("train_sft.py", "separate_critic"):
                continue  # a matter of the third stage
            flag = f"--{'no_' * (field.default is True)}{field.name} "
            default = getattr(owner(), field.name) if owner is not FitConfig else ""
            assert flag in words and f"{' '.join(text.split())} ({default}" in words
    assert f"{float('inf')}, " not in words


def test_the_machine_is_chosen_and_missing_gpus_are_named(monkeypatch):
    for there in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert (
            RunConfig().device == ("cuda" if there else "cpu")
            and RunConfig(device="cpu").device == "cpu"
        )
    with pytest.raises(UserError, match="--device cuda: this PyTorch sees no CUDA GPU; use --dev"):
        RunConfig(device="cuda")


# Errors


def test_a_script_ends_with_status_2_and_its_own_name(tmp_path):
    done = shell("train_ppo.py", "--learning_rate", "0.1")
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch(r"train_ppo\.py: .*--learning_rate.*-h.*\n", done.stderr)


@pytest.mark.parametrize(
    "error, status, says",
    [
        (UserError("do this é\x1b[31m\n\u202e"), 2, "x.py: do this é\\x1b[31m\\n\\u202e\n"),
        (
            FloatingPointError("nan\nmore"),
            2,
            "x.py: nan; begin again with --overwrite and a smaller --lr\n",
        ),
        (FileNotFoundError(2, "No such file", "a.txt"), 2, "x.py: a.txt: No such file\n"),
        (BrokenPipeError(32, "Broken pipe"), 2, "x.py: output: Broken pipe\n"),
        (RuntimeError("CUDA out of memory. Tried\nall"), 2, "x.py: not enough memory (CUDA out of"),
        (RuntimeError("[x] can't allocate memory: you tried"), 2, "--micro_batch 1"),
        (MemoryError(), 2, "x.py: not enough memory ()"),
        (KeyboardInterrupt("step 3 is saved"), 130, "x.py: stopped; step 3 is saved\n"),
        (KeyboardInterrupt(), 130, "x.py: stopped; files written before are whole\n"),
    ],
)
def test_an_error_is_explained_in_one_line(monkeypatch, capsys, error, status, says):
    def main():
        raise error

    monkeypatch.setattr(sys, "argv", ["folder/x.py"])
    monkeypatch.setattr(sys, "stdin", None)  # closed
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    with pytest.raises(SystemExit) as stop:
        run_script(main)
    said = capsys.readouterr().err
    assert stop.value.code == status and says in said and said.count("\n") == 1
    print("é")  # what cannot be shown becomes a question mark


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    monkeypatch.setattr(sys, "stdout", None)
    for error in (ZeroDivisionError(), ValueError("a"), RuntimeError("b"), KeyError("c")):
        with pytest.raises(type(error)):
            run_script(lambda error=error: (_ for _ in ()).throw(error))
    assert run_script(lambda: 7) == 7 and explain(TypeError("x")) == ""
