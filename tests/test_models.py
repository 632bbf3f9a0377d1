"""Models in files, scores, and what watches a run: plumbing/checkpoints.py, models.py, watch.py.
Run: python -m pytest tests/test_models.py. What is refused in which words: test_refusals.py."""

import dataclasses
import json
from fnmatch import fnmatch
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from data.files import UserError
import minippo
from cli import write_data, write_models
from minippo import GPT, GPTConfig, PPOConfig, RewardModel, evaluate_actions, frozen_copy
from plumbing import watch
from plumbing.checkpoints import fingerprint, load_checkpoint, load_weights, save_checkpoint
from plumbing.models import add_critic, load_algorithm, load_models, text_reward
from plumbing.tokenizer import Tokenizer
from tiny import inf, marks, nan, stir, tiny_gpt
from train_ppo import StageConfig

BYTES = Tokenizer.train([], 257)
TOKENS, MASK = torch.tensor([[65, 66, 67, 256], [68, 69, 0, 0]]), marks(".xx", "x..")


def test_a_checkpoint_brings_back_the_same_model_its_tokenizer_and_the_facts(tmp_path):
    shape = GPTConfig(257, 16, 1, 2, 8, dropout=0.5)
    models = {"ppo": GPT(dataclasses.replace(shape, separate_critic=True)), "sft": GPT(shape)}
    models["rm"] = RewardModel(shape)
    models["rm"].mean.fill_(0.5), models["rm"].std.fill_(3.0), models["rm"].cap.fill_(0.1)
    path, tokenizer = tmp_path / "x.pt", Tokenizer.train(["low low lower"], 260)
    for kind, model in models.items():
        save_checkpoint(path, kind, stir(model.train()), tokenizer, val_loss=1.25)
        loaded, found, facts = load_checkpoint(path, ["other", kind])
        assert found.tokens == tokenizer.tokens and facts == {"val_loss": 1.25}
        assert loaded.config == model.config and not loaded.training
        assert fingerprint(loaded) == fingerprint(model) != fingerprint(stir(loaded.train()))
        for x in loaded.state_dict().values():  # mean, std and cap of a reward model, too
            name = fingerprint(loaded)
            x.view(-1)[0] += 1
            assert fingerprint(loaded) != name
        load_weights(path, kind, loaded)
        assert fingerprint(loaded) == fingerprint(model) and not loaded.training


class Odd(dict):
    """To bring it back, torch.load() would have to run code that the file names."""


def test_a_file_that_is_no_whole_checkpoint_is_refused_and_runs_no_code(tmp_path):
    path = tmp_path / "x.pt"
    save_checkpoint(path, "sft", GPT(GPTConfig(257, 16, 1, 2, 8)), BYTES)
    whole, good = path.read_bytes(), torch.load(path)
    bad = [{"config": {"x": 1}}, {"config": None}, {"model": {}}, {"vocabulary": ["日"]}]
    bad = [good | change for change in [*bad, {"config": Odd(good["config"])}]]
    for write in (
        *(partial(path.write_bytes, whole[: int(len(whole) * x)]) for x in (0, 0.5, 0.999)),
        *(partial(torch.save, x, path) for x in [[1, 2], {"model": {}}, {"kind": "sft"}, *bad]),
    ):
        write()
        with pytest.raises(UserError, match="x.pt: damaged"):
            load_checkpoint(path, ["sft"])


@pytest.fixture
def folder(tmp_path):
    write_data(tmp_path / "data")
    return write_models(tmp_path)


