"""plumbing/models.py. What is refused in which words: test_settings.py."""

from collections import ChainMap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from data.files import UserError
from minippo import GPT, GPTConfig, RewardModel, Trunk
from plumbing.models import add_critic, fingerprint, load_checkpoint, load_models, new_model
from plumbing.models import model_fingerprints, save_checkpoint, set_score_scale, text_reward
from plumbing.text import Tokenizer
from tiny import assert_equal, inf, marks, stir, tiny_gpt, tiny_reward_model, weights

BYTES = Tokenizer.train([], 257)
TOKENS, MASK = torch.tensor([[65, 66, 67, 256], [68, 69, 0, 0]]), marks(".xx", "x..")
LENGTHS = torch.tensor([4, 2])


def test_a_checkpoint_brings_back_all_of_a_model(tmp_path):
    shape = GPTConfig(257, 16, 1, 2, 8, bfloat16=True)
    models = {"ppo": GPT(shape), "sft": GPT(shape), "rm": RewardModel(GPT(shape))}
    models["ppo"].value_trunk = Trunk(shape)
    models["rm"].mean.fill_(0.5), models["rm"].std.fill_(3.0), models["rm"].cap.fill_(0.1)
    path = tmp_path / "x.pt"
    for kind, model in models.items():
        save_checkpoint(path, kind, stir(model.train()), BYTES, val_loss=1.25)
        loaded, tokenizer, metadata = load_checkpoint(path, ["sft", "ppo", "rm"])
        assert tokenizer.tokens == BYTES.tokens and metadata == {"val_loss": 1.25}
        assert loaded.config == model.config and not loaded.training
        old, new = model.state_dict(), loaded.state_dict()
        assert old.keys() == new.keys() and all(torch.equal(old[x], new[x]) for x in old)


def test_a_file_that_is_no_whole_checkpoint_is_refused(tmp_path):
    path = tmp_path / "x.pt"
    save_checkpoint(path, "sft", GPT(GPTConfig(257, 16, 1, 2, 8)), BYTES)
    whole, good = path.read_bytes(), torch.load(path)
    code = ChainMap(good["config"])  # to bring it back, code that the file names has to run
    changes = {"config": {"x": 1}}, {"model": {}}, {"config": code}
    for bad in (whole[:-20], [1, 2], {"kind": "sft"}, *(good | x for x in changes)):
        path.write_bytes(bad) if isinstance(bad, bytes) else torch.save(bad, path)
        with pytest.raises(UserError, match="x.pt: damaged"):
            load_checkpoint(path, ["sft"])


@pytest.fixture
def config(made):
    """Settings of stage 3."""
    return SimpleNamespace(models=made, device="cpu", policy="", reward="")


def test_policy_reference_and_score_stem_from_sft(config, tmp_path):
    policy, ref, score, tokenizer = load_models(config)
    for model, trained in ((policy, True), (ref, False)):
        assert {p.requires_grad for p in model.parameters()} == {trained} and not model.training
    assert_equal(weights(policy), weights(ref))
    reward_model = load_checkpoint(config.models / "rm.pt", ["rm"])[0]
    scores = score(TOKENS, MASK)
    assert torch.equal(scores, reward_model(TOKENS, LENGTHS)) and not scores.requires_grad
    names = {x: fingerprint(config.models / x) for x in ("sft.pt", "rm.pt")}
    assert model_fingerprints(config) == names
    config.policy = tmp_path / "a.pt"
    save_checkpoint(config.policy, "ppo", stir(policy), tokenizer, sft=names["sft.pt"])
    for loaded, model in zip(load_models(config), (policy, ref)):
        assert_equal(weights(loaded), weights(model))
    assert model_fingerprints(config) == names | {"--policy": fingerprint(config.policy)}
    save_checkpoint(config.policy, "ppo", policy, tokenizer)  # of which model?
    with pytest.raises(UserError, match="a.pt: was not made from"):
        load_models(config)
    config.policy, config.reward = config.models / "sft.pt", "math:sqrt"
    assert_equal(weights(load_models(config)[0]), weights(ref))
    assert model_fingerprints(config).keys() == {"sft.pt", "--policy"}
    config.device = "meta"
    assert all(p.is_meta for model in load_models(config)[:2] for p in model.parameters())


def test_a_critic_starts_as_the_reward_model(config):
    config.separate_critic = True
    policy, ref, *_ = load_models(config)
    assert ref.value_trunk is None
    reward_model, critic = load_checkpoint(config.models / "rm.pt", ["rm"])[0], policy.value_trunk
    reward_model.cap.fill_(inf)
    values = policy(TOKENS)[1][[0, 1], LENGTHS - 1]
    torch.testing.assert_close(values, reward_model(TOKENS, LENGTHS))
    assert all(p.requires_grad for p in policy.parameters())
    add_critic(policy, None)  # of an earlier round: it stays
    assert policy.value_trunk is critic


def test_a_function_scores_texts_or_tokens(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my_taste.py").write_text("def score(*texts):\n    return 1.5, -1e6")
    config.reward = "my_taste:score"
    assert load_models(config)[2](TOKENS, MASK).tolist() == [1.5, -1e6]

    def score(*arguments):
        seen.append(arguments)
        return [0, -1000001]

    seen = []
    with pytest.raises(UserError, match="not -1000001.0 for 'DE'"):
        text_reward(score, BYTES, config)(TOKENS, MASK)
    score.reads_tokens = True
    assert text_reward(score, BYTES, config)(1, 2) == [0, -1000001]
    assert seen == [(["AB", "D"], ["C", "E"]), (1, 2, config)]


def test_many_answers_to_all_prompts_set_the_scale(monkeypatch):
    # What the scale is: the twin in test_scripts.py
    model, seen = tiny_reward_model(), []
    model.register_forward_hook(lambda _, x, scores: seen.append(x[0][:, 0].tolist()))
    torch.nn.init.zeros_(model.score_head.weight)  # equal scores are not divided by 0
    config = SimpleNamespace(micro_batch=30, max_new_tokens=4)
    set_score_scale(model, tiny_gpt(), [[1], [2, 3]], config)
    assert seen == [[1, 2] * 240] * 4 + [[1, 2] * 64]
    assert model.std == 1e-6 and model.cap.abs() < 1e-6
    monkeypatch.setattr("plumbing.models.ANSWERS", 2)
    set_score_scale(model, tiny_gpt(), [[i] for i in range(10)], config)
    assert seen[-1] == [0, 5]


def test_a_first_model_is_new_or_a_gpt2(monkeypatch):
    config = SimpleNamespace(**vars(GPTConfig(300, 16, 1, 2, 8, True)), init="", device="meta")
    model, tokenizer = new_model(config, [("ab", "ab")])
    assert model.config == GPTConfig(258, 16, 1, 2, 8, True) and tokenizer.vocab_size == 258
    assert model.lm_head.weight.is_meta
    monkeypatch.setattr("plumbing.hf.read_gpt2", lambda x: (GPT(GPTConfig(9, 9, 1, 1, 4)), x))
    config = SimpleNamespace(**vars(GPTConfig(bfloat16=True)), init="gpt2", device="meta")
    model, read = new_model(config, [])
    assert read == "gpt2" and model.trunk.config.bfloat16 and model.lm_head.weight.is_meta
    config.context = 64
    with pytest.raises(UserError, match="--init brings its own size"):
        new_model(config, [])
