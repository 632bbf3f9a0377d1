"""What sample.py --trace shows of a response. Run: python -m pytest tests/test_token_table.py"""

import re

import pytest
import torch

from cli import run
from minippo import GPT, GPTConfig, RewardModel, evaluate_actions, gae, generate, whiten
from plumbing import token_table
from plumbing.checkpoints import save_checkpoint
from plumbing.token_table import (
    TraceConfig,
    column_text,
    load_traced,
    print_others,
    print_table,
    trace_of,
)
from plumbing.tokenizer import Tokenizer
from tiny import assert_equal, stir

BYTES, PROMPT = Tokenizer.train([], 257), "What?"  # a token is a byte


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


@pytest.mark.parametrize("reward", ["", "made_up:score"])
@torch.no_grad()
def test_every_number_of_a_table_is_what_its_definition_gives(
    folder, tmp_path, monkeypatch, capsys, reward
):
    code = "def score(prompts, texts):\n    return [len(x) for x in prompts]\n"
    (tmp_path / "made_up.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    models = load_traced(folder / "ppo.pt", TraceConfig(trace=True, reward=reward))
    sampled = generate(models.policy, [[*PROMPT.encode()]] * 8, 19)
    batch = trace_of(sampled, models, 0.7, 0.75)
    for row, (ids, mask) in enumerate(zip(*sampled[:2])):
        ids, ended = ids[None, : len(PROMPT) + mask.sum()], ids[1:][mask][-1] == 256
        mask = mask[None, : ids.shape[1] - 1]
        ref_logprobs, _, _ = evaluate_actions(models.reference, ids, mask, 0.7)
        old, values = (x[row : row + 1, : mask.shape[1]] for x in sampled[2:])
        score = 5.0 if reward else models.reward_model(ids, torch.tensor([ids.shape[1]])).item()
        score -= not ended
        rewards = -0.75 * (old - ref_logprobs)
        rewards[0, -1] += score
        advantages, returns = gae(rewards, values, mask, 1.0, 1.0)
        wanted = {"old_logprobs": old, "ref_logprobs": ref_logprobs, "old_values": values}
        wanted |= {"rewards": rewards, "advantages": advantages, "returns": returns}
        for name, x in (wanted | {"whitened": whiten(advantages, mask)}).items():
            assert_equal(batch[name][row][batch["mask"][row]], x[mask], 1e-4)
        print_table(batch, row, BYTES, 0.75)
        head, titles, *lines = capsys.readouterr().out.splitlines()
        cut = "" if ended else " (it was cut off, which costs 1)"
        kl = (old - ref_logprobs)[mask].sum()
        assert head == f"    score {score:.2f}{cut}  KL {kl:.2f}  beta 0.75"
        assert titles.split()[:3] == ["action", "log", "pi"] and len(lines) == mask.sum()
        for line, i in zip(lines, ids[:, 1:][mask].tolist()):
            assert line[:14].strip() == column_text(BYTES.spell(i)) and len(line) == 94
    assert 0 < batch["ended"].sum() < 8


@torch.no_grad()
def test_the_others_are_the_likeliest_tokens_that_were_not_chosen(folder, capsys):
    models, temperature = load_traced(folder / "ppo.pt", TraceConfig(trace=True)), 0.7
    batch = trace_of(generate(models.policy, [[*b"Why?"], [*b"A bee?"]], 6), models, 1.0, 0.1)
    for row, (ids, mask) in enumerate(zip(batch["tokens"], batch["mask"])):
        print_others(batch, row, models, temperature)
        head, *lines = capsys.readouterr().out.splitlines()
        places = mask.nonzero().flatten().tolist()
        assert "policy" in head and "reference" in head and len(lines) == len(places)
        columns = head.index("likeliest"), head.rindex("likeliest")
        for line, t in zip(lines, places):
            assert line[: columns[0]].strip() == column_text(BYTES.spell(ids[t + 1].item()))
            for model, start in zip((models.policy, models.reference), columns):
                logits, _ = model(ids[None, : t + 1])
                shares = (logits[0, -1] / temperature).softmax(-1)
                best = [i for i in shares.argsort(descending=True).tolist() if i != ids[t + 1]][:3]
                said = "  ".join(f"{column_text(BYTES.spell(i))} {shares[i]:.2f}" for i in best)
                assert line[start:].startswith(said) and line[start + len(said) :][:1] in ("", " ")


def test_a_trace_changes_no_response_and_what_is_missing_is_named(folder, tmp_path, monkeypatch):
    path = tmp_path / "ppo.pt"
    path.write_bytes((folder / "sft.pt").read_bytes())
    flags = [path, PROMPT, "--n", 2, "--seed", 3]
    traced = run("sample.py", *flags, "--trace", "--models", folder)[1]
    lines = [line for line in traced.splitlines() if not line.startswith("    ")]
    assert lines == run("sample.py", *flags)[1].splitlines()
    assert traced.count("likeliest others, policy") == 2
    assert traced.count("KL 0.00  beta 0.1\n") == 2 and "-0.00" not in traced
    shown = []
    with monkeypatch.context() as patch:
        patch.setattr(token_table, "print_others", lambda *args: shown.append(args[-1]))
        cold = run("sample.py", *flags, "--trace", "--models", folder, "--temperature", 0.5)[1]
    assert shown == [0.5] * 2 and cold.count("KL 0.00  beta 0.1\n") == 2  # so is log ref
    dear = run("sample.py", folder / "ppo.pt", PROMPT, "--trace", "--kl_coef", 2)[1]
    score, kl = map(float, re.search(r"score (\S+)  KL (\S+)  beta 2\n", dear).groups())
    lines = dear.split("whitened\n")[1].split("        action")[0].splitlines()
    rewards = [float(line[14:].split()[3]) for line in lines]
    assert sum(rewards) == pytest.approx(score - 2 * kl, abs=0.01 * (3 + len(lines))) and kl > 1
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
