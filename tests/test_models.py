"""plumbing/models.py. What is refused in which words: test_settings.py."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cli import write_models
from data.files import UserError
from minippo import GPT, GPTConfig, RewardModel, Trunk
from plumbing.models import add_critic, fingerprint, load_checkpoint, load_models, new_model
from plumbing.models import normalise, save_checkpoint, sources, text_reward
from plumbing.text import Tokenizer
from tiny import assert_equal, inf, marks, stir, tiny_gpt, tiny_reward_model, weights

BYTES = Tokenizer.train([], 257)
TOKENS, MASK = torch.tensor([[65, 66, 67, 256], [68, 69, 0, 0]]), marks(".xx", "x..")


def test_a_checkpoint_brings_back_the_same_model_its_tokenizer_and_its_figures(tmp_path):
    shape = GPTConfig(257, 16, 1, 2, 8, bfloat16=True)
    models = {"ppo": GPT(shape), "sft": GPT(shape), "rm": RewardModel(GPT(shape))}
    models["ppo"].value_trunk = Trunk(shape)
    models["rm"].mean.fill_(0.5), models["rm"].std.fill_(3.0), models["rm"].cap.fill_(0.1)
    path, tokenizer = tmp_path / "x.pt", Tokenizer.train(["low low lower"], 260)
    for kind, model in models.items():
        save_checkpoint(path, kind, stir(model.train()), tokenizer, val_loss=1.25)
        loaded, its_tokenizer, figures = load_checkpoint(path, ["sft", "ppo", "rm"])
        assert its_tokenizer.tokens == tokenizer.tokens and figures == {"val_loss": 1.25}
        assert loaded.config == model.config and not loaded.training
        old, new = model.state_dict(), loaded.state_dict()
        assert old.keys() == new.keys() and all(torch.equal(old[x], new[x]) for x in old)


class Odd(dict):
    """To bring it back, torch.load() would have to run code that the file names."""


def test_a_file_that_is_no_whole_checkpoint_is_refused_and_runs_no_code(tmp_path):
    path = tmp_path / "x.pt"
    save_checkpoint(path, "sft", GPT(GPTConfig(257, 16, 1, 2, 8)), BYTES)
    whole, good = path.read_bytes(), torch.load(path)
    changes = {"config": {"x": 1}}, {"model": {}}, {"config": Odd(good["config"])}
    for bad in (whole[:-20], [1, 2], {"kind": "sft"}, *(good | x for x in changes)):
        path.write_bytes(bad) if isinstance(bad, bytes) else torch.save(bad, path)
        with pytest.raises(UserError, match="x.pt: damaged"):
            load_checkpoint(path, ["sft"])


@pytest.fixture
def config(tmp_path):
    """Settings of stage 3, in a folder with data, sft.pt and rm.pt."""
    more = {"models": write_models(tmp_path), "device": "cpu", "policy": "", "reward": ""}
    return SimpleNamespace(**more)


def test_policy_reference_and_score_stem_from_one_sft_model(config):
    policy, ref, score, tokenizer = load_models(config)
    for model, trained in ((policy, True), (ref, False)):
        assert {p.requires_grad for p in model.parameters()} == {trained} and not model.training
    assert_equal(weights(policy), weights(ref))
    reward_model = load_checkpoint(config.models / "rm.pt", ["rm"])[0]
    scores = score(TOKENS, MASK)
    assert torch.equal(scores, reward_model(TOKENS, torch.tensor([4, 2])))
    assert not scores.requires_grad
    names = {x: fingerprint(config.models / x) for x in ("sft.pt", "rm.pt")}
    assert sources(config) == names
    config.policy = config.models / "a.pt"
    save_checkpoint(config.policy, "ppo", stir(policy), tokenizer, sft=names["sft.pt"])
    assert_equal(weights(load_models(config)[0]), weights(policy))
    assert_equal(weights(load_models(config)[1]), weights(ref))
    assert sources(config) == names | {"--policy": fingerprint(config.policy)}
    save_checkpoint(config.policy, "ppo", policy, tokenizer)  # of which model?
    with pytest.raises(UserError, match="a.pt: was not made from"):
        load_models(config)
    config.policy, config.reward = config.models / "sft.pt", "math:sqrt"
    assert_equal(weights(load_models(config)[0]), weights(ref))
    assert sources(config).keys() == {"sft.pt", "--policy"}
    assert sources(SimpleNamespace(models=config.models)).keys() == {"sft.pt"}
    assert sources(SimpleNamespace()) == {}
    config.device = "meta"
    assert all(p.is_meta for model in load_models(config)[:2] for p in model.parameters())


def test_a_critic_starts_with_the_normalised_scores_of_the_reward_model(config):
    config.separate_critic = True
    policy, ref, *_ = load_models(config)
    assert ref.value_trunk is None
    reward_model, critic = load_checkpoint(config.models / "rm.pt", ["rm"])[0], policy.value_trunk
    reward_model.cap.fill_(inf)
    values = policy(TOKENS)[1]
    for row, n in ((0, 4), (1, 2), (0, 1)):
        (score,) = reward_model(TOKENS[[row]], torch.tensor([n]))
        torch.testing.assert_close(values[row, n - 1], score)
    assert all(p.requires_grad for p in policy.parameters())
    add_critic(policy, None)  # of an earlier round: it stays
    assert policy.value_trunk is critic


def test_a_function_scores_texts_or_tokens(config, monkeypatch):
    monkeypatch.chdir(config.models)
    Path("my_taste.py").write_text("def score(*texts):\n    return 1.5, -1e6")
    config.reward = "my_taste:score"
    assert load_models(config)[2](TOKENS, MASK).tolist() == [1.5, -1e6]
    seen = []
    text_reward(lambda *x: seen.append(x) or [1, 2], BYTES, "")(TOKENS, MASK)
    assert seen == [(["AB", "D"], ["C", "E"])]

    def reads_tokens(*arguments):
        return arguments

    reads_tokens.reads_tokens = True
    assert text_reward(reads_tokens, BYTES, config)(1, 2) == (1, 2, config)
    with pytest.raises(UserError, match="not -1000001.0 for 'DE'"):
        text_reward(lambda *_: [0, -1000001], BYTES, "")(TOKENS, MASK)


def test_the_scale_comes_from_answers_to_prompts_spread_over_the_list(monkeypatch):
    sft, model, seen = tiny_gpt(), tiny_reward_model(), []
    model.register_forward_hook(lambda _, x, scores: seen.append((x[0], scores)))
    config = SimpleNamespace(micro_batch=30, max_new_tokens=4)
    normalise(model, sft, [[1], [2, 3]], config)
    assert [len(tokens) for tokens, _ in seen] == [480, 480, 480, 480, 128]
    assert seen[0][0][:4, 0].tolist() == [1, 2, 1, 2] and seen[0][0].shape[1] == 6
    scores = torch.cat([scores for _, scores in seen])
    assert (model.mean, model.std) == (scores.mean(), scores.std())
    assert_equal(model.cap, (scores.quantile(0.99) - model.mean) / model.std)
    monkeypatch.setattr("plumbing.models.ANSWERS", 2)
    torch.nn.init.zeros_(model.score_head.weight)  # equal scores are not divided by 0
    normalise(model, sft, [[i] for i in range(10)], config)
    assert seen[-1][0][:, 0].tolist() == [0, 5] and model.std == 1e-6 and model.cap.abs() < 1e-6


def test_a_first_model_has_the_size_of_its_settings_or_is_a_gpt2(monkeypatch):
    config = SimpleNamespace(**vars(GPTConfig(300, 16, 1, 2, 8, True)), init="", device="meta")
    model, tokenizer = new_model(config, [("a", "b")])
    assert model.config == GPTConfig(257, 16, 1, 2, 8, True) and tokenizer.vocab_size == 257
    assert model.lm_head.weight.is_meta
    monkeypatch.setattr("plumbing.hf.read_gpt2", lambda *x: (torch.nn.Linear(1, 1), x))
    config = SimpleNamespace(**vars(GPTConfig(bfloat16=True)), init="gpt2", device="meta")
    model, read = new_model(config, [])
    assert read == ("gpt2", True) and model.weight.is_meta
    config.context = 64
    with pytest.raises(UserError, match="--init brings its own size and vocabulary"):
        new_model(config, [])
