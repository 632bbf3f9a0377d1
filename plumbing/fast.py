"""minippo's networks, computed with less work: the same numbers, to rounding, and nothing to learn about RLHF.

Packing. Rows of a batch differ in length, and they often begin alike: two answers to one prompt, two questions that open with the
same words. As far as rows are alike from their first token on, a causal network computes the same in both. So the trunk keeps a
list of K tokens, those that are `new`, and attention alone lays them out in the grid (B, T):

    tokens  What does a    bee        new  x  x  x  x     index  0  1  2  3
            What does it   cost            .  .  x  x            0  1  4  5
            What is   pad  pad             .  x  .  .            0  6  .  .     (. = anything)

With dropout, most of what rows share is dropped together.

Decoding. Sampling keeps the keys and values of all tokens before (the cache), so that each new token is one row of work.

install() makes minippo's Trunk compute so; generate() takes the place of minippo.generate.
"""

import contextlib
import functools

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import minippo
from minippo import Trunk, evaluate_actions, gather_logprobs


class Packing:
    """Which tokens of the rows tokens (B, T) have to be computed, so that the hidden states at `read` (B, T) can be read."""

    def __init__(self, tokens, read):
        self.shape = B, T = tokens.shape
        used = read.flip(1).cummax(1).values.flip(1)  # in each row all tokens up to the last that is read
        # Sorted, so that rows that begin alike are neighbours; a row that comes twice stands there once.
        rows, row_of = torch.where(used, tokens, -1).unique(dim=0, return_inverse=True)  # (R, T), (B,)
        new = rows >= 0
        new[1:] &= (rows[1:] == rows[:-1]).cumprod(1) == 0  # from the first difference on
        number = new.flatten().cumsum(0).view(new.shape) - 1
        self.ids, self.columns = rows[new], new.nonzero()[:, 1]  # (K,) each
        self.whole = len(self.ids) > 0.9 * B * T  # too little is saved: the tokens stay in the grid as it is
        if self.whole:
            self.ids, self.columns = tokens.flatten(), torch.arange(T, device=tokens.device).repeat(B)
            self.wanted = read.flatten().nonzero().squeeze(1)
            return
        index = (new * number).cummax(0).values[row_of]  # (B, T): which of the K stands here
        place = torch.arange(B * T, device=tokens.device).view(B, T)
        self.places = torch.full_like(self.ids, B * T)  # (K,): where each of them stands first
        self.places.scatter_reduce_(0, index[used], place[used], "amin")
        self.index, self.wanted = index.flatten(), index[read]  # (B x T,), (N,)

    def unpack(self, x):
        """(K, C) -> (B, T, C)"""
        return (x if self.whole else x.index_select(0, self.index)).view(*self.shape, -1)

    def pack(self, x):
        """(B, T, C) -> (K, C)"""
        x = x.flatten(0, 1)
        return x if self.whole else x.index_select(0, self.places)


def block_forward(block, x, packing, cache, last):
    """Block.forward for x (K, C); cache (B, T or more, 2C) gets the keys and values. After the last block only the N tokens that
    are read go on, so its MLP computes no others."""
    qkv = packing.unpack(block.attention.qkv(block.norm1(x)))
    if cache is not None:
        cache[:, : qkv.shape[1]] = qkv[..., x.shape[1] :]
    x = x + block.dropout(block.attention.out(packing.pack(block.attention.attend(qkv))))
    x = x.index_select(0, packing.wanted) if last else x
    return x + block.dropout(block.mlp(block.norm2(x)))


def forward(trunk, tokens, read=None, cache=None, *, dtype=None, recompute=False):
    """Trunk.forward; the hidden states that nobody reads are 0. dtype: of the matrix products in the blocks; recompute: the
    backward pass computes each block again instead of keeping what it needs."""
    read = torch.ones_like(tokens, dtype=torch.bool) if read is None else read
    packing = Packing(tokens, read)
    x = trunk.dropout(trunk.token_embedding(packing.ids) + trunk.position_embedding(packing.columns))
    with autocast(x, dtype):
        for i, block in enumerate(trunk.blocks):
            arguments = block, x, packing, None if cache is None else cache[i], block is trunk.blocks[-1]
            again = recompute and torch.is_grad_enabled()
            x = checkpoint(block_forward, *arguments, use_reentrant=False) if again else block_forward(*arguments)
    x = trunk.norm(x)  # (N, C)
    grid = x.new_zeros(tokens.numel(), x.shape[1]).index_copy(0, read.flatten().nonzero().squeeze(1), x)
    return grid.view(*tokens.shape, -1)


def autocast(x, dtype):
    """Matrix products in `dtype`; weights and the residual stream keep theirs. None: as it is."""
    return torch.autocast(x.device.type, dtype) if dtype else contextlib.nullcontext()


