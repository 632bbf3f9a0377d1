"""What sample.py --trace shows of a response. Run: python -m pytest tests/test_tracing.py"""

import math

import pytest
import torch

from cli import run
from minippo import GPT, GPTConfig, RewardModel
from plumbing.checkpoints import load_checkpoint, save_checkpoint
from plumbing.settings import UserError
from plumbing.text import Tokenizer
from plumbing.tracing import TraceConfig, plain, spelled
from tiny import stir

TITLES = ["action", "log pi", "log ref", "KL", "reward", "value", "advantage", "return", "whitened"]
BYTES = Tokenizer.train([], 257)  # a token is a byte
PROMPT = "What?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """sft.pt, rm.pt and ppo.pt with random weights; those of the policy differ from the reference's a little."""
    torch.manual_seed(1)
    out, shape = tmp_path_factory.mktemp("run"), {"layers": 1, "heads": 2, "channels": 16}
    sft = stir(GPT(GPTConfig(257, 24, **shape)), 0.05)
    torch.nn.init.zeros_(sft.value_head.weight), torch.nn.init.zeros_(sft.value_head.bias)
    save_checkpoint(out / "sft.pt", "sft", sft, BYTES)
    rm = stir(RewardModel(sft))
    rm.mean.fill_(0.5), rm.std.fill_(2.0)
    save_checkpoint(out / "rm.pt", "rm", rm, BYTES)
    save_checkpoint(out / "ppo.pt", "ppo", stir(sft, 0.1), BYTES)
    return out


def table(lines):
    """The lines of one table -> the ids of its actions, and its numbers: one list a line."""
    ids = {spelled(i, BYTES): i for i in range(257)}
    assert len(ids) == 257 and {len(line) for line in lines} == {4 + 10 * len(TITLES)}
    assert [lines[0][4 + 10 * i :][:10].strip() for i in range(len(TITLES))] == TITLES
    rows = [[line[4 + 10 * i :][:10].strip() for i in range(len(TITLES))] for line in lines[1:]]
    return [ids[row[0]] for row in rows], [list(map(float, row[1:])) for row in rows]


def ask(path, *flags, prompt=PROMPT):
    """-> for each response what stands above its table, the ids, and the numbers."""
    status, printed, error = run("sample.py", path, prompt, "--trace", *flags)
    assert (status, error) == (0, "")
    first, *lines = printed.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("    score ")]
    assert first == prompt and starts[0] == 1
    return [(lines[i], *table(lines[i + 1 : end])) for i, end in zip(starts, [start - 1 for start in starts[1:]] + [len(lines)])]


def by_hand(folder, name, ids, beta, temperature=1.0, prompt=PROMPT):
    """The table of a response, from what the three networks say and the definitions -> score, KL, lines."""
    policy, ref, rm = (load_checkpoint(folder / f"{name}.pt", (name,))[0] for name in (name, "sft", "rm"))
    tokens = torch.tensor([[*prompt.encode(), *ids]])
    with torch.no_grad():
        (logits, values), (ref_logits, _) = policy(tokens), ref(tokens)
        score = rm(tokens, torch.tensor([tokens.shape[1]])).item() - (ids[-1] != 256)
    lines = []
    for i, action in enumerate(ids):
        t = len(prompt) - 1 + i
        logs = []
        for x in (logits, ref_logits):
            x = (x[0, t] / temperature).tolist()
            logs.append(x[action] - math.log(sum(map(math.exp, x))))
        kl = logs[0] - logs[1]
        lines.append([*logs, kl, -beta * kl + score * (i == len(ids) - 1), values[0, t].item()])
    advantages = []
    for i, line in enumerate(lines):
        returned = sum(reward for *_, reward, _ in lines[i:])
        advantages.append(returned - line[4])
        line += [advantages[-1], returned]
    mean = sum(advantages) / len(advantages)
    std = math.sqrt(sum((x - mean) ** 2 for x in advantages) / len(advantages))
    for line, x in zip(lines, advantages, strict=True):
        line.append((x - mean) / max(std, 1e-4))  # one token: 0
    return score, sum(line[2] for line in lines), lines


