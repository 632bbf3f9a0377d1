"""The specification of plumbing/fast.py: less work, the same numbers, and the source that stands in
minippo.py. Run: python -m pytest tests/test_fast.py"""

import contextlib
import io
import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import minippo
from cli import edited
from minippo import GPT, GPTConfig, evaluate_actions, response_mask
from plumbing import fast
from plumbing.fast import same_numbers
from plumbing.rows import pad
from tiny import (
    EOS,
    assert_equal,
    biased,
    f64,
    gradients,
    inf,
    noise,
    stir,
    tiny_gpt,
    tiny_reward_model,
)


def random_tree(seed):
    """Rows that grow from each other's beginnings, in random order, some of them twice; for every
    fourth seed two long rows that share one token, which is too little to save -> tokens (B, T)
    with junk in the padding, lengths (B,), a mask (B, T-1) of responses."""
    rng, rows = random.Random(seed), [[1]]
    for _ in range(rng.randint(2, 12)):
        stem = rng.choice(rows)
        row = stem[: rng.randint(0, len(stem))] + rng.choices(range(3), k=rng.randint(1, 4))
        rows.append(row[:12])
    rows = [row + [2] for row in rows + rng.choices(rows, k=3)]
    if seed % 4 == 0:
        rows = [[1, 2, *rng.choices(range(3), k=n)] for n in (13, 12)]
        rows[1][1] = 0
    rng.shuffle(rows)
    tokens, lengths = pad(rows)
    padding = torch.arange(tokens.shape[1]) >= lengths[:, None]
    prompt_lengths = torch.tensor([rng.randint(1, len(row) - 1) for row in rows])
    mask = response_mask(prompt_lengths, lengths, tokens.shape[1])
    return torch.where(padding, torch.randint(3, tokens.shape), tokens), lengths, mask


def both_ways(function, **options):
    """What a function gives with the networks of minippo.py, and with fast.py installed."""
    fast.uninstall()
    plain = function()
    fast.install(**options)
    return plain, function()


# Packing


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("separate_critic", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_packing_changes_no_number_and_no_gradient(seed, separate_critic, recompute):
    model, (tokens, lengths, mask) = tiny_gpt(separate_critic=separate_critic), random_tree(seed)
    scorer, factors = tiny_reward_model(), noise(3, *mask.shape)

    def compute():
        model.zero_grad(), scorer.zero_grad()
        outputs, scores = (
            torch.stack(evaluate_actions(model, tokens, mask)),
            scorer(tokens, lengths),
        )
        ((outputs * factors).sum() + (scores**2).sum()).backward()
        return outputs.detach(), scores.detach(), gradients(model), gradients(scorer)

    for plain, packed in zip(*both_ways(compute, recompute=recompute)):
        assert_equal(plain, packed, 1e-10)
        assert plain.norm() > 1e-2


@pytest.mark.parametrize("seed", range(10))
def test_logits_and_values_of_all_tokens_are_those_of_the_plain_network(seed):
    policy, (tokens, *_) = tiny_gpt(), random_tree(seed)
    for plain, packed in zip(*both_ways(lambda: policy(tokens))):
        assert plain.shape == packed.shape
        assert_equal(plain, packed, 1e-10)


def test_hidden_states_can_be_read_with_several_masks_and_with_any_index():
    trunk, (tokens, _, mask) = tiny_gpt().trunk, random_tree(3)
    first, second = mask.clone(), mask.roll(1, 0)
    states = tokens[:, :-1]
    indices = [first, second, first, 0 * states, torch.tensor([1, 0]), first[:, 0]]
    hidden, packed = both_ways(lambda: trunk(states))
    for index in indices:
        assert_equal(packed[index], hidden[index])
    assert_equal(torch.relu(packed), torch.relu(hidden))


def computed_tokens(model, function):
    """How many tokens the norm and the MLP of the last block work on, call by call."""
    seen, block = [], model.trunk.blocks[-1]
    hooks = [
        part.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[:-1].numel()))
        for part in (block.norm1, block.mlp[0])
    ]
    function()
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("seed", range(10))
def test_what_rows_share_is_computed_once_and_what_nobody_reads_never(seed):
    fast.install()
    policy, (tokens, _, mask) = tiny_gpt(), random_tree(seed)
    rows = list(zip(tokens.tolist(), mask))
    last = [int(inside.nonzero().max()) for _, inside in rows]
    beginnings = {tuple(row[: t + 1]) for (row, _), n in zip(rows, last) for t in range(n + 1)}
    read = {tuple(row[: t + 1]) for row, inside in rows for t in inside.nonzero().flatten()}
    whole = len(beginnings) > 0.9 * len(rows) * (max(last) + 1)
    assert whole == (seed % 4 == 0)
    everything = len(rows) * (max(last) + 1), int(mask.sum())
    seen = computed_tokens(policy, lambda: evaluate_actions(policy, tokens, mask))
    assert seen == list(everything if whole else (len(beginnings), len(read)))


