"""Whatever a user can get wrong: one clear line, status 2, and nothing that was there before is lost.

Run: python -m pytest tests/test_malformed.py
"""

import gzip
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from cli import run
from data import zoo
from minippo import GPT, GPTConfig
from plumbing.checkpoints import save_checkpoint
from plumbing.text import Tokenizer

SMALL = "--layers 1 --heads 2 --channels 16 --context 32 --batch_size 16 --epochs 1".split()
PPO = "--steps 2 --batch_size 8 --minibatches 2 --max_new_tokens 8 --no_report".split()
FLAGS = {"sft": SMALL, "rm": ["--epochs", "1", "--batch_size", "16"], "ppo": PPO}
GOOD = {
    "sft": {"prompt": "a", "completion": "b"}, "pref": {"prompt": "a", "chosen": "b", "rejected": "c"}, "prompts": {"prompt": "a"},
}  # fmt: skip
REWARDS = """
import torch
def fails(prompts, responses): raise ZeroDivisionError("no words")
def late(prompts, responses): return {}["missing"]
def column(prompts, responses): return torch.zeros(len(prompts), 1, 1).tolist()
def square(prompts, responses): return torch.zeros(len(prompts), 2)
def few(prompts, responses): return [1.0]
def none(prompts, responses): pass
def nan(prompts, responses): return [0.0] * (len(prompts) - 1) + [float("nan")]
def infinite(prompts, responses): return [float("inf")] * len(prompts)
def words(prompts, responses): return ["good"] * len(prompts)
number = 7
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """-> a folder with data and all that the three scripts make of them."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zoo, "ROWS", dict.fromkeys(zoo.ROWS, 60))
        zoo.write_data(folder / "data", seed=0)
    for kind, flags in FLAGS.items():
        assert run(f"train_{kind}.py", "--data", folder / "data", "--out", folder, "--device", "cpu", *flags)[0] == 0
    return folder


@pytest.fixture
def folder(finished, tmp_path, monkeypatch):
    """-> a copy of that folder, to be spoilt, with a module of rewards."""
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "badrewards.py").write_text(REWARDS)
    (tmp_path / "wrongrewards.py").write_text("def score(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "run"
    for name in ("badrewards", "wrongrewards"):
        sys.modules.pop(name, None)


def rows(task, *lines):
    """Puts these lines (bytes, or objects that become JSON) into the train file of a task."""

    def spoil(folder):
        data = b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines)
        (folder / "data" / f"{task}_train.jsonl").write_bytes(data)

    return spoil


def put(name, data):
    return lambda folder: (folder / name).write_bytes(data)


def copy(source, name):
    return lambda folder: shutil.copy(folder / source, folder / name)


def cut(name):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-2000])


def remove(name):
    return lambda folder: (folder / name).unlink()


def block(name):
    def spoil(folder):
        (folder / name).unlink()
        (folder / name).mkdir()

    return spoil


def pickle(name):
    return lambda folder: torch.save({"kind": name.split(".")[0], "model": GPT(GPTConfig(300, 8, 1, 1, 8))}, folder / name)


def lacks(name, key):
    def spoil(folder):
        contents = torch.load(folder / name)
        del contents[key]
        torch.save(contents, folder / name)

    return spoil


def foreign(name, kind):
    def spoil(folder):
        save_checkpoint(folder / name, kind, GPT(GPTConfig(257, 32, 1, 2, 16)), Tokenizer.train([], 257))

    return spoil


def interrupted(kind):
    def spoil(folder):
        state = torch.load(folder / f"{kind}_state.pt")
        state["values"] |= {"step": 1, "done": False}
        torch.save(state, folder / f"{kind}_state.pt")

    return spoil


def nothing(folder):
    pass