@pytest.mark.parametrize("flags, beta, temperature", [
    ([], 0.1, 1.0), (["--kl_coef", 0.75], 0.75, 1.0), (["--temperature", 0.7, "--n", 3], 0.1, 0.7), (["--top_k", 5], 0.1, 1.0),
])  # fmt: skip
def test_every_number_of_the_table_is_what_its_definition_gives(folder, flags, beta, temperature):
    responses = ask(folder / "ppo.pt", *flags)
    assert len(responses) == (3 if "--n" in flags else 1)
    for head, ids, numbers in responses:
        score, kl, expected = by_hand(folder, "ppo", ids, beta, temperature)
        cut = " (it was cut off, which costs 1)" if ids[-1] != 256 else ""
        assert head == f"    score {score:.2f}{cut}  KL {kl:.2f}  beta {beta:g}"
        assert 256 not in ids[:-1] and len(ids) <= 24 - len(PROMPT)
        for line, wanted in zip(numbers, expected, strict=True):
            assert line == pytest.approx(wanted, abs=0.0051)
        assert max(abs(line[2]) for line in numbers) > 0.05 and max(abs(line[4]) for line in numbers) > 0.05


def test_a_response_that_ends_by_itself_costs_nothing_and_has_the_end_token_as_its_last_action(folder, tmp_path):
    for name in ("sft", "rm", "ppo"):
        model, _, _ = load_checkpoint(folder / f"{name}.pt", (name,))
        if name == "ppo":
            with torch.no_grad():  # the end token becomes three times as likely as all others: its logit is hidden . weight
                hidden = model.trunk(torch.tensor([[*PROMPT.encode()]]))[0, -1]
                others = (hidden @ model.lm_head.weight[:256].T).logsumexp(0)
                model.lm_head.weight[256] = hidden / hidden.square().sum() * (others + math.log(3))
        save_checkpoint(tmp_path / f"{name}.pt", name, model, BYTES)
    ended = [response for response in ask(tmp_path / "ppo.pt", "--n", 20) if response[1][-1] == 256]
    assert len({len(ids) for _, ids, _ in ended}) > 1  # of one token, and of more
    for head, ids, numbers in ended:
        score, kl, expected = by_hand(tmp_path, "ppo", ids, 0.1)
        assert head == f"    score {score:.2f}  KL {kl:.2f}  beta 0.1"
        for line, wanted in zip(numbers, expected, strict=True):
            assert line == pytest.approx(wanted, abs=0.0051)


def test_a_trace_changes_no_response_and_no_response_changes_the_numbers_of_another(folder):
    def responses(lines):
        return [line for line in lines if line.startswith("  ") and not line.startswith("    ")]

    flags = [folder / "ppo.pt", PROMPT, "Where?", "--n", 2, "--seed", 3]
    plainly, traced = (run("sample.py", *flags, *more)[1].splitlines() for more in ([], ["--trace"]))
    assert len(responses(plainly)) == 4 and responses(traced) == responses(plainly)
    one, two = ask(folder / "ppo.pt", "--seed", 3), ask(folder / "ppo.pt", "--seed", 3, "--n", 2)
    for (_, ids, numbers) in (*one, *two):
        assert [line[-1] for line in numbers] == pytest.approx([x[-1] for x in by_hand(folder, "ppo", ids, 0.1)[2]], abs=0.0051)


def test_the_sft_model_has_a_kl_of_0_to_itself_and_untrained_values(folder):
    ((head, ids, numbers),) = ask(folder / "sft.pt", "--max_new_tokens", 4)
    score = by_hand(folder, "ppo", ids, 0.1)[0]
    assert head == f"    score {score:.2f} (it was cut off, which costs 1)  KL 0.00  beta 0.1" and len(ids) == 4
    for i, (log_pi, log_ref, kl, reward, value, advantage, returned, whitened) in enumerate(numbers):
        assert log_pi == log_ref < 0 and kl == value == whitened == 0
        assert (reward == 0 or i == 3) and advantage == returned == pytest.approx(score, abs=0.0051)
    assert "-0.00" not in run("sample.py", folder / "sft.pt", PROMPT, "--trace")[1]