def test_what_is_frozen_has_no_gradient_and_each_model_knows_its_sft_model(folder):
    (sft, tokenizer, _), rm = (load_checkpoint(folder / f"{x}.pt", [x]) for x in ("sft", "rm"))
    models, name = load_models(folder, "cpu"), fingerprint(sft)
    for model, trained in ((models.policy, 1), (models.ref, 0), (models.reward_model, 0)):
        assert {p.requires_grad for p in model.parameters()} == {trained} and not model.training
    assert torch.equal(models.score(TOKENS, MASK), rm[0](TOKENS, torch.tensor([4, 2])))
    assert models.made_from == {"sft.pt": name, "rm.pt": fingerprint(rm[0])}
    assert models.facts["rm"] == rm[2] and models.facts["sft"]["val_loss"] == 5.0
    stir(models.policy), save_checkpoint(folder / "a.pt", "ppo", models.policy, tokenizer, sft=name)
    for x, wanted in (("a.pt", models.policy), ("sft.pt", sft)):
        found = load_models(folder, "cpu", policy=folder / x)
        assert found.made_from["--policy"] == fingerprint(wanted) == fingerprint(found.policy)
        assert fingerprint(found.ref) == fingerprint(models.ref) == name
    save_checkpoint(folder / "a.pt", "ppo", models.policy, tokenizer)  # of which model?
    with pytest.raises(UserError, match="a.pt: was not made from"):
        load_models(folder, "cpu", policy=folder / "a.pt")


def test_a_critic_starts_with_the_normalised_scores_of_the_reward_model(folder):
    models = load_models(folder, "cpu", separate_critic=True)
    policy, critic, values = models.policy, models.policy.critic, models.policy(TOKENS)[1]
    models.reward_model.cap.fill_(inf)
    for row, n in ((0, 4), (1, 2), (0, 1)):
        (score,) = models.reward_model(TOKENS[[row]], torch.tensor([n]))
        torch.testing.assert_close(values[row, n - 1], score)
    assert policy.config.separate_critic and all(p.requires_grad for p in policy.parameters())
    add_critic(policy, None)  # of an earlier round: it stays
    assert policy.critic is critic is not models.reward_model.trunk


def test_a_function_is_known_by_its_file_and_scores_texts_or_tokens(folder, monkeypatch):
    monkeypatch.chdir(folder)
    names = []
    for number in (1.5, 2.5, 1.5):
        (folder / "my_taste.py").write_text(f"def score(*texts):\n    return {number}, -1e6")
        models = load_models(folder, "cpu", reward="my_taste:score")
        names.append(models.made_from["the code of --reward"])
    assert names[0] == names[2] != names[1] and models.reward_model is None
    assert not models.made_from.keys() & vars(StageConfig()).keys()  # both are compared
    assert models.score(TOKENS, MASK).tolist() == [1.5, -1e6]
    text_reward(lambda *x: names.append(x) or [1, 2], BYTES, "")(TOKENS, MASK)
    assert names[3] == (["AB", "D"], ["C", "E"])

    def reads_tokens(*given):
        return given

    reads_tokens.reads_tokens = True
    assert text_reward(reads_tokens, BYTES, "its SFT model")(1, 2) == (1, 2, "its SFT model")
    for x in (-1000001.0, nan):
        with pytest.raises(UserError, match=f"not {x} for 'DE'"):
            text_reward(lambda *_, x=x: [0, x], BYTES, "")(TOKENS, MASK)


# What watches


def test_a_package_that_an_algorithm_lacks_is_named(monkeypatch):
    def lacking(_):
        raise ModuleNotFoundError("no peft", name="peft")

    monkeypatch.setattr("importlib.import_module", lacking)
    with pytest.raises(ModuleNotFoundError, match="no peft"):
        load_algorithm("rloo")


def test_a_reward_model_no_better_than_chance_is_doubted():
    for accuracy, pairs, loss, says in (
        (0.59, 100, 0.693, ["59.0 % of 100 validation"]),
        (0.61, 100, 0.694, ["guessing"]),
        (1.0, 4, 0.5, ["than chance"]),  # luck once in 16 times
        (1.0, 5, 0.5, []),
    ):
        rm = {"val_accuracy": accuracy, "val_pairs": pairs, "val_loss": loss}
        found = list(watch.doubts_about(rm))
        assert len(found) == len(says) and all(map(str.__contains__, found, says))
    for loss, count in ((2.30, 0), (2.31, 1)):  # log 10 = 2.303
        assert len([*watch.doubts_about({"val_loss": loss}, choices=10)]) == count


