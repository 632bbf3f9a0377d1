"""The same hidden states without computing padding, or what is read by nobody, or anything twice.

In a transformer everything but attention acts on each token by itself. So the blocks of minippo.py
can run on a list of tokens (K, C) in place of the grid (B, T, C). Only attention needs the grid.
Rows of a batch differ in length, and they often begin alike: two answers to one prompt, two
questions that open with the same words. As far as rows are alike from their first token on, a
causal network computes the same in both. So the K tokens are those that are new:

    tokens  What does a    bee        new  x  x  x  x     index  0  1  2  3
            What does it   cost            .  .  x  x            0  1  4  5
            What is   pad  pad             .  x  .  .            0  6  .  .     (. = anything)

With dropout, most of what rows share is dropped together.
"""

import contextlib

import torch
from torch.utils.checkpoint import checkpoint

from minippo import Attention, Trunk


class Packing:
    """Which tokens of the rows tokens (B, T) have to be computed, so that the hidden states where
    read (B, T) is true can be read."""

    def __init__(self, tokens, read):
        used = read.flip(1).cummax(1).values.flip(1)  # in each row all up to the last that is read
        T = int(used.any(0).sum())
        tokens, read, used = tokens[:, :T], read[:, :T], used[:, :T]
        self.shape = B, T = tokens.shape
        # Sorted, so that rows that begin alike are neighbours; equal rows stand there once.
        rows, row_of = torch.where(used, tokens, -1).unique(dim=0, return_inverse=True)
        new = rows >= 0  # (R, T)
        new[1:] &= (rows[1:] == rows[:-1]).cumprod(1) == 0  # from the first difference on
        number = new.flatten().cumsum(0).view(new.shape) - 1
        self.tokens, self.columns = rows[new], new.nonzero()[:, 1]  # (K,) each
        index = (new * number).cummax(0).values[row_of]  # (B, T): which of the K stands here
        place = torch.arange(B * T, device=tokens.device).view(B, T)
        self.places = torch.full_like(self.tokens, B * T)  # (K,): where each of them stands first
        self.places.scatter_reduce_(0, index[used], place[used], "amin")
        self.index, self.read = index.flatten(), index[read]  # (B * T,), (N,)

    def unpack(self, x):
        """(K, C) -> (B, T, C)"""
        return x.index_select(0, self.index).view(*self.shape, -1)

    def pack(self, x):
        """(B, T, C) -> (K, C)"""
        return x.flatten(0, 1).index_select(0, self.places)


class PackedAttention(Attention):
    def attend(self, qkv, cache=None):
        """qkv (K, 3C) -> (K, C), if a Packing comes where minippo.py hands on a cache."""
        if isinstance(cache, Packing):
            return cache.pack(super().attend(cache.unpack(qkv)))
        return super().attend(qkv, cache)


class PackedTrunk(Trunk):
    def forward(self, tokens, read=None, cache=None):
        with self.autocast():
            if cache is not None:
                return super().forward(tokens, read, cache)
            everywhere = torch.ones_like(tokens, dtype=torch.bool)
            packing = Packing(tokens, everywhere if read is None else read)
            x = self.token_embedding(packing.tokens) + self.position_embedding(packing.columns)
            x = self.dropout(x)
            for block in self.blocks:
                if self.grad_checkpoint and torch.is_grad_enabled():
                    x = checkpoint(block, x, packing, use_reentrant=False)
                else:
                    x = block(x, packing)
            x = self.norm(x.index_select(0, packing.read))
        return x.view(*tokens.shape, -1) if read is None else x

    def autocast(self):
        """Matrix products in bfloat16, if they are to be; weights and x stay in float32."""
        kind, half = self.norm.weight.device.type, self.dtype == "bfloat16"
        return torch.autocast(kind, torch.bfloat16) if half else contextlib.nullcontext()


def packed(model, dtype="float32", grad_checkpoint=False):
    """The model, whose trunks leave out padding from now on. If that gives other numbers than
    minippo.py, because somebody has changed that file, say so and leave the model as it is.

    dtype: of the matrix products in the blocks. grad_checkpoint: the backward pass computes each
    block a second time, in place of keeping what it needs.
    """
    trunks = [module for module in model.modules() if isinstance(module, Trunk)]
    for trunk in trunks:
        trunk.dtype, trunk.grad_checkpoint = "float32", grad_checkpoint
        set_class(trunk, PackedTrunk, PackedAttention)
    if not all(map(same_numbers, trunks)):
        print("minippo.py has been changed so that plumbing/packing.py no longer follows it:")
        print("the plain code runs, slower, and without --dtype and --grad_checkpoint")
        for trunk in trunks:
            set_class(trunk, Trunk, Attention)
    for trunk in trunks:
        trunk.dtype = dtype
    return model


def set_class(trunk, trunk_class, attention_class):
    trunk.__class__ = trunk_class
    for block in trunk.blocks:
        block.attention.__class__ = attention_class


@torch.no_grad()
def same_numbers(trunk):
    """Are the hidden states of some short rows those of minippo.py?"""
    training, device = trunk.training, trunk.norm.weight.device
    tokens = [[1, 2, 3, 4, 5, 6], [1, 2, 7, 8, 0, 0], [9, 8, 7, 0, 0, 0]]
    read = [[0, 1, 1, 1, 0, 1], [0, 1, 1, 1, 0, 0], [0, 1, 1, 0, 0, 0]]
    tokens, read = torch.tensor(tokens, device=device), torch.tensor(read, device=device) > 0
    trunk.eval()
    plain = Trunk.forward(trunk, tokens)[read]
    try:
        hidden = trunk(tokens, read)
    except Exception:  # a block that needs the grid may raise anything
        return False
    finally:
        trunk.train(training)
    return torch.allclose(hidden, plain, rtol=0.01, atol=0.01)  # TF32 rounds to 1e-3
