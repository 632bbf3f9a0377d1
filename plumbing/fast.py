"""minippo's networks, computed with less work: the same numbers, to rounding.

In a transformer everything but attention acts on each token by itself. So the blocks of minippo.py
run as they are, on a list of tokens (K, C) in place of the grid (B, T, C). Only attention needs the
grid; it is handed another `attend` for the length of a call.

Packing. Rows of a batch differ in length, and they often begin alike: two answers to one prompt,
two questions that open with the same words. As far as rows are alike from their first token on, a
causal network computes the same in both. So the K tokens are those that are `new`:

    tokens  What does a    bee        new  x  x  x  x     index  0  1  2  3
            What does it   cost            .  .  x  x            0  1  4  5
            What is   pad  pad             .  x  .  .            0  6  .  .     (. = anything)

With dropout, most of what rows share is dropped together.

Which tokens are needed shows when a hidden state is read: trunk(tokens) is a promise (`Hidden`),
and trunk(tokens)[mask] computes what the mask asks for.

Decoding. Sampling keeps the keys and values of all earlier tokens (the cache), so that each new
token is one row of work.

install() puts all this in place, unless minippo.py has been changed in a way that it would not
follow: the plain code runs then. It compares the sources of the functions that it mirrors, comments
included, and it computes a few rows both ways: a block that mixes tokens would give other numbers.
"""

import contextlib
import functools
import inspect
import zlib

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import minippo
from minippo import evaluate_actions, gather_logprobs

# What this file computes in another way, and the checksums of the sources that it was written for.
MIRRORED = {
    minippo.Attention.attend: 1010978137,
    minippo.GPT.hidden: 3690955630,
    minippo.evaluate_actions: 950057032,
    minippo.Trunk.forward: 1741382552,
    minippo.response_mask: 1225906604,
    minippo.draw: 91013610,
    minippo.generate: 9793774,
}
PLAIN_FORWARD = minippo.Trunk.forward
OPTIONS = {"dtype": None, "recompute": False, "installed": False}  # as install() has set them


def checksum(function):
    return zlib.crc32(inspect.getsource(function).encode())


def install(dtype=None, recompute=False):
    """Let all trunks and generate() be computed as described above; plainly, and say so, if a
    mirrored function has changed. dtype: of the matrix products in the blocks, None for that of the
    weights; recompute: the backward pass computes each block a second time instead of keeping
    what it needs."""
    uninstall()
    changed = [f.__qualname__ for f, number in MIRRORED.items() if checksum(f) != number]
    if changed or not same_numbers():
        names = " and ".join(changed) or "Block"
        print(f"minippo.py has another {names} than plumbing/fast.py was written for,")
        print("so the plain code runs: slower, and without --dtype and --grad_checkpoint")
        return
    OPTIONS.update(dtype=dtype, recompute=recompute, installed=True)
    minippo.Trunk.forward = lambda trunk, tokens: Hidden(trunk, tokens)


def uninstall():
    OPTIONS.update(dtype=None, recompute=False, installed=False)
    minippo.Trunk.forward = PLAIN_FORWARD


class Hidden:
    """The hidden states of a trunk (B, T, C), computed when somebody reads them."""

    def __init__(self, trunk, tokens):
        self.trunk, self.tokens, self.mask, self.states = trunk, tokens, None, None

    def __getitem__(self, index):
        is_mask = torch.is_tensor(index) and index.dtype == torch.bool
        if not is_mask or index.shape != self.tokens.shape:
            return self.whole()[index]
        if index is not self.mask:  # two heads may read the same states
            self.mask, self.states = index, read_states(self.trunk, self.tokens, index)
        return self.states

    @functools.cached_property
    def every(self):
        return torch.ones_like(self.tokens, dtype=torch.bool)

    def whole(self):
        return self[self.every].view(*self.tokens.shape, -1)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        """What PyTorch calls when a Hidden is given to one of its functions."""

        def computed(x):
            if isinstance(x, list | tuple):
                return type(x)(map(computed, x))
            return x.whole() if isinstance(x, Hidden) else x

        kwargs = {name: computed(x) for name, x in (kwargs or {}).items()}
        return function(*map(computed, args), **kwargs)

    def __getattr__(self, name):
        return getattr(self.whole(), name)


