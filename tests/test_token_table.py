"""What sample.py --trace shows of a response. Run: python -m pytest tests/test_token_table.py"""

import pytest
import torch

from cli import run
from minippo import GPT, GPTConfig, RewardModel, evaluate_actions, gae, whiten
from plumbing.checkpoints import load_checkpoint, save_checkpoint
from plumbing.token_table import column_text
from plumbing.tokenizer import Tokenizer
from tiny import stir

BYTES, PROMPT = Tokenizer.train([], 257), "What?"  # a token is a byte
IDS = {column_text(BYTES.spell(i)): i for i in range(257)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """sft.pt, rm.pt and ppo.pt with random weights. The policy's responses often end."""
    torch.manual_seed(1)
    out = tmp_path_factory.mktemp("run")
    policy = stir(GPT(GPTConfig(257, 24, layers=1, heads=2, channels=16)), 0.05)
    save_checkpoint(out / "sft.pt", "sft", policy, BYTES)
    save_checkpoint(out / "rm.pt", "rm", stir(RewardModel(policy)), BYTES)
    with torch.no_grad():
        policy.trunk.norm.bias[0], policy.lm_head.weight[256, 0] = 5.0, 0.7
    save_checkpoint(out / "ppo.pt", "ppo", stir(policy, 0.1), BYTES)
    return out


def ask(*args):
    """-> for each response the line above its table, the ids, and the rows of numbers."""
    status, printed, error = run("sample.py", *args, "--trace")
    assert (status, error) == (0, "") and "-0.00" not in printed
    tables, rows = [], None
    for line in printed.splitlines():
        cells = [line[4 + 10 * i :][:10].strip() for i in range(9)]
        if line.startswith("    score "):
            tables.append((line[10:], ids := [], rows := []))
        elif cells[1:4] == ["log pi", "log ref", "KL"]:
            assert cells[4:] == ["reward", "value", "advantage", "return", "whitened"]
        elif rows is not None and line.startswith("    "):
            ids.append(IDS[cells[0]])
            rows.append([*map(float, cells[1:])])
    return tables


@torch.no_grad()
def expected(folder, ids, score, temperature, beta):
    """The same from minippo's functions and the definition of the reward."""
    policy, ref, rm = (
        load_checkpoint(folder / f"{name}.pt", (name,))[0] for name in ("ppo", "sft", "rm")
    )
    tokens = torch.tensor([[*PROMPT.encode(), *ids]])
    mask = torch.arange(1, tokens.shape[1])[None] >= len(PROMPT)
    old, values, _ = evaluate_actions(policy, tokens, mask, temperature)
    ref_logprobs, _, _ = evaluate_actions(ref, tokens, mask, temperature)
    score = score or rm(tokens, torch.tensor([tokens.shape[1]])).item()
    score -= ids[-1] != 256
    kl = old - ref_logprobs
    rewards = -beta * kl
    rewards[0, -1] += score
    advantages, returns = gae(rewards, values, mask, 1.0, 1.0)
    whitened = whiten(advantages, mask)
    columns = (old, ref_logprobs, kl, rewards, values, advantages, returns, whitened)
    cut = "" if ids[-1] == 256 else " (it was cut off, which costs 1)"
    head = f"{score:.2f}{cut}  KL {kl[mask].sum():.2f}  beta {beta:g}"
    return head, torch.stack([x[mask] for x in columns], 1).tolist()


CASES = [
    (["--n", 8], None, 1.0, 0.1),
    (["--kl_coef", 0.75, "--temperature", 0.7, "--top_k", 90], None, 0.7, 0.75),
    (["--reward", "made_up:score", "--max_new_tokens", 3], 5.0, 1.0, 0.1),
]


@pytest.mark.parametrize("flags, score, temperature, beta", CASES)
def test_every_number_of_a_table_is_what_its_definition_gives(
    folder, tmp_path, monkeypatch, flags, score, temperature, beta
):
    code = "def score(prompts, texts):\n    return [len(x) for x in prompts]\n"
    (tmp_path / "made_up.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    lengths = set()
    for head, ids, rows in ask(folder / "ppo.pt", PROMPT, *flags):
        wanted, numbers = expected(folder, ids, score, temperature, beta)
        assert head == wanted and len(rows) == len(numbers)
        for row, line in zip(rows, numbers):
            assert row == pytest.approx(line, abs=0.0051)
        lengths.add((len(ids), ids[-1] == 256))
    assert len(lengths) > 3 or "--n" not in flags  # long and short ones, cut off and not
    ((head, _, rows),) = ask(folder / "sft.pt", PROMPT)
    assert "  KL 0.00  beta 0.1" in head and {row[2] for row in rows} == {0}


def test_a_trace_changes_no_response_and_what_is_missing_is_named(folder, tmp_path):
    path = tmp_path / "ppo.pt"
    path.write_bytes((folder / "ppo.pt").read_bytes())
    flags = [path, PROMPT, "--n", 2, "--seed", 3]
    plainly, traced = (
        run("sample.py", *flags, *more)[1] for more in ([], ["--trace", "--models", folder])
    )
    assert traced.startswith(plainly.split("\n")[0]) and traced.count("    score ") == 2
    lines = [line for line in traced.splitlines() if not line.startswith("    ")]
    assert lines == plainly.splitlines()
    for given, flags, says in (
        (path, ["--trace"], f"{tmp_path / 'sft.pt'}: not found"),
        (folder, ["--trace"], "a folder; give the ppo.pt or sft.pt of a run"),
        (path, ["--kl_coef", 1], "no effect without --trace"),
        (path, ["--models", folder], "no effect without --trace"),
        (path, ["--reward", "my:score"], "no effect without --trace"),
    ):
        status, printed, error = run("sample.py", given, PROMPT, *flags)
        assert status == 2 and printed == "" and error.count("\n") == 1 and says in error


def test_a_token_is_spelled_so_that_its_column_holds_it():
    texts = (" eats", "a b", "  ", " \n", "\x1b[1m", "", "123456789", " 12345678", " 123456789")
    columns = ["·eats", "a b", "· ", "·\\n", "\\x1b[1m", "", "123456789", "·12345678", "·1234567…"]
    assert [*map(column_text, texts)] == columns
