"""The specification of plumbing/checkpoints.py. Run: python -m pytest tests/test_checkpoints.py"""

import pickle

import pytest
import torch

from minippo import GPT, GPTConfig, RewardModel
from plumbing.checkpoints import load_checkpoint, read_contents, save_checkpoint, write_contents
from plumbing.errors import UserError
from plumbing.tokenizer import Tokenizer
from plumbing.training import add_critic
from tiny import stir

TOKENIZER = Tokenizer.train(["low low low lower", "The cat sat.\n\nThe dog sat, too!"], 280)


@pytest.mark.parametrize("kind", ["sft", "ppo", "critic", "rm"])
def test_a_checkpoint_brings_back_the_same_outputs_the_tokenizer_and_the_facts(tmp_path, kind):
    model = stir(GPT(GPTConfig(TOKENIZER.vocab_size, 16, 1, heads=2, channels=8, dropout=0.5)))
    tokens, lengths = torch.tensor([[1, 2, 3]]), torch.tensor([3])
    if kind == "rm":
        model = stir(RewardModel(model))
        model.mean.fill_(0.5), model.std.fill_(3.0)
    elif kind == "critic":
        kind = "ppo"
        add_critic(model, stir(RewardModel(model)))
    path = tmp_path / "folder" / "x.pt"
    save_checkpoint(str(path), kind, model.train(), TOKENIZER, val_loss=1.25)
    loaded, tokenizer, facts = load_checkpoint(str(path), ("other", kind))
    assert (
        tokenizer.tokens == TOKENIZER.tokens and facts == {"val_loss": 1.25} and not loaded.training
    )
    arguments = (tokens, lengths) if kind == "rm" else (tokens,)
    for a, b in zip(loaded(*arguments), model.eval()(*arguments), strict=True):
        assert torch.equal(a, b)
    if kind != "rm":
        assert loaded.lm_head.weight is loaded.trunk.token_embedding.weight
    assert [path.name for path in path.parent.iterdir()] == ["x.pt"]  # no temporary file is left
    assert next(load_checkpoint(path, (kind,), "meta")[0].parameters()).device.type == "meta"


def test_what_is_read_stays_on_the_disk_unless_it_must_not(tmp_path, monkeypatch):
    asked, load = [], torch.load
    monkeypatch.setattr(
        torch, "load", lambda *args, **more: asked.append(more["mmap"]) or load(*args, **more)
    )
    write_contents(tmp_path / "x.pt", {"kind": "state", "x": torch.ones(2)})
    for mmap in ({}, {"mmap": False}):
        assert read_contents(tmp_path / "x.pt", ["state"], **mmap)["x"].tolist() == [1, 1]
    assert asked == [True, False]


class Attack:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize(
    "write",
    [torch.save, lambda x, path: path.write_bytes(pickle.dumps(x, 2))],
    ids=["torch", "pickle"],
)
def test_a_checkpoint_that_would_run_code_is_refused_and_does_not(tmp_path, write):
    write({"kind": "sft", "config": Attack(tmp_path / "ran")}, tmp_path / "x.pt")
    with pytest.raises(
        UserError, match="x.pt: damaged, or no checkpoint .*; train_sft.py makes it"
    ):
        load_checkpoint(tmp_path / "x.pt", ("sft",))
    assert not (tmp_path / "ran").exists()


def test_a_truncated_checkpoint_and_one_with_other_contents_are_refused(tmp_path):
    path = tmp_path / "x.pt"
    save_checkpoint(
        path, "sft", GPT(GPTConfig(TOKENIZER.vocab_size, 8, 1, heads=1, channels=8)), TOKENIZER
    )
    whole, good = path.read_bytes(), torch.load(path)
    for share in (0.0, 0.01, 0.5, 0.9, 0.999):
        path.write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(UserError, match="x.pt: damaged, or no checkpoint"):
            load_checkpoint(path, ("sft",))
    changes = [
        {"config": {}},
        {"config": {"x": 1}},
        {"config": None},
        {"model": {}},
        {"vocabulary": [1]},
        {"vocabulary": ["日"]},
    ]
    for contents in [
        [1, 2],
        {"model": {}},
        {"kind": "sft"},
        *(good | change for change in changes),
    ]:
        torch.save(contents, path)
        with pytest.raises(UserError, match="x.pt: damaged"):
            load_checkpoint(path, ("sft",))


@pytest.mark.parametrize(
    "kinds, hint",
    [
        (("rm",), "train_rm.py makes it"),
        (("ppo", "sft"), "train_ppo.py makes it"),
        (("state",), "--overwrite begins again"),
    ],
)
def test_a_missing_file_and_one_of_another_kind_are_refused_with_what_to_do(tmp_path, kinds, hint):
    write_contents(tmp_path / "x.pt", {"kind": "best"})
    for name, found in (
        ("none.pt", "not found"),
        ("x.pt", f"holds 'best', not {' or '.join(map(repr, kinds))}"),
    ):
        with pytest.raises(UserError) as error:
            read_contents(tmp_path / name, kinds)
        assert str(error.value) == f"{tmp_path / name}: {found}; {hint}"