def test_dropout_drops_in_training_only():
    fast.install()
    model = stir(GPT(GPTConfig(11, 16, 2, heads=2, channels=8, dropout=0.5)))
    tokens = torch.tensor([[1, 2, 3], [1, 2, 4]])
    still = model.eval()(tokens)[0]
    assert_equal(model(tokens)[0], still)
    first, second = model.train()(tokens)[0], model(tokens)[0]
    assert (first - still).abs().min() > 1e-6 and (first - second).abs().min() > 1e-6
    for block in model.trunk.blocks:
        block.dropout.p = block.attention.dropout = 0.0
    assert (model(tokens)[0] - still).abs().min() > 1e-6  # that of the embeddings alone


@pytest.mark.parametrize("part", ["mlp", "attention.out"])
def test_a_block_is_as_before_after_a_call_that_failed_too(part):
    fast.install()
    policy, (tokens, _, mask) = tiny_gpt(), random_tree(1)
    before = [str(vars(module)) for module in policy.modules()]

    def fail(*_):
        raise ArithmeticError

    for _ in range(2):
        evaluate_actions(policy, tokens, mask)
        hook = policy.trunk.blocks[1].get_submodule(part).register_forward_hook(fail)
        for call in (
            lambda: evaluate_actions(policy, tokens, mask),
            lambda: fast.generate(policy, [[1, 2]], 3),
        ):
            with pytest.raises(ArithmeticError):
                call()
        hook.remove()
        assert [str(vars(module)) for module in policy.modules()] == before
    assert "attend" not in vars(policy.trunk.blocks[0].attention)


# Sampling with a cache


def likeliest(logits):
    """A draw without chance, that differs from row to row."""
    return (logits * 1e3).sin().argmax(-1)


@pytest.mark.parametrize("seed", range(40))
def test_sampling_with_a_cache_gives_what_the_plain_sampler_gives(seed):
    rng = random.Random(seed)
    context, bias = rng.choice([9, 16, 40]), rng.choice([-inf, 0.0, 2.0])
    policy = biased(tiny_gpt(context=context, separate_critic=seed % 5 == 0), {EOS: bias})
    lengths = [rng.randint(1, rng.choice([3, context - 1])) for _ in range(rng.randint(1, 12))]
    prompts = [rng.choices(range(EOS), k=length) for length in lengths]
    arguments = policy, prompts, rng.choice([1, 5, 30, 10**12]), rng.choice([1.0, 0.7]), likeliest
    fast.install()
    cached = fast.generate(*arguments)
    fast.uninstall()
    for plain, fast_one, again in zip(
        minippo.generate(*arguments), cached, fast.generate(*arguments), strict=True
    ):
        assert_equal(plain, fast_one, 1e-9)
        assert torch.equal(plain, again)  # without install() it is the plain sampler
    assert not any(x.requires_grad for x in cached)


def test_each_new_token_is_one_row_of_work_and_rows_that_ended_are_dropped():
    fast.install()
    policy = biased(tiny_gpt(context=64), {EOS: 1.0})
    prompts = [[1], [2, 3, 4, 5], [6, 7], [8, 9, 0], [1, 1, 1, 1, 1, 1], [3]] * 8
    first, reads, *rows = computed_tokens(policy, lambda: fast.generate(policy, prompts, 40))
    assert (first, reads) == (1 + 4 + 2 + 3 + 5 + 1, 6)  # the different beginnings, and their ends
    rows = rows[::2]  # norm and MLP have the same
    assert rows[0] == 48 and rows == sorted(rows, reverse=True) and rows[-1] < 24


@pytest.mark.parametrize("prompts", [[[]], [[1], []], [[1] * 16], [[1], [1] * 17]])
def test_an_empty_prompt_and_one_that_fills_the_context_are_refused(prompts):
    fast.install()
    with pytest.raises(ValueError, match="1 to 15 tokens"):
        fast.generate(tiny_gpt(), prompts, 5)