def decode(trunk, token, column, cache, dtype=None):
    """One more token in each row and its column, (R,) each -> its hidden state, (R, C). cache: (layers, R, columns, 2C)."""
    x, rows = trunk.token_embedding(token) + trunk.position_embedding(column), torch.arange(len(token), device=token.device)
    seen = torch.arange(cache.shape[2], device=token.device) <= column[:, None]  # (R, columns)
    with autocast(x, dtype):
        for block, kept in zip(trunk.blocks, cache):
            heads = block.attention.heads
            qkv = block.attention.qkv(block.norm1(x))
            q = qkv[:, : x.shape[1]].unflatten(-1, (heads, 1, -1))  # (R, H, 1, C/H)
            kept[rows, column] = qkv[:, x.shape[1] :].to(kept.dtype)
            k, v = kept.unflatten(-1, (2, heads, -1)).permute(2, 0, 3, 1, 4)  # (R, H, columns, C/H) each
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None])
            x = x + block.attention.out(y.flatten(1))
            x = x + block.mlp(block.norm2(x))
    return trunk.norm(x)


def casts_kept(function):
    """Autocast forgets the weights that it has cast when the outermost autocast ends. So put one that casts nothing around all.
    (It keeps those of models in training only: of a frozen one it casts each weight for each token.)"""

    @functools.wraps(function)
    def wrapped(policy, *args, **kwargs):
        kind, dtype = policy.lm_head.weight.device.type, HOW["dtype"]
        with torch.autocast(kind, dtype, enabled=False) if dtype else contextlib.nullcontext():
            return function(policy, *args, **kwargs)

    return wrapped


@torch.no_grad()
@casts_kept
def generate(policy, prompts, max_new_tokens, temperature=1.0, draw=minippo.draw):
    """minippo.generate, with a cache: the prompts are read in one go, then each row writes at its own column."""
    context, device = policy.config.context, policy.lm_head.weight.device
    if not all(0 < len(prompt) < context for prompt in prompts):
        raise ValueError(f"a prompt should have 1 to {context - 1} tokens, the context less one")
    longest, steps = max(map(len, prompts)), min(max_new_tokens, context - min(map(len, prompts)))
    T = min(longest + steps, context)
    tokens = torch.tensor([ids + [0] * (T + 1 - len(ids)) for ids in prompts], device=device)
    lengths = column = torch.tensor([len(ids) for ids in prompts], device=device)  # the column that a row writes next
    rows = torch.arange(len(prompts), device=device)  # the R rows in work
    last = torch.arange(longest, device=device) == lengths[:, None] - 1
    size = len(policy.trunk.blocks), len(prompts), T, 2 * policy.config.channels
    cache = torch.zeros(size, device=device, dtype=HOW["dtype"] or policy.lm_head.weight.dtype)  # keys and values so far
    hidden = forward(policy.trunk, tokens[:, :longest], last, cache, **HOW)[last]  # (R, C)
    mask, ended = torch.zeros_like(tokens, dtype=torch.bool), torch.zeros_like(rows, dtype=torch.bool)
    logprobs, values = hidden.new_zeros(2, *tokens.shape)
    for step in range(steps):
        logits = policy.lm_head(hidden) / temperature  # (R, V)
        token = draw(logits)  # (R,)
        # Everything is stored at the column of the token; column T is a bin for what ended rows go on drawing.
        at = rows, torch.where(ended, T, column)
        tokens[at], mask[at], logprobs[at] = token, True, gather_logprobs(logits, token)
        values[at] = policy.value_head(hidden).squeeze(-1)
        ended = ended | (token == policy.config.eos) | (column + 1 == context)
        if ended.all() or step + 1 == steps:
            break
        if 2 * ended.sum() > len(rows):  # to drop rows is to copy the cache: not for a few
            on = ~ended
            rows, token, column, ended, cache = rows[on], token[on], column[on], ended[on], cache[:, on]
        hidden = decode(policy.trunk, token, column, cache[:, :, : longest + step + 1], HOW["dtype"])
        column = torch.where(ended, column, column + 1)
    T = int(mask[:, :T].any(0).nonzero().max()) + 1  # cut what no response has reached
    tokens, mask, logprobs, values = tokens[:, :T], mask[:, 1:T], logprobs[:, 1:T], values[:, 1:T]
    if policy.critic is not None:  # a network of its own has no cache: it reads the finished rows
        values = evaluate_actions(policy, tokens, mask, with_entropy=False)[1]
    return tokens, mask, logprobs, values


PLAIN, HOW = Trunk.forward, {"dtype": None, "recompute": False}


def install(dtype=None, recompute=False):
    """Let all trunks be computed by forward() above, and generate() decode in the same type."""
    HOW.update(dtype=dtype, recompute=recompute)
    Trunk.forward = functools.partialmethod(forward, **HOW)


def uninstall():
    HOW.update(dtype=None, recompute=False)
    Trunk.forward = PLAIN