def computed_in_full(name):
    """The operator of this name, of all hidden states: Python asks for it without __getattr__."""
    return lambda hidden, *others: getattr(hidden.whole(), name)(*others)


for name in "add radd sub rsub mul rmul truediv matmul pow neg gt ge lt le len".split():
    setattr(Hidden, f"__{name}__", computed_in_full(f"__{name}__"))


@torch.no_grad()
def same_numbers():
    """Does a small network give the same numbers packed, decoded, and plainly?"""
    with torch.random.fork_rng(devices=[]):
        config = minippo.GPTConfig(vocab_size=300, context=12, layers=2, heads=2, channels=8)
        trunk = minippo.GPT(config).eval().trunk
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6], [1, 2, 7, 8, 0, 0], [9, 8, 7, 0, 0, 0]])
    mask = torch.tensor([[0, 1, 1, 1, 0, 1], [0, 1, 1, 1, 0, 0], [0, 1, 1, 0, 0, 0]]) > 0
    hidden = PLAIN_FORWARD(trunk, tokens)  # (B, T, C)
    try:
        cache = torch.zeros(config.layers, len(tokens), 6, 2 * config.channels)
        packed = read_states(trunk, tokens[:, :3], mask[:, :3], cache)
        column = torch.full((len(tokens),), 3)
        decoded = decode(trunk, tokens[:, 3], column, cache[:, :, :4])
    except Exception:  # a block that reads what only the grid has may raise anything
        return False
    pairs = (packed, hidden[:, :3][mask[:, :3]]), (decoded, hidden[:, 3])
    pairs += ((read_states(trunk, tokens, mask), hidden[mask]),)
    return all(torch.allclose(a, b, atol=1e-4) for a, b in pairs)


class Packing:
    """Which tokens of the rows tokens (B, T) have to be computed, so that the hidden states at
    `read` (B, T) can be read."""

    def __init__(self, tokens, read):
        used = read.flip(1).cummax(1).values.flip(1)  # in each row all up to the last that is read
        T = int(used.any(0).sum())
        tokens, read, used = tokens[:, :T], read[:, :T], used[:, :T]
        self.shape = B, T = tokens.shape
        # Sorted, so that rows that begin alike are neighbours; equal rows stand there once.
        rows, row_of = torch.where(used, tokens, -1).unique(
            dim=0, return_inverse=True
        )  # (R, T), (B,)
        new = rows >= 0
        new[1:] &= (rows[1:] == rows[:-1]).cumprod(1) == 0  # from the first difference on
        number = new.flatten().cumsum(0).view(new.shape) - 1
        self.ids, self.columns = rows[new], new.nonzero()[:, 1]  # (K,) each
        self.whole = len(self.ids) > 0.9 * B * T  # too little is saved: the grid stays as it is
        if self.whole:
            self.ids = tokens.flatten()
            self.columns = torch.arange(T, device=tokens.device).repeat(B)
            self.wanted = self.read = read.flatten().nonzero().squeeze(1)
            return
        index = (new * number).cummax(0).values[row_of]  # (B, T): which of the K stands here
        place = torch.arange(B * T, device=tokens.device).view(B, T)
        self.places = torch.full_like(self.ids, B * T)  # (K,): where each of them stands first
        self.places.scatter_reduce_(0, index[used], place[used], "amin")
        self.index, self.wanted = index.flatten(), index[read]  # (B x T,), (N,)
        self.read = self.wanted.unique()  # once each, though several rows may read the same one

    def unpack(self, x):
        """(K, C) -> (B, T, C)"""
        return (x if self.whole else x.index_select(0, self.index)).view(*self.shape, -1)

    def pack(self, x):
        """(B, T, C) -> (K, C)"""
        x = x.flatten(0, 1)
        return x if self.whole else x.index_select(0, self.places)


