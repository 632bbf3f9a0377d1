"""The specification of plumbing/checkpoints.py. Run: python -m pytest tests/test_checkpoints.py"""

import os
import pickle

import pytest
import torch

from minippo import GPT, GPTConfig, RewardModel
from plumbing import checkpoints
from plumbing.checkpoints import load_checkpoint, save_checkpoint
from plumbing.settings import UserError
from plumbing.text import Tokenizer
from plumbing.training import add_critic
from tiny import stir, tiny_gpt

TEXTS = ["low low low lower", "The cat sat.\n\nThe dog sat, too!"]


@pytest.mark.parametrize("kind", ["sft", "ppo", "critic", "rm"])
def test_a_checkpoint_brings_back_the_same_outputs_the_tokenizer_and_the_facts(tmp_path, kind):
    tokenizer = Tokenizer.train(TEXTS, 280)
    model = stir(GPT(GPTConfig(tokenizer.vocab_size, 16, 1, heads=2, channels=8, dropout=0.5)))
    tokens, lengths = torch.tensor([[1, 2, 3]]), torch.tensor([3])
    if kind == "rm":
        model = stir(RewardModel(model))
        model.mean.fill_(0.5), model.std.fill_(3.0)
    elif kind == "critic":
        kind = "ppo"
        add_critic(model, stir(RewardModel(model)))
    save_checkpoint(tmp_path / "folder" / "x.pt", kind, model.train(), tokenizer, val_loss=1.25)
    loaded, same_tokenizer, facts = load_checkpoint(tmp_path / "folder" / "x.pt", (kind,))
    assert same_tokenizer.tokens == tokenizer.tokens and facts == {"val_loss": 1.25} and not loaded.training
    arguments = (tokens, lengths) if kind == "rm" else (tokens,)
    for a, b in zip(loaded(*arguments), model.eval()(*arguments), strict=True):
        assert torch.equal(a, b)
    if kind != "rm":
        assert loaded.lm_head.weight is loaded.trunk.token_embedding.weight
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["x.pt"]  # no temporary file is left


@pytest.fixture
def checkpoint(tmp_path):
    tokenizer = Tokenizer.train([], 257)
    save_checkpoint(tmp_path / "sft.pt", "sft", GPT(GPTConfig(257, 8, 1, heads=1, channels=8)), tokenizer)
    return tmp_path / "sft.pt"


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.9, 0.999])
def test_a_truncated_checkpoint_is_refused(checkpoint, share):
    whole = checkpoint.read_bytes()
    checkpoint.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(UserError, match="damaged"):
        load_checkpoint(checkpoint, ("sft",))


@pytest.mark.parametrize("contents", [
    [1, 2], {"model": {}}, {"kind": "sft"}, {"kind": "sft", "config": {}, "vocabulary": [], "model": {}, "facts": {}},
])  # fmt: skip
def test_a_checkpoint_without_the_right_contents_is_refused(tmp_path, contents):
    torch.save(contents, tmp_path / "x.pt")
    with pytest.raises(UserError, match="x.pt"):
        load_checkpoint(tmp_path / "x.pt", ("sft",))


class Attack:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("write", [torch.save, lambda x, path: path.write_bytes(pickle.dumps(x, 2))], ids=["torch", "pickle"])
def test_a_checkpoint_that_would_run_code_is_refused_and_does_not(tmp_path, write):
    write({"kind": "sft", "config": Attack(tmp_path / "ran")}, tmp_path / "x.pt")
    with pytest.raises(UserError, match="damaged, or no checkpoint"):
        load_checkpoint(tmp_path / "x.pt", ("sft",))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind, script", [("sft", "train_sft.py"), ("rm", "train_rm.py"), ("ppo", "train_ppo.py")])
def test_a_missing_checkpoint_and_one_of_the_wrong_kind_name_the_script_that_makes_it(tmp_path, checkpoint, kind, script):
    with pytest.raises(UserError, match=script) as error:
        load_checkpoint(tmp_path / "none.pt", (kind,))
    assert "none.pt" in str(error.value)
    if kind != "sft":
        with pytest.raises(UserError, match=script) as error:
            load_checkpoint(checkpoint, (kind,))
        assert "'sft'" in str(error.value) and kind in str(error.value)


def test_a_checkpoint_that_cannot_be_written_leaves_the_old_one_as_it_was(checkpoint, monkeypatch):
    old = checkpoint.read_bytes()

    def full_disk(contents, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(UserError, match="No space left"):
        save_checkpoint(checkpoint, "sft", tiny_gpt(), Tokenizer.train([], 257))
    assert checkpoint.read_bytes() == old and list(checkpoint.parent.iterdir()) == [checkpoint]


def test_an_error_while_writing_is_named_by_what_the_system_said_or_else_by_its_own_words():
    try:
        try:
            raise OSError(28, "No space left on device")
        except OSError:
            raise RuntimeError("[enforce fail at inline_container.cc:664] unexpected pos")
    except RuntimeError as error:
        assert checkpoints.reason(error) == "No space left on device"
    assert checkpoints.reason(RuntimeError("cannot pickle this\nat all")) == "cannot pickle this"
    assert checkpoints.reason(PermissionError(13, "Permission denied")) == "Permission denied"


def test_two_processes_never_write_to_the_same_temporary_file(tmp_path, monkeypatch):
    names, replace = [], os.replace

    def watched(beside, path):
        names.append(str(beside))
        replace(beside, path)

    monkeypatch.setattr(os, "replace", watched)
    for process in (1, 2):
        monkeypatch.setattr(os, "getpid", lambda process=process: process)
        checkpoints.write_file(tmp_path / "a.pt", {"kind": "x"})
    assert len(set(names)) == 2 and [path.name for path in tmp_path.iterdir()] == ["a.pt"]