CASES = [
    # Flags
    ("sft", "--learning_rate 1", nothing, ["--learning_rate", "-h"]),
    ("sft", "--epoch 1", nothing, ["--epoch"]),
    ("sft", "extra", nothing, ["extra"]),
    ("sft", "--lr", nothing, ["--lr"]),
    ("sft", "--lr fast", nothing, ["--lr", "fast"]),
    ("sft", "--lr -1", nothing, ["--lr", "between 0"]),
    ("sft", "--lr nan", nothing, ["--lr", "nan"]),
    ("sft", "--batch_size 0", nothing, ["--batch_size", "between 1"]),
    ("sft", "--context 4", nothing, ["--context", "between 8"]),
    ("sft", "--dropout 1", nothing, ["--dropout", "between 0 and 0.9"]),
    ("sft", "--heads 3", nothing, ["multiple of heads"]),
    ("sft", "--device tpu", nothing, ["tpu", "auto, cpu or cuda"]),
    ("sft", "--dtype float16", nothing, ["float16", "bfloat16"]),
    ("sft", "--resume --overwrite", nothing, ["--resume", "--overwrite", "one of them"]),
    ("sft", "--init {folder}/none", nothing, ["--context has no effect with --init"]),
    ("sft", "--max_steps 9", nothing, ["--max_steps has no effect with --epochs"]),
    ("ppo", "--report_prompts 9", nothing, ["--report_prompts has no effect with --no_report"]),
    ("rm", "--answers 1", nothing, ["--answers", "between 2"]),
    ("rm", "--layers 2", nothing, ["--layers"]),
    ("ppo", "--temperature 0", nothing, ["--temperature", "between 0.01"]),
    ("ppo", "--gamma 1.5", nothing, ["--gamma", "between 0 and 1"]),
    ("ppo", "--batch_size 1", nothing, ["minibatches", "batch_size"]),
    ("ppo", "--kl_target 3", nothing, ["--kl_target has no effect without --kl_horizon"]),
    ("ppo", "--critic_lr 0.1", nothing, ["--critic_lr has no effect without --separate_critic"]),
    ("ppo", "--kl_horizon 2", nothing, ["kl_horizon"]),
    ("ppo", "--reward badrewards:number --separate_critic", nothing, ["number is no function"]),
    ("ppo", "--reward badrewards:few --separate_critic", nothing, ["--separate_critic starts from the reward model"]),
    # Data
    ("sft", "", remove("data/sft_train.jsonl"), None),  # the chosen answers of the pairs serve: no error
    ("rm", "", remove("data/pref_train.jsonl"), ["pref_train.jsonl", "cannot be read"]),
    ("sft", "--data {folder}/none", nothing, ["none/sft_train.jsonl", "No such file"]),
    ("sft", "--data {folder}/data/sft_train.jsonl", nothing, ["should be a folder", "data/convert.py"]),
    ("sft", "", rows("sft"), ["no rows"]),
    ("sft", "", rows("sft", b"", b"  "), ["no rows"]),
    ("sft", "", rows("sft", b"prompt,completion"), ["line 1", "not JSON"]),
    ("sft", "", rows("sft", GOOD["sft"], b'{"prompt": "a"'), ["line 2", "not JSON"]),
    ("sft", "", rows("sft", [GOOD["sft"]]), ["line 1", "list", "data/convert.py"]),
    ("sft", "", rows("sft", b"[", GOOD["sft"], b"]"), ["a JSON array", "data/convert.py"]),
    ("sft", "", rows("sft", {"prompt": "a"}), ["line 1", "no key 'completion'", "'prompt'"]),
    ("sft", "", rows("sft", {"messages": [{"role": "user", "content": "a"}]}), ["no key 'prompt'", "data/convert.py"]),
    ("sft", "", rows("sft", {"prompt": "a", "completion": None}), ["'completion'", "null"]),
    ("sft", "", rows("sft", {"prompt": ["a"], "completion": "b"}), ["'prompt'", "string"]),
    ("sft", "", rows("sft", b'{"prompt": "\xff", "completion": "b"}'), ["line 1", "not UTF-8"]),
    ("sft", "", rows("sft", json.dumps(GOOD["sft"]).encode("utf-16")), ["UTF-8"]),
    ("sft", "", rows("sft", *[GOOD["sft"] | {"prompt": "why " * 99}] * 3), ["context of 32 tokens", "--context"]),
    ("rm", "", rows("pref", *[GOOD["pref"] | {"rejected": "b"}] * 3), ["no two answers differ"]),
    ("rm", "", rows("pref", {"chosen": "Human: a", "rejected": "Human: b"}), ["no key 'prompt'", "data/convert.py cuts"]),
    ("ppo", "", rows("prompts", {"prompt": ""}), ["--context"]),
    ("ppo", "", rows("prompts", {"question": "a"}), ["no key 'prompt'", "'question'"]),
    ("sft", "", block("data/sft_train.jsonl"), ["sft_train.jsonl", "directory"]),
    ("sft", "--data {folder}/zipped", lambda folder: [
        (folder / "zipped").mkdir(), (folder / "zipped" / "sft_train.jsonl.gz").write_bytes(gzip.compress(b"x" * 999)[:-20]),
    ], ["sft_train.jsonl.gz", "cannot be read"]),
    # Checkpoints and states
    ("rm", "", remove("sft.pt"), ["sft.pt", "not found", "train_sft.py"]),
    ("ppo", "", remove("rm.pt"), ["rm.pt", "not found", "train_rm.py"]),
    ("ppo", "--models {folder}/none", nothing, ["none/sft.pt", "not found"]),
    ("rm", "", cut("sft.pt"), ["sft.pt", "damaged"]),
    ("rm", "", put("sft.pt", b""), ["sft.pt", "damaged"]),
    ("rm", "", put("sft.pt", b"hello" * 999), ["sft.pt", "damaged"]),
    ("rm", "", block("sft.pt"), ["sft.pt", "not found"]),
    ("rm", "", pickle("sft.pt"), ["sft.pt", "damaged, or no checkpoint"]),
    ("rm", "", lacks("sft.pt", "vocabulary"), ["sft.pt", "another version"]),
    ("rm", "", lacks("sft.pt", "kind"), ["sft.pt", "damaged"]),
    ("rm", "", copy("rm.pt", "sft.pt"), ["'rm'", "train_sft.py"]),
    ("ppo", "", copy("sft.pt", "rm.pt"), ["'sft'", "train_rm.py"]),
    ("ppo", "", foreign("sft.pt", "sft"), ["rm.pt was not made from sft.pt"]),
    ("ppo", "--policy {folder}/other.pt", foreign("other.pt", "ppo"), ["other.pt: was not made from"]),
    ("ppo", "--reference {folder}/rm.pt", nothing, ["'rm'"]),
    ("sft", "", interrupted("sft"), ["interrupted at step 1", "--resume", "--overwrite"]),
    ("ppo", "", interrupted("ppo"), ["interrupted at step 1", "--resume", "--overwrite"]),
    ("ppo", "--resume --lr 0.5", interrupted("ppo"), ["lr = 0.0008", "--overwrite"]),
    ("ppo", "--resume", cut("ppo_state.pt"), ["ppo_state.pt", "damaged"]),
    ("ppo", "--resume", lacks("ppo_state.pt", "settings"), ["another version"]),
    ("ppo", "--resume", lacks("ppo_state.pt", "random"), ["another version", "--overwrite"]),
    ("ppo", "--resume", rows("prompts", {"prompt": "What?"}), ["data or vocabulary have changed"]),
    ("rm", "--resume", remove("rm.pt"), ["rm.pt is gone"]),
    # Reward functions
    ("ppo", "--reward badrewards", nothing, ["module:function"]),
    ("ppo", "--reward :", nothing, ["module:function"]),
    ("ppo", "--reward nowhere:score", nothing, ["nowhere"]),
    ("ppo", "--reward wrongrewards:score", nothing, ["wrongrewards", "SyntaxError", "line 1"]),
    ("ppo", "--reward badrewards:missing", nothing, ["missing"]),
    *[("ppo", f"--reward badrewards:{name}", nothing, says) for name, says in {
        "fails": ["ZeroDivisionError: no words", "badrewards.py, line 3"], "late": ["KeyError", "line 4"],
        "column": ["8 responses", "8 finite numbers"], "square": ["8 finite numbers", "[8, 2]"],
        "few": ["8 finite numbers", "got 1"],
        "none": ["None"],
        "nan": ["got nan for"], "infinite": ["got inf for"], "words": ["8 finite numbers", "good"],
    }.items()],
    # Environments
    ("sft", "--out {folder}/rm.pt", nothing, ["rm.pt"]),
    ("sft", "--out {folder}/rm.pt/below", nothing, ["rm.pt"]),
    ("ppo", "", block("ppo.jsonl"), ["ppo.jsonl"]),
    ("sample", "{folder}/none.pt question", nothing, ["none.pt", "not found"]),
    ("sample", "{folder}/rm.pt question", nothing, ["'rm'"]),
    ("sample", "{folder}/ppo.pt", nothing, None),  # the standard input is empty: no prompt, no error
    ("sample", "{folder}/ppo.pt why --top_k -1", nothing, ["--top_k"]),
    ("sample", "", nothing, ["CHECKPOINT"]),
]  # fmt: skip