def test_a_draw_takes_the_token_in_whose_piece_the_random_number_falls(monkeypatch):
    p = f64([[0.0, 0.2, 0.0, 0.5, 0.3, 0.0]] * 6)
    u = f64([[0.0], [0.199], [0.201], [0.699], [0.701], [1 - 2**-53]])
    monkeypatch.setattr(torch, "rand", lambda *shape, dtype, device: u.to(dtype))
    for logits in (p.log(), p.log().float() + 50):
        assert fast.fast_draw(logits).tolist() == [1, 1, 3, 3, 4, 4]
    u = f64([[1e-12]])  # a token of very small probability can be drawn
    assert fast.fast_draw(f64([[1e-11, 1 - 1e-11]]).log()).tolist() == [0]


def test_tokens_are_drawn_as_often_as_their_probabilities_say():
    fast.install()
    policy, n = tiny_gpt(), 4000
    tokens, *_ = fast.generate(policy, [[1, 2]] * n, 1)
    p = policy(torch.tensor([[1, 2]]))[0][0, -1].softmax(-1).detach()
    counts = torch.bincount(tokens[:, 2], minlength=EOS + 1)
    assert ((counts - n * p) ** 2 / (n * p)).sum() < 35  # 10 degrees of freedom: once in 8,000


# Memory and types