def test_the_models_may_be_elsewhere_and_a_function_may_score(folder, tmp_path, monkeypatch):
    policy, _, _ = load_checkpoint(folder / "ppo.pt", ("ppo",))
    save_checkpoint(tmp_path / "ppo.pt", "ppo", policy, BYTES)
    assert ask(tmp_path / "ppo.pt", "--models", folder) == ask(folder / "ppo.pt")
    (tmp_path / "long_answers.py").write_text("def score(prompts, responses):\n    return [len(x) / 8 for x in prompts]\n")
    monkeypatch.syspath_prepend(tmp_path)
    save_checkpoint(tmp_path / "sft.pt", "sft", policy, BYTES)
    ((head, *_),) = ask(tmp_path / "ppo.pt", "--reward", "long_answers:score", "--max_new_tokens", 2, prompt="12345678" * 2)
    assert head.startswith("    score 1.00 (it was cut off, which costs 1)  KL 0.00")


@pytest.mark.parametrize("present, flags, says", [
    ([], [], "ppo.pt: not found"), (["ppo"], [], "--trace needs {}/sft.pt, which is not there; --models FOLDER says where it is\n"),
    (["ppo", "sft"], [], "--trace needs {}/rm.pt, which is not there; --models FOLDER says where it is, --reward what scores"),
    (["ppo", "rm", "sft"], ["--reward", "none:score"], "--reward none:score: ModuleNotFoundError"),
])  # fmt: skip
def test_what_is_missing_for_a_trace_is_named(folder, tmp_path, present, flags, says):
    for name in present or ["sft"]:
        (tmp_path / f"{name}.pt").write_bytes((folder / f"{name}.pt").read_bytes())
    status, printed, error = run("sample.py", tmp_path / "ppo.pt", PROMPT, "--trace", *flags)
    assert status == 2 and printed == "" and error.count("\n") == 1 and says.format(tmp_path) in error


def test_a_folder_and_a_reward_model_have_no_trace_and_without_one_its_flags_are_refused(folder):
    for path, says in ((folder, "a folder; give the ppo.pt or sft.pt of a run"), (folder / "rm.pt", "'rm', not 'ppo or sft'")):
        status, _, error = run("sample.py", path, PROMPT, "--trace")
        assert status == 2 and error.count("\n") == 1 and says in error
    for flag, value in (("--kl_coef", "0.2"), ("--models", "out"), ("--reward", "my:score")):
        status, _, error = run("sample.py", folder / "ppo.pt", PROMPT, flag, value)
        assert (status, error) == (2, f"sample.py: {flag} has no effect without --trace (-h explains the flags)\n")
    with pytest.raises(UserError, match="--models"):
        TraceConfig(models="out")
    assert TraceConfig().kl_coef == 0.1


@pytest.mark.parametrize("token, expected", [
    (b" eats", "·eats"), (b"eats", "eats"), (b"a b", "a b"), (b"  ", "· "), (b"\n", "\\n"), (b" \n", "·\\n"), (b"\xff", "\\xff"),
    (b"\x1b[1m", "\\x1b[1m"), (" é".encode(), "·é"), (b"123456789", "123456789"), (b" 12345678", "·12345678"),
    (b" 123456789", "·1234567…"),
])  # fmt: skip
def test_a_token_is_spelled_so_that_its_column_holds_it(token, expected):
    assert spelled(0, Tokenizer([token, *(bytes([b]) for b in range(256) if bytes([b]) != token)])) == expected


def test_the_end_token_is_spelled_as_in_the_header_of_minippo():
    assert spelled(256, BYTES) == "<eos>"


def test_a_zero_has_no_sign_and_other_numbers_keep_theirs():
    assert plain("     -0.00     -0.01     -10.00      0.00") == "      0.00     -0.01     -10.00      0.00"