# What is given, and what is said; an exclamation mark if the run ends.
START = """
off=0.0005, micro_batch=4 -> checked: * is 1 and the KL to the reference is 0
off=0.002 -> !a ratio is 0.0020 off 1: sampling and scoring disagree
off=nan -> !a ratio is nan
off=0.2, dtype="bfloat16", policy="x.pt" -> checked: * is 1
off=1.0, dtype="bfloat16" -> !a ratio is
dropout=0.3 -> !a ratio is
moved=0.01 -> !nats away from the reference, not 0
moved=0.01, policy="x.pt" -> checked: * is 1
scale=0.01 -> *the first scores is 0.0123; --kl_coef 0.1 suits a spread around 1
scale=20.0 -> *the first scores is 24.6; *
scale=20.0, kl_coef=0.0 -> checked: * is 0
scale=20.0, count=1 -> checked: * is 0
max_new_tokens=13 -> warning: 8 of 20 prompts leave less than 13 tokens of *
"""


def start(off=0.0, moved=0.0, dropout=0.0, scale=1.0, count=20, dtype="float32", policy="", **more):
    """check_start() with log-probabilities that are off in the last response of 16, and so on."""
    model, sizes = tiny_gpt(dropout=dropout).train(), []
    ref, config = stir(frozen_copy(model), moved), {"max_new_tokens": 6, "kl_coef": 0.1} | more

    def generate(policy, prompts, *rest):
        sizes.append(len(prompts))
        tokens, mask, logprobs, values = minippo.generate(policy, prompts, *rest)
        logprobs[-1, mask[-1]] += off
        return tokens, mask, logprobs, values

    def score(tokens, mask):
        return scale * torch.linspace(-2, 2, len(mask))  # spread 1.23

    config = PPOConfig(temperature=0.7, missing_eos_penalty=0.0, **config)
    prompts, stage = [[1] * (1 + i % 5) for i in range(count)], StageConfig(batch_size=16)
    stage.policy = policy
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "generate", generate)
        watch.check_start(model, ref, score, prompts, config, stage, dtype)
    assert sizes == [min(count, config.micro_batch or 16)]


@pytest.mark.parametrize("line", START.strip().splitlines())
def test_a_run_starts_only_if_sampling_and_scoring_agree(capsys, line):
    given, says = line.split(" -> ")
    given = eval(f"dict({given})", {"nan": nan})
    if says[0] == "!":
        with pytest.raises(UserError, match=says[1:]):
            start(**given)
    else:
        start(**given)
        assert fnmatch(capsys.readouterr().out, says + "\n")


def test_what_is_wrong_with_an_iteration_is_said():
    for kl, more, says in (
        ([-0.1, -0.01] * 8, {}, "KL -0.055 ± 0.011 is below 0: sampling and scoring disagree"),
        ([-0.1, 0.03] * 8, {}, ""),  # the mean is 2.2 times its error
        ([-9e-5] * 16, {}, ""),
        ([1.0] * 16 + [29.9], {}, ""),
        ([1.0] * 16 + [30.1], {}, "1 of 17 responses went astray. KL 30: 'text 16'"),
        ([99.0] * 16, {"entropy": 0.021, "eos_rate": 0.1}, ""),
        ([101.0] * 16, {}, "KL 101, entropy 0.200 nats per token: the policy may have collapsed"),
        ([1.0] * 16, {"entropy": 0.019}, "KL 1, entropy 0.019 nats"),
        ([1.0] * 16, {"eos_rate": 0.0}, "no response has ended by itself"),
        ([-1.0] * 15, {"entropy": 0.0, "eos_rate": 0.0}, ""),  # few
    ):
        metrics = {"entropy": 0.2, "eos_rate": 1.0} | more
        found = watch.faults(metrics, torch.tensor(kl), [f"text {i}" for i in range(len(kl))])
        assert [x.startswith(says) for x in found.values()] == [True] * bool(says), found