def contents(folder):
    """What must not be lost: all models and reports of finished runs."""
    return {path.name: path.read_bytes() for path in folder.glob("*.*") if path.is_file()}


@pytest.mark.parametrize("kind, flags, spoil, says", CASES, ids=[f"{i}: {case[0]} {case[1]}" for i, case in enumerate(CASES)])
def test_a_mistake_is_one_clear_line_and_loses_nothing(folder, kind, flags, spoil, says):
    spoil(folder)
    before, flags = contents(folder), flags.format(folder=folder).split()
    if kind == "sample":
        script, flags = "sample.py", flags
    else:
        script = f"train_{kind}.py"
        flags = ["--data", folder / "data", "--out", folder, "--device", "cpu", *FLAGS[kind], *flags]
    status, _, error = run(script, *flags)
    if says is None:
        assert status == 0 and error == ""
        return
    assert status == 2 and error.startswith(f"{script}: ") and error.count("\n") == 1 and error.endswith("\n"), error
    assert "Traceback" not in error
    for part in says:
        assert part in error
    after = contents(folder)
    assert all(after[name] == data for name, data in before.items())


def test_there_are_sixty_of_them_and_more():
    assert sum(says is not None for *_, says in CASES) >= 60


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no such device here")
@pytest.mark.parametrize("kind", FLAGS)
def test_a_full_disk_is_one_clear_line_and_the_model_that_was_there_stays(folder, kind, monkeypatch):
    real = open

    def full(name, *args, **more):
        return real("/dev/full" if str(name).endswith(".tmp") else name, *args, **more)

    monkeypatch.setattr("builtins.open", full)
    flags = ["--data", folder / "data", "--out", folder, "--device", "cpu", *FLAGS[kind]]
    before = (folder / f"{kind}.pt").read_bytes()
    status, _, error = run(f"train_{kind}.py", *flags)
    assert status == 2 and error.count("\n") == 1 and "No space left on device" in error and "is still there" in error
    assert (folder / f"{kind}.pt").read_bytes() == before


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_named(folder):
    folder.chmod(0o500)
    status, _, error = run("train_rm.py", "--data", folder / "data", "--out", folder, *FLAGS["rm"])
    folder.chmod(0o700)
    assert status == 2 and error.count("\n") == 1 and str(folder) in error


def test_odd_text_is_no_mistake(folder):
    odd = ["\x00\x1b[31m", "\u202eabc", "😀 é ñ 日本", "<|endoftext|>", " \t\n", "x" * 25]
    for task, row in GOOD.items():
        lines = [json.dumps({key: text + key for key in row}) for text in odd] * 4
        for split in ("train", "val"):
            (folder / "data" / f"{task}_{split}.jsonl").write_text("\n".join(lines))
    out = folder / "odd"
    for kind, flags in FLAGS.items():
        flags = [flag if flag != "32" else "64" for flag in flags]
        status, _, error = run(f"train_{kind}.py", "--data", folder / "data", "--out", out, "--device", "cpu", *flags)
        assert (status, error) == (0, "")
    status, printed, error = run("sample.py", out / "ppo.pt", "😀\x1b[31m")
    assert status == 0 and error == "" and "\x1b" not in printed