@contextlib.contextmanager
def handed(block, attend, packing=None):
    """The block of minippo.py, for the length of a call with another attend, and with an MLP that
    leaves out what nobody reads: that of the last block need not compute the other tokens."""

    def leave_out(mlp, inputs):
        return inputs[0].index_select(0, packing.read)

    def put_back(mlp, inputs, y):
        return y.new_zeros(len(packing.ids), y.shape[1]).index_copy(0, packing.read, y)

    hooks = []
    if packing is not None:
        hooks = [block.mlp.register_forward_pre_hook(leave_out)]
        hooks += [block.mlp.register_forward_hook(put_back)]
    block.attention.attend = attend  # hides the method of the class
    try:
        yield
    finally:
        del block.attention.attend
        for hook in hooks:
            hook.remove()


def run_packed(block, x, packing, cache, last):
    """Block.forward for x (K, C); cache (B, T or more, 2C) gets the keys and values."""

    def attend(qkv):  # (K, 3C) -> (K, C)
        qkv = packing.unpack(qkv)  # (B, T, 3C)
        if cache is not None:
            cache[:, : qkv.shape[1]] = qkv[..., x.shape[1] :]
        return packing.pack(type(block.attention).attend(block.attention, qkv))

    with handed(block, attend, packing if last else None):
        return block(x)


def read_states(trunk, tokens, mask, cache=None):
    """trunk(tokens)[mask]: tokens (B, T), mask (B, T) -> (N, C)."""
    packing = Packing(tokens, mask)
    x = trunk.token_embedding(packing.ids) + trunk.position_embedding(packing.columns)
    x = trunk.dropout(x)
    with autocast(x):
        for i, block in enumerate(trunk.blocks):
            kept = None if cache is None else cache[i]
            arguments = block, x, packing, kept, block is trunk.blocks[-1]
            if OPTIONS["recompute"] and torch.is_grad_enabled():
                x = checkpoint(run_packed, *arguments, use_reentrant=False)
            else:
                x = run_packed(*arguments)
    return trunk.norm(x.index_select(0, packing.wanted))


def autocast(x):
    """Matrix products in the dtype of install(); weights and the residual stream keep theirs."""
    dtype = OPTIONS["dtype"]
    return torch.autocast(x.device.type, dtype) if dtype else contextlib.nullcontext()


def decode(trunk, token, column, cache):
    """One more token in each row and its column, (R,) each -> its hidden state, (R, C).
    cache: (layers, R, columns, 2C)."""
    x = trunk.token_embedding(token) + trunk.position_embedding(column)
    rows, C = torch.arange(len(token), device=token.device), x.shape[1]
    seen = torch.arange(cache.shape[2], device=token.device) <= column[:, None]  # (R, columns)

    def attend_to(kept, heads):
        def attend(qkv):  # (R, 3C) -> (R, C)
            q = qkv[:, :C].unflatten(-1, (heads, 1, -1))  # (R, H, 1, C/H)
            kept[rows, column] = qkv[:, C:].to(kept.dtype)
            k, v = kept.unflatten(-1, (2, heads, -1)).permute(2, 0, 3, 1, 4)  # (R, H, columns, C/H)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None])
            return y.flatten(1)

        return attend

    with autocast(x):
        for block, kept in zip(trunk.blocks, cache):
            with handed(block, attend_to(kept, block.attention.heads)):
                x = block(x)
    return trunk.norm(x)


def fast_draw(logits):
    """minippo.draw in a fifth of the time on a CPU: (B, V) -> (B,).

    Cut the interval from 0 to 1 into pieces as long as the probabilities, draw a number u, and take
    the token whose piece u falls into.
    """
    ends = logits.softmax(-1).cumsum(-1, dtype=torch.float64)  # where the pieces end
    u = torch.rand(len(logits), 1, dtype=torch.float64, device=logits.device) * ends[:, -1:]
    return torch.searchsorted(ends, u, right=True).squeeze(1).clamp(max=logits.shape[-1] - 1)