def test_a_block_is_computed_once_and_when_recomputing_twice_where_there_is_a_gradient():
    policy, calls = tiny_gpt(), []
    policy.trunk.blocks[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    for recompute in (False, True):
        fast.install(recompute=recompute)
        policy(torch.randint(11, (3, 7)))[0].square().sum().backward()
        assert len(calls) == 1 + recompute
        calls.clear()
    fast.generate(policy, [[1, 2]], 1)
    assert len(calls) == 1


def test_bfloat16_is_for_the_products_in_the_blocks_alone():
    policy, seen, tokens = minippo.frozen_copy(tiny_gpt().float()), {}, torch.randint(11, (3, 7))
    block = policy.trunk.blocks[0]
    parts = {"qkv": block.attention.qkv, "mlp": block.mlp[2]}
    parts |= {"norm": policy.trunk.norm, "head": policy.lm_head}
    for name, part in parts.items():
        part.register_forward_hook(lambda *args, name=name: seen.update({name: args[2].dtype}))
    plain, near = both_ways(lambda: policy(tokens)[0], dtype=torch.bfloat16)
    half, full = torch.bfloat16, torch.float32
    assert seen == {"qkv": half, "mlp": half, "norm": full, "head": full}
    assert 1e-6 < (near - plain).abs().max() < 0.3
    seen.clear()
    fast.generate(policy, [[1, 2]], 3)
    assert seen == {"qkv": half, "mlp": half, "norm": full, "head": full}


class Casts(TorchDispatchMode):
    """Counts the casts of matrices of weights to bfloat16."""

    def __init__(self, model):
        super().__init__()
        self.count, self.weights = 0, {p.data_ptr() for p in model.parameters() if p.dim() == 2}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        to_bfloat16 = (kwargs or {}).get("dtype") == torch.bfloat16
        if func is torch.ops.aten._to_copy.default and to_bfloat16:
            self.count += args[0].data_ptr() in self.weights
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("frozen", [False, True])
def test_in_bfloat16_each_weight_is_cast_once_for_all_tokens_of_a_response(frozen):
    policy = GPT(GPTConfig(300, 64, 2, heads=2, channels=16)).eval().requires_grad_(not frozen)
    fast.install(torch.bfloat16)
    with Casts(policy) as casts:
        tokens, *_ = fast.generate(policy, [[1, 2]] * 4, 20)
    assert tokens.shape[1] > 12 and casts.count == 2 * 4  # two layers of four matrices
    assert all(weight.requires_grad != frozen for weight in policy.parameters())


# What is edited in minippo.py is what runs


def computed_both_ways(draw):
    """Whatever fast.py computes, plainly and fast: the two must agree -> sums of the numbers. Imports
    the project as it is now."""
    import minippo
    from plumbing import fast
    from tiny import assert_equal, tiny_gpt, tiny_reward_model

    torch.manual_seed(0)
    tokens, lengths = torch.randint(2, (9, 6)), torch.tensor([2, 3, 4] * 3)
    mask = minippo.response_mask(lengths - 1, lengths, 6)
    policy, scorer = tiny_gpt(), tiny_reward_model()

    def numbers():
        sampled = fast.generate(policy, [[1], [2, 3, 4]] * 3, 6, 1.0, draw)
        scored = minippo.evaluate_actions(policy, tokens, mask)
        return *scored, *policy(tokens), scorer(tokens, lengths), *sampled

    plain = numbers()
    fast.install()
    for a, b in zip(plain, numbers(), strict=True):
        assert_equal(a, b, 1e-9)
    return [round(x.double().sum().item(), 6) for x in plain]


EDITS = {  # what is written instead of what; which functions fast.py then finds changed
    "nothing": ("", "", ""),
    "a block": ("self.mlp(self.norm2(x)))", "self.mlp(self.norm2(x))) + 0.1 * x.cos()", ""),
    "ReLU": ('nn.GELU("tanh")', "nn.ReLU()", ""),
    "what goes out": ("return self.out(self.attend", "return 0.5 * self.out(self.attend", ""),
    "attention": ("q, k, v, is_causal=True", "q, k, 2 * v, is_causal=True", "Attention.attend"),
    "grid": (
        "return self.out(self.attend",
        "B, T, C = x.shape\n        return self.out(0.5 * self.attend",
        "Block",
    ),
    "mixing": (
        "x = x + self.dropout(self.att",
        "x = x + x.mean(-2, True) + self.dropout(self.att",
        "Block",
    ),
    "values": (
        "values = at_least_float32(",
        "values = 2 + at_least_float32(",
        "evaluate_actions",
    ),
    "trunk": ("return self.norm(x)", "return 2 * self.norm(x)", "Trunk.forward"),
    "draw": ("torch.multinomial(logits.softmax(-1), 1).squeeze(1)", "logits.argmin(-1)", "draw"),
    "mask": (">= prompt_lengths[:, None])", ">= prompt_lengths[:, None] - 1)", "response_mask"),
    "sampler": ("token != policy.config.eos", "token != 3", "generate"),
}


def run_edited(name, folder):
    """-> the sums with minippo.py edited, and what install() says."""
    right, wrong, _ = EDITS[name]
    out, draw = io.StringIO(), None if name == "draw" else lambda x: (x * 1e3).sin().argmax(-1)
    changes = [("minippo.py", right, wrong)] if right else []
    with edited(folder, *changes), contextlib.redirect_stdout(out):
        return computed_both_ways(draw), out.getvalue().splitlines()


@pytest.fixture(scope="module")
def unedited(tmp_path_factory):
    return run_edited("nothing", tmp_path_factory.mktemp("project"))


@pytest.mark.parametrize("name", list(EDITS)[1:])
def test_the_fast_path_computes_what_has_been_edited(name, tmp_path, unedited):
    sums, said = run_edited(name, tmp_path)
    assert sums != unedited[0]  # the edit has an effect
    changed = EDITS[name][2]
    assert bool(said) == bool(changed)
    if changed:
        assert said[0].startswith(f"minippo.py has another {changed} than plumbing/fast.py")
        assert said[1].startswith("so the plain code runs")


def test_the_functions_that_are_mirrored_are_those_that_this_was_written_for(unedited, capsys):
    numbers = {function.__qualname__: fast.checksum(function) for function in fast.MIRRORED}
    assert list(numbers.values()) == list(fast.MIRRORED.values()), f"now: {numbers}"
    assert not unedited[1] and same_numbers()
    fast.install(torch.bfloat16, recompute=True)
    assert fast.OPTIONS == {"dtype": torch.bfloat16, "recompute": True, "installed": True}
    fast.uninstall()
    assert fast.OPTIONS == {"dtype": None, "recompute": False, "installed": False}
    assert minippo.Trunk.forward is fast.PLAIN_FORWARD and not capsys.readouterr().out


def test_a_promise_of_hidden_states_can_be_used_like_a_tensor():
    policy, tokens = tiny_gpt(), torch.randint(EOS, (3, 5))
    plain = policy.trunk(tokens)
    fast.install()
    hidden = policy.trunk(tokens)
    for a, b in (
        (hidden[:, -1], plain[:, -1]), (hidden.detach(), plain), (hidden.shape, plain.shape),
        (hidden + 1, plain + 1), (1 + hidden, 1 + plain), (hidden - 2, plain - 2),
        (2 - hidden, 2 - plain), (hidden * 3, plain * 3), (3 * hidden, 3 * plain),
        (hidden / 2, plain / 2), (-hidden, -plain), (hidden @ torch.ones(8).double(), plain.sum(-1)),
        (torch.relu(hidden), plain.relu()), (hidden**2, plain**2), (len(hidden), 3),
        (torch.cat([hidden, hidden], 1), torch.cat([plain, plain], 1)),
    ):  # fmt: skip
        assert_equal(torch.as_tensor(a), torch.as_tensor(b), 1e-9)