def test_an_iteration_is_logged_traced_and_shown(tmp_path, monkeypatch, capsys):
    clock, pages, ended = iter([0.0, 59.0, 61.0, 61.0, 100.0]), [], []
    kinds = iter(["a", "ab", "ab"])  # of faults in an iteration
    for name, x in {
        "time": SimpleNamespace(perf_counter=lambda: next(clock)),
        "write_page": lambda *given: pages.append(given),
        "judge_of": {"zoo": lambda prompt, _: float(len(prompt) == 2)}.get,
        "faults": lambda _, kl, texts: dict.fromkeys(
            next(kinds), f"{kl.sum():.3f}, {'AB' in texts}"
        ),
    }.items():
        monkeypatch.setattr(watch, name, x)
    state = SimpleNamespace(run=SimpleNamespace(out=tmp_path, data="zoo"), settings={"lr": 1})
    state.values, state.step = {"kl_coef": 0.7}, 1
    state.end_step = lambda *x, show: ended.append((*x, show))
    path, policy = tmp_path / "ppo_traces.jsonl", stir(GPT(GPTConfig(257, 16, 1, 2, 8)).eval(), 0.2)
    path.write_text('{"step": 1}\n{"step": 2}\n')
    models = SimpleNamespace(policy=policy, tokenizer=BYTES, facts={"rm": {"max_new_tokens": 5}})
    models.facts["rm"] |= {"val_accuracy": 0.5, "val_pairs": 100}
    config = PPOConfig(7, 0.7, missing_eos_penalty=0.0)
    it = watch.Watch(state, models, config, SimpleNamespace(steps=44, models="m"))
    said = capsys.readouterr().out
    assert "up to 5 tokens, and PPO writes 7" in said and "better than chance" in said
    assert config.kl_coef == 0.7

    ref, scores = stir(frozen_copy(policy), 0.1), torch.arange(11.0).roll(3)
    batch = minippo.rollout(
        policy, ref, lambda *_: scores, [[65, 66 + i] for i in range(11)], config
    )
    for step in (1, 40, 43):
        state.step, config.kl_coef = step, step / 100
        it.end_step(batch, {"kl": 2.0})
        assert state.values == {"kl_coef": step / 100}
    *warned, shown = capsys.readouterr().out.splitlines()
    nats = (batch["old_logprobs"] - batch["ref_logprobs"]).sum()
    assert warned == [f"warning: iteration {i}: {nats:.3f}, False" for i in (2, 41)]
    assert fnmatch(shown, "    *AB*  score 8.00  KL *")
    show = ["score", "judge", "kl", "entropy", "eos_rate"]
    assert ended == [({"kl": 2.0, "judge": 1.0}, 22 + batch["mask"].sum(), show)] * 3
    assert pages == [(tmp_path, "m")]
    with torch.no_grad():
        batch["logprobs"], _, _ = evaluate_actions(policy, batch["tokens"], batch["mask"], 0.7)
    line = {"settings": {"lr": 1}, "responses": []}
    for score in (0, 2, 4, 6, 8, 10):
        i = scores.tolist().index(score)
        row = {"prompt": f"A{chr(66 + i)}", "score": score}
        line["responses"].append(row | {"columns": minippo.trace(batch, i, BYTES.spell)})
    lines = [{"step": 1}, line | {"step": 2}, line | {"step": 44}]
    assert [*map(json.loads, path.read_text().splitlines())] == lines
    traced = [i for i in range(1, 300) if watch.traced(i, 250)]
    assert traced == [1, 2, 5, 10, 20, 50, 100, 200, 250]