def casts_kept(function):
    """Autocast forgets the weights that it has cast when the outermost autocast ends. So put one
    that casts nothing around all. It keeps only those that may get a gradient: so here those of a
    frozen model may, too. (No gradient is computed.)"""

    @functools.wraps(function)
    def wrapped(policy, *args, **kwargs):
        kind, dtype = policy.lm_head.weight.device.type, OPTIONS["dtype"]
        if not dtype:
            return function(policy, *args, **kwargs)
        frozen = [weight for weight in policy.parameters() if not weight.requires_grad]
        try:
            for weight in frozen:
                weight.requires_grad_(True)
            with torch.autocast(kind, dtype, enabled=False):
                return function(policy, *args, **kwargs)
        finally:
            for weight in frozen:
                weight.requires_grad_(False)

    return wrapped


@torch.no_grad()
@casts_kept
def generate(policy, prompts, max_new_tokens, temperature=1.0, draw=None):
    """minippo.generate with a cache: the prompts are read in one go, then each row writes at its
    own column. Without install(), minippo.generate itself."""
    if not OPTIONS["installed"]:
        return minippo.generate(policy, prompts, max_new_tokens, temperature, draw or minippo.draw)
    context, device = policy.config.context, policy.lm_head.weight.device
    if not all(0 < len(prompt) < context for prompt in prompts):
        raise ValueError(f"a prompt should have 1 to {context - 1} tokens, the context less one")
    longest = max(map(len, prompts))
    steps = min(max_new_tokens, context - min(map(len, prompts)))
    T = min(longest + steps, context)
    tokens = torch.tensor([ids + [0] * (T + 1 - len(ids)) for ids in prompts], device=device)
    # `column`: where a row writes next
    lengths = column = torch.tensor([len(ids) for ids in prompts], device=device)
    rows = torch.arange(len(prompts), device=device)  # the R rows in work
    last = torch.arange(longest, device=device) == lengths[:, None] - 1
    size = len(policy.trunk.blocks), len(prompts), T, 2 * policy.config.channels
    dtype = OPTIONS["dtype"] or policy.lm_head.weight.dtype
    cache = torch.zeros(size, device=device, dtype=dtype)  # keys and values so far
    hidden = read_states(policy.trunk, tokens[:, :longest], last, cache)  # (R, C)
    mask, ended = (
        torch.zeros_like(tokens, dtype=torch.bool),
        torch.zeros_like(rows, dtype=torch.bool),
    )
    logprobs, values = hidden.new_zeros(2, *tokens.shape)
    for step in range(steps):
        logits = policy.lm_head(hidden) / temperature  # (R, V)
        token = (draw or fast_draw)(logits)  # (R,)
        # Everything is stored at the column of the token; column T is a bin for ended rows.
        at = rows, torch.where(ended, T, column)
        tokens[at], mask[at], logprobs[at] = token, True, gather_logprobs(logits, token)
        values[at] = policy.value_head(hidden).squeeze(-1)
        ended = ended | (token == policy.config.eos) | (column + 1 == context)
        left = len(rows) - int(ended.sum())
        if not left or step + 1 == steps:
            break
        if 2 * left < len(rows):  # to drop rows is to copy the cache: not for a few
            on = ~ended
            rows, token, column, ended = rows[on], token[on], column[on], ended[on]
            cache = cache[:, on]
        hidden = decode(policy.trunk, token, column, cache[:, :, : longest + step + 1])
        column = torch.where(ended, column, column + 1)
    T = int(mask[:, :T].any(0).nonzero().max()) + 1  # cut what no response has reached
    tokens, mask, logprobs, values = tokens[:, :T], mask[:, 1:T], logprobs[:, 1:T], values[:, 1:T]
    if policy.critic is not None:  # a separate critic has no cache: it reads the finished rows
        values = evaluate_actions(policy, tokens, mask, with_entropy=False)[1]
    return tokens, mask, logprobs, values
