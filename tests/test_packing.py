"""The specification of plumbing/packing.py. Run: python -m pytest tests/test_packing.py"""

import copy
import random

import pytest
import torch

from cli import FLAGS, ROOT, edited, metrics, run, stage, write_data
from minippo import Block, generate
from plumbing.packing import Packing, packed
from tiny import assert_equal, gradients, noise, tiny_gpt


def test_the_example_of_the_docstring():
    tokens = torch.tensor([[1, 2, 3, 4], [1, 2, 5, 6], [1, 7, 0, 0]])
    assert Packing(tokens, tokens == 2).shape == (3, 2)
    packing = Packing(tokens, tokens > 2)
    assert packing.index.tolist()[:10] == [0, 1, 2, 3, 0, 1, 4, 5, 0, 6]


def random_rows(seed):
    """Rows that begin alike or are equal, and what is read of them: one place, some, or all."""
    rng = random.Random(seed)
    B, T = rng.randint(1, 6), rng.randint(1, 9)
    rows = [[0] * T]
    while len(rows) < B:
        same = rng.randint(0, T)
        rows.append(rng.choice(rows)[:same] + rng.choices(range(3), k=T - same))
    read = torch.rand(B, T) < seed % 4 / 3
    read[rng.randrange(B), rng.randrange(T)] = True
    return torch.tensor(rows), read


@pytest.mark.parametrize("seed", range(60))
def test_each_beginning_is_computed_once_and_the_numbers_are_the_same(seed):
    torch.manual_seed(seed)
    tokens, read = random_rows(seed)
    checkpoint, wanted = seed % 3 == 0, None if read.all() else read
    plain = tiny_gpt(separate_critic=seed % 2 == 0).train()
    fast, computed = packed(copy.deepcopy(plain), grad_checkpoint=checkpoint), []
    for part in [fast.trunk.dropout, *(x for x in fast.modules() if isinstance(x, Block))]:
        part.register_forward_pre_hook(lambda _, x: computed.append(len(x[0])))
    hidden, expected = (torch.stack(model.hidden(tokens, wanted)) for model in (fast, plain))
    weigh = noise(*expected.shape)
    for x in (hidden, expected):
        (x * weigh).sum().backward()
    assert_equal(hidden, expected)
    assert_equal(gradients(fast), gradients(plain))
    rows, places = tokens.tolist(), read.nonzero().tolist()
    beginnings = {tuple(rows[b][:n]) for b, t in places for n in range(1, t + 2)}
    times = 1 + (2 if seed % 2 else 4) * (1 + checkpoint)  # backward() computes blocks once more
    assert computed == [len(beginnings)] * times and fast.trunk.training


def test_samples_are_those_of_the_plain_model():
    policy, prompts, found = tiny_gpt(), [[1, 2], [1, 2, 3], [4], [1, 2]] * 3, []
    for wrap in (lambda x: x, packed):
        torch.manual_seed(0)
        found.append(generate(wrap(policy), prompts, 9, 0.8))
    assert_equal(*found)


def test_blocks_that_are_computed_twice_drop_the_same():
    plain, found = tiny_gpt(dropout=0.5).train(), []
    for twice in (False, True):
        torch.manual_seed(1)
        model = packed(copy.deepcopy(plain), grad_checkpoint=twice)
        model.hidden(torch.ones(2, 9).long())[0].square().sum().backward()
        found.append(gradients(model))
    assert_equal(*found)


def test_bfloat16_is_near_and_only_inside_the_blocks():
    plain, kinds = tiny_gpt().float(), set()
    half = packed(copy.deepcopy(plain), "bfloat16")
    half.trunk.blocks[0].mlp[0].register_forward_hook(lambda *x: kinds.add(x[2].dtype))
    tokens, _, logprobs, _ = generate(half, [[1], [2, 3]], 9)
    a, b = plain.hidden(tokens)[0], half.hidden(tokens)[0]
    assert 1e-4 < (a - b).abs().max() < 0.1 and kinds == {torch.bfloat16}
    assert {x.dtype for x in (b, logprobs, *half.parameters())} == {torch.float32}


def test_a_block_that_needs_the_grid_is_left_plain(monkeypatch, capsys):
    monkeypatch.setattr(Block, "forward", lambda self, x, cache=None: x.view(3, -1, 8))
    packed(tiny_gpt()).hidden(torch.ones(3, 4).long())
    assert "no longer follows" in capsys.readouterr().out


def numbers(folder, root):
    """What the three scripts and sample.py compute in a step, and what they print."""
    data, out, found, said = write_data(folder / "data"), folder / "out", {}, ""
    for kind in FLAGS:
        status, printed, error = stage(kind, data, out, "--steps", 1, root=root)
        assert (status, error) == (0, "")
        found[kind], said = metrics(out / f"{kind}.jsonl"), said + printed
    found["sample"] = run("sample.py", out / "ppo.pt", "Where?", "--trace", "--n", 3, root=root)
    return found, said


EDITS = {  # of minippo.py, and the stages whose metrics they leave as they were
    "residual": ("x = x + self.dropout(self.att", "x = 1.5 * x + self.dropout(self.att", []),
    "ReLU": ('nn.GELU("tanh")', "nn.ReLU()", []),
    "scale": ("dropout_p=dropout)", "dropout_p=dropout, scale=0.01)", []),
    "draw": ("searchsorted(ends, u, right=True)", "argmax(logits, 1, True)", ["sft", "rm"]),
    "embedding": ("self.dropout(self.token_emb", "self.dropout(1.1 * self.token_emb", []),
}


def test_what_is_edited_in_minippo_is_computed_by_all_scripts(tmp_path):
    before, _ = numbers(tmp_path / "before", ROOT)
    for name, (old, new, unmoved) in EDITS.items():
        root = tmp_path / name
        root.mkdir()
        with edited(root, ("minippo.py", old, new)):
            after, said = numbers(root / "run", root)
            import tiny
            from plumbing.packing import packed

            plain, rows = tiny.tiny_gpt(), random_rows(1)
            expected = plain.hidden(*rows)
            assert_equal(packed(plain).hidden(*rows), expected)
        assert ("no longer follows" in said) == (name == "embedding"), name
        assert [kind for kind in before if before[kind] == after[kind]] == unmoved, name
