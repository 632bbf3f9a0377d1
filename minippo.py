"""minippo: RLHF with PPO, from scratch, in one file. Read it from top to bottom.

Three stages turn a language model that merely imitates into one that does what people prefer:

    train_sft.py   supervised fine-tuning (SFT): imitate demonstrations                       -> out/sft.pt
    train_rm.py    reward model: learn from pairs of answers which of the two people prefer   -> out/rm.pt
    train_ppo.py   PPO: raise the reward model's score, but stay close to the SFT model       -> out/ppo.pt

What the third stage maximises, for prompts x, responses y drawn from the policy pi, and reward model r, is

    J(pi) = E[ r(x, y) ] - beta * KL(pi || ref)          (InstructGPT, arXiv:2203.02155, eq. 2 without its last term)

The policy is the language model, seen as a rule for choosing the next token. The reference, ref, is a frozen copy of the
SFT model. KL(pi || ref) = E[log pi(y | x) - log ref(y | x)] says how far the policy has strayed, in nats (the unit of
natural logarithms); beta is the price of a nat. Four networks take part: the policy (trained), a value function (trained,
by default a second head on the policy), the reward model (frozen) and the reference (frozen).

Shapes: B rows of a batch, T positions, C channels, H heads, V vocabulary, N tokens of a whole batch one after
another: those of its responses, or those that have to be worked out.

One convention holds everywhere. A row is prompt, response, padding; it starts at column 0, so that causal attention
never sees the padding and no attention mask is needed. Choosing token t + 1 is the action taken in the state "tokens
0 .. t have been read", and everything about it stands at index t. With a prompt of two tokens, a response of two
tokens and the end-of-text token, and one column of padding:

    column           0      1      2      3      4      5
    tokens           What   ?      A      bee    <eot>  pad        (B, T)
    index t          0      1      2      3      4                 (B, T-1)
    action           ?      A      bee    <eot>  pad               tokens[:, t + 1]
    mask             .      x      x      x      .                 is the action part of the response?
    logprobs         0      l1     l2     l3     0                 log pi(action | tokens 0 .. t)
    values           0      v1     v2     v3     0                 expected reward from here on, before the action
    rewards          0      r1     r2     r3     0                 the reward model's score is paid inside r3
"""

import dataclasses
import gzip
import json
import math
import os
import zlib
from collections import Counter, defaultdict
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import regex  # comes with tiktoken
import tiktoken
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

inf = float("inf")


class UserError(ValueError):
    """Something the user can put right. The scripts print it on one line and exit with status 2."""


def option(default, help, low=-inf, high=inf):
    """A field of a settings class that is a command-line flag too: default, help, and the range that it must lie in."""
    return dataclasses.field(default=default, metadata={"help": help, "low": low, "high": high})


# ----------------------------------------------------------------------------------------------------------------------
# 1. Text: from JSON lines to token ids
#
# Byte-pair encoding (BPE; Sennrich et al., arXiv:1508.07909, on bytes as in GPT-2) learns a vocabulary from the data at hand:
# start from the 256 single bytes; again and again make the most frequent pair of neighbours one new token.

# How GPT-2 cuts text into words before any merging; no token ever spans two of these pieces.
SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def merge(parts, new):
    """Join each pair of neighbours that spells `new`, from left to right: merge([a, b, c], ab) -> [ab, c]."""
    merged = []
    for part in parts:
        if merged and merged[-1] + part == new:
            merged[-1] = new
        else:
            merged.append(part)
    return merged


class Tokenizer:
    """Text to token ids and back. `tokens` holds the bytes of each token in the order of the ids.

    One more id follows, `eot`: end-of-text, which ends every response. It is special: `encode` never produces it,
    whatever the text says, so that nothing a user types can end a document.
    """

    def __init__(self, tokens):
        self.tokens, self.eot, self.vocab_size = tokens, len(tokens), len(tokens) + 1
        ranks = {token: rank for rank, token in enumerate(tokens)}
        self.bpe = tiktoken.Encoding("minippo", pat_str=SPLIT, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": self.eot})

    def encode(self, text):
        return self.bpe.encode_ordinary(text)

    def decode(self, ids):
        return self.bpe.decode([i for i in ids if i != self.eot])

    @classmethod
    def train(cls, texts, vocab_size):
        """Learn a vocabulary of at most `vocab_size` ids, fewer when the texts have no pair left that occurs twice."""
        words = Counter(piece for text in texts for piece in regex.findall(SPLIT, text))
        parts = {word: [bytes([b]) for b in word.encode(errors="replace")] for word in words}
        pairs, where = Counter(), defaultdict(set)  # bytes of two neighbours joined: how often, and in which words

        def count(word, sign):
            for a, b in zip(parts[word], parts[word][1:]):
                pairs[a + b] += sign * words[word]
                where[a + b].add(word)

        for word in words:
            count(word, +1)
        tokens = [bytes([b]) for b in range(256)]
        while pairs and len(tokens) + 1 < vocab_size:
            new = max(pairs, key=lambda pair: (pairs[pair], pair))  # the second entry makes ties the same on every machine
            if pairs[new] < 2:
                break
            tokens.append(new)
            for word in where.pop(new):  # only the words that hold the pair change: this makes training take seconds
                count(word, -1)
                parts[word] = merge(parts[word], new)
                count(word, +1)
            del pairs[new]
        return cls(tokens)


def load_jsonl(path, keys):
    """Read a JSON-lines file, gzipped or not; a tuple of strings per row, in the order of `keys`. Other keys are ignored.

    Blank lines, CRLF line ends and a byte-order mark are fine. Anything else that is not a row raises UserError with
    the file, the line, the key and what was found.
    """
    wanted = f"it should hold one JSON object a line with {', '.join(keys)}"
    try:
        data = Path(path).read_bytes()
        lines = (gzip.decompress(data) if str(path).endswith(".gz") else data).split(b"\n")
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}); {wanted}")
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            text = line.decode("utf-8-sig").strip()
            row = json.loads(text) if text else None
        except UnicodeDecodeError as error:
            raise UserError(f"{path}, line {number}: not UTF-8 ({error.reason} at byte {error.start}); save the file as UTF-8")
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}, line {number}: not JSON ({error}); {wanted}")
        if not text:
            continue
        if not isinstance(row, dict):
            raise UserError(f"{path}, line {number}: found {type(row).__name__}; {wanted}")
        for key in keys:
            if key not in row:
                hint = "; data/hh_rlhf.py cuts whole transcripts into prompt and replies" * (row.keys() >= {"chosen", "rejected"})
                hint = hint or "; write the messages of a chat out as one text" * ("messages" in row)
                found = ", ".join(map(repr, row)) or "no key at all"
                raise UserError(f"{path}, line {number}: no key {key!r}; found {found}{hint}")
            if not isinstance(row[key], str):
                hint = "; write the messages of a chat out as one text" * isinstance(row[key], list)
                found = json.dumps(row[key])[:40]
                raise UserError(f"{path}, line {number}: the value of {key!r} should be a string, found {found}{hint}")
        rows.append(tuple(row[key] for key in keys))
    if not rows:
        raise UserError(f"{path}: no rows; {wanted}")
    return rows


def pad(sequences, device="cpu"):
    """Lists of ids -> tokens (B, T), every row from column 0 and padded on the right, and lengths (B,)."""
    lengths = [len(ids) for ids in sequences]
    tokens = torch.tensor([ids + [0] * (max(lengths) - len(ids)) for ids in sequences])
    return tokens.to(device), torch.tensor(lengths, device=device)


def by_length(function, sequences, size, device="cpu", together=1):
    """function(row numbers, tokens, lengths) -> (rows, ...), called on pieces of `size` sequences; results in their order.

    The pieces hold rows of similar length, which need little padding, sorted so that rows that begin alike are neighbours
    (section 2 says why). The row numbers tell the function which sequences it has before it. Each run of `together` consecutive
    sequences (a chosen and a rejected answer, say) stays in one piece; `size` is a multiple of it.
    """
    groups = [range(i, i + together) for i in range(0, len(sequences), together)]
    groups.sort(key=lambda group: max(len(sequences[i]) for i in group))
    order = [i for group in groups for i in group]
    pieces = [sorted(order[i : i + size], key=sequences.__getitem__) for i in range(0, len(order), size)]
    results = [function(rows, *pad([sequences[i] for i in rows], device)) for rows in pieces]
    return torch.cat(results)[torch.tensor(sum(pieces, [])).argsort()]


def response_mask(prompt_lengths, lengths, columns):
    """(B,), (B,), T -> (B, T-1): true at t where token t + 1 belongs to the response, its end token included."""
    action = torch.arange(1, columns, device=lengths.device)
    return (action >= prompt_lengths[:, None]) & (action < lengths[:, None])


# ----------------------------------------------------------------------------------------------------------------------
# 2. The networks
#
# A GPT-2 (Radford et al. 2019): learned positions, pre-norm blocks, GELU, a vocabulary head that shares its weights with
# the token embedding. The policy adds a value head, one number per position; the reward model has a score head instead.
#
# Rows of a batch differ in length, and they often begin alike: two answers to one prompt, two questions that open with the same
# words. Where rows are alike from their first token on, so is all that a causal network computes. A trunk that is told which
# positions will be read therefore keeps the tokens of a batch as one list of N, without padding, and without the beginning that
# a row shares with the row above it (so rows should come sorted). Attention alone lays them out in rows.


@dataclass
class GPTConfig:
    vocab_size: int = option(1024, "tokens in the vocabulary; the last one is end-of-text", 257, 1_000_000)
    context: int = option(128, "longest prompt and response together, in tokens", 8)
    layers: int = option(4, "transformer blocks", 1)
    heads: int = option(4, "attention heads", 1)
    channels: int = option(96, "width of the model; a multiple of heads", 1)
    dropout: float = option(0.0, "share of activations dropped in training; never in PPO", 0, 0.9)  # in a shared beginning: once
    separate_critic: bool = False  # a value network of its own instead of a second head on the policy

    def __post_init__(self):
        if self.channels % self.heads:
            raise UserError(f"channels ({self.channels}) must be a multiple of heads ({self.heads})")

    @property
    def eot(self):
        return self.vocab_size - 1


def distinct(tokens, used):
    """What has to be worked out: the places that are used, less the beginning that a row shares with the row above it.

    tokens, used (B, T); used is true up to some column of each row and false from there on. Returns first (N,), the place
    b * T + t at which each of the N tokens to work out stands first, and spread (B, T), which of the N stands at each place:

        tokens  What does a    bee        new  x  x  x  x     first  0 1 2 3     spread  0  1  2  3
                What does it   cost            .  .  x  x            6 7                 0  1  4  5
                What is   pad  pad             .  x  .  .            9                   0  6  -  -      (anything)
    """
    repeats = torch.zeros_like(used)
    repeats[1:] = ((tokens[1:] == tokens[:-1]) & used[:-1]).cumprod(1)  # up to the first difference
    new = used & ~repeats
    number = new.flatten().cumsum(0).view(new.shape) - 1
    return new.flatten().nonzero().squeeze(1), (new * number).cummax(0).values  # down a column, the last new one counts


class Attention(nn.Module):
    """Causal self-attention of several heads: every position reads from itself and from those before it. (N, C) -> (N, C)

    positions (B, T): the column of each token. first, spread: as in distinct(), None where N = B x T. For sampling (section 4)
    there are the cache, and visible (B, 1, T, columns): which columns of the cache a token may look at.
    """

    def __init__(self, config):
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.qkv = nn.Linear(config.channels, 3 * config.channels)
        self.out = nn.Linear(config.channels, config.channels)

    def forward(self, x, positions, first=None, spread=None, cache=None, visible=None):
        (B, T), C = positions.shape, x.shape[-1]
        qkv = self.qkv(x)  # (N, 3C)
        qkv = qkv if spread is None else qkv.index_select(0, spread.flatten())  # (B x T, 3C)
        q, k, v = qkv.view(B, T, 3, self.heads, C // self.heads).unbind(2)  # (B, T, H, C/H) each
        if cache is not None:  # decoding: keep k and v at their columns, attend to all columns kept so far
            rows = torch.arange(B, device=x.device)[:, None]
            for kept, new in zip(cache, (k, v)):
                kept[rows, positions] = new
            k, v = cache  # (B, columns, H, C/H)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
            attn_mask=visible, is_causal=visible is None, dropout_p=self.dropout if self.training else 0.0,
        )  # (B, H, T, C/H)
        y = y.transpose(1, 2).reshape(B * T, C)
        return self.out(y if first is None else y.index_select(0, first))  # (N, C)


class Block(nn.Module):
    """x + attention, then x + MLP, each reading a normalised x (pre-norm): (N, C) -> (N, C), or only those `wanted`."""

    def __init__(self, config):
        super().__init__()
        C = config.channels
        self.norm1, self.attention = nn.LayerNorm(C), Attention(config)
        self.norm2, self.mlp = nn.LayerNorm(C), nn.Sequential(nn.Linear(C, 4 * C), nn.GELU("tanh"), nn.Linear(4 * C, C))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, wanted, **where):
        x = x + self.dropout(self.attention(self.norm1(x), **where))
        x = x if wanted is None else x.index_select(0, wanted)  # attention was the last to need the rest: spare it the MLP
        return x + self.dropout(self.mlp(self.norm2(x)))


class Trunk(nn.Module):
    """tokens (B, T) -> hidden states (B, T, C): the body that the heads of all four networks stand on.

    How to compute is a matter of the machine and the same for all trunks of a run. `autocast`: a type that matrix products
    are done in (the weights, the residual stream and the heads keep theirs). `checkpointing`: recompute each block in the
    backward pass instead of keeping what it computed.
    """

    autocast, checkpointing = None, False

    def __init__(self, config):
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.channels)
        self.positions = nn.Embedding(config.context, config.channels)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.channels)
        std = 0.02 * math.sqrt(768 / config.channels)  # GPT-2's 0.02, carried over to other widths
        for name, parameter in self.named_parameters():
            if name.endswith(("out.weight", "mlp.2.weight")):  # less, where 2 x layers branches add up
                nn.init.normal_(parameter, std=std / math.sqrt(2 * config.layers))
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens, read=None, cache=None, positions=None):
        """With `read` (B, T), only the hidden states where it is true, row after row: (number of those, C).

        With a cache, `positions` (B, T) says at which column each token stands; without, 0, 1, 2, ...
        """
        visible = first = spread = wanted = None
        if cache is None:
            positions, cache = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens), [None] * len(self.blocks)
        else:  # each row has its own length: it sees the columns up to its own position, whatever lies beyond
            visible = torch.arange(cache[0].shape[2], device=tokens.device) <= positions[:, None, :, None]  # (B, 1, T, columns)
        ids, columns = tokens.flatten(), positions.flatten()
        if read is not None:
            used = read.flip(1).cumsum(1).flip(1) > 0  # in each row, all up to the last that is read; then there is padding
            first, spread = distinct(tokens, used)
            ids, columns, wanted = ids[first], columns[first], spread[read]
        x = self.dropout(self.tokens(ids) + self.positions(columns))  # (N, C)
        where = {"positions": positions, "first": first, "spread": spread, "visible": visible}
        with torch.autocast(x.device.type, self.autocast, enabled=self.autocast is not None):
            for block, kept in zip(self.blocks, cache):
                last = wanted if block is self.blocks[-1] else None
                if self.checkpointing and torch.is_grad_enabled():
                    x = checkpoint(block, x, last, use_reentrant=False, **where)
                else:
                    x = block(x, last, cache=kept, **where)
        x = self.norm(x)
        return x if read is not None else x.view(*tokens.shape, -1)

    def new_cache(self, rows, columns):
        """Keys and values of each layer, (2, rows, columns, H, C/H): filled while decoding, so that nothing is read twice."""
        weight, heads = self.tokens.weight, self.blocks[0].attention.heads
        shape = (2, rows, columns, heads, weight.shape[1] // heads)
        return [torch.zeros(shape, dtype=self.autocast or weight.dtype, device=weight.device) for _ in self.blocks]


class GPT(nn.Module):
    """The policy: a trunk with a vocabulary head (which token next?) and a value head (how much reward to come?)."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.trunk = Trunk(config)
        self.critic = Trunk(config) if config.separate_critic else None
        self.lm_head = nn.Linear(config.channels, config.vocab_size, bias=False)
        self.lm_head.weight = self.trunk.tokens.weight
        self.value_head = nn.Linear(config.channels, 1)
        nn.init.zeros_(self.value_head.weight)  # values start at 0: no opinion, rather than a random one
        nn.init.zeros_(self.value_head.bias)

    def hidden(self, tokens, read=None):
        """tokens (B, T) -> what the vocabulary head reads and what the value head reads, (B, T, C) or (N, C) each."""
        hidden = self.trunk(tokens, read)
        return hidden, hidden if self.critic is None else self.critic(tokens, read)

    def forward(self, tokens):
        """tokens (B, T) -> logits (B, T, V) and values (B, T); both at t belong to the choice of token t + 1."""
        hidden, value_hidden = self.hidden(tokens)
        return self.lm_head(hidden), self.value_head(value_hidden).squeeze(-1)

    def with_critic(self, reward_model):
        """A copy whose values come from a network of its own, which starts as the reward model (as in InstructGPT)."""
        policy = GPT(dataclasses.replace(self.config, separate_critic=True)).to(self.lm_head.weight)
        policy.load_state_dict(self.state_dict(), strict=False)
        policy.critic.load_state_dict(reward_model.trunk.state_dict())
        head, std = reward_model.score_head, reward_model.std
        with torch.no_grad():  # value = normalised score = (raw - mean) / std
            policy.value_head.weight.copy_(head.weight / std)
            policy.value_head.bias.copy_((head.bias - reward_model.mean) / std)
        return policy


class RewardModel(nn.Module):
    """Scores a whole row, prompt and response, with one number: how much people would like it.

    Made from a GPT it starts with a copy of that trunk. Only differences of raw scores have a meaning: the log-odds that
    people prefer one answer to the other (section 5). `mean` and `std`, set after training, put them on a scale that is the
    same for every reward model.
    """

    def __init__(self, config_or_gpt):
        super().__init__()
        gpt = config_or_gpt if isinstance(config_or_gpt, GPT) else None
        self.config = gpt.config if gpt else config_or_gpt
        self.trunk = deepcopy(gpt.trunk) if gpt else Trunk(self.config)
        self.score_head = nn.Linear(self.config.channels, 1)
        nn.init.normal_(self.score_head.weight, std=1 / math.sqrt(self.config.channels + 1))
        nn.init.zeros_(self.score_head.bias)
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("std", torch.ones(()))

    def raw_scores(self, tokens, lengths):
        """tokens (B, T), lengths (B,) -> (B,), read at the last token of each row, the only one that has seen it all."""
        last = torch.arange(tokens.shape[1], device=tokens.device) == lengths[:, None] - 1  # (B, T), once true in each row
        return self.score_head(self.trunk(tokens, last)).squeeze(-1)

    def forward(self, tokens, lengths):
        """The same, normalised: 0 for an average answer of the SFT model, 1 for one standard deviation above it."""
        return (self.raw_scores(tokens, lengths) - self.mean) / self.std


def frozen_copy(model):
    """A copy that is never trained and drops nothing: the reference, or a reward model in use."""
    import copy  # here, so that the function works when pasted elsewhere

    frozen = copy.deepcopy(model).eval()
    return frozen.requires_grad_(False)


# ----------------------------------------------------------------------------------------------------------------------
# 3. Log-probabilities, and averages over responses
#
# Sums and means run over the response tokens alone: x[mask] picks them, so that padding and prompts, whatever they hold,
# cannot reach a loss, a gradient or a metric. Most functions from here to section 6 take plain tensors and numbers, and work
# when pasted elsewhere after `import torch`.


def gather_logprobs(logits, targets, temperature=1.0):
    """log softmax(logits / temperature) at the targets: (..., V), (...) -> (...), any leading shape, no shift inside."""
    flat = logits.reshape(-1, logits.shape[-1])
    flat = flat if temperature == 1 else flat / temperature  # a copy of all V logits, so only if it changes them
    # cross_entropy is -log softmax at the target, without ever holding the log-softmax of all V tokens
    return -torch.nn.functional.cross_entropy(flat, targets.flatten(), reduction="none").view(targets.shape)


def masked_mean(x, mask):
    """Mean of x where mask is true, a scalar; x and mask have one shape."""
    return x[mask].mean()


def whiten(x, mask):
    """Shift and scale x to mean 0 and standard deviation 1 over the mask; 0 outside of it. The shape stays."""
    inside = x[mask]
    whitened = (x - inside.mean()) / (inside.std(correction=0) + 1e-8)
    return torch.where(mask, whitened, 0.0)


def evaluate_actions(policy, tokens, mask, temperature=1.0, with_entropy=True):
    """What the policy thinks of the actions taken. The one place where states and actions are shifted against each other.

    tokens (B, T), mask (B, T-1) -> logprobs, values, entropy, (B, T-1) each and 0 outside the mask. `logprobs` and
    `entropy` (both in nats) are those of softmax(logits / temperature), the distribution that `generate` samples from.
    with_entropy=False leaves the entropy at 0: it costs several passes over N x V numbers, and as much memory for its gradient.
    """
    states, actions = tokens[:, :-1], tokens[:, 1:]
    # Hidden states and vocabulary logits for response tokens only: V is far wider than C, and prompts and padding need none.
    hidden, value_hidden = policy.hidden(states, mask)  # (N, C)
    logits = policy.lm_head(hidden)  # (N, V)
    logits = logits if temperature == 1 else logits / temperature
    logprobs = gather_logprobs(logits, actions[mask])  # (N,)
    values = policy.value_head(value_hidden).squeeze(-1)  # (N,)
    entropy = torch.zeros_like(values)
    if with_entropy:
        entropy = torch.logsumexp(logits, -1) - (logits.softmax(-1) * logits).sum(-1)  # (N,): H = log Z - E[logit]
    blank = logits.new_zeros(mask.shape)
    return [blank.masked_scatter(mask, x) for x in (logprobs, values, entropy)]


def last_action(mask):
    """mask (B, T-1) -> (B,): the index of the last action of each response; its token stands one column further on."""
    return (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(1)


# ----------------------------------------------------------------------------------------------------------------------
# 4. Sampling
#
# Prompts of different lengths, all from column 0. They are read in one go; then each row writes its next token at its own
# position, and the cache of keys and values spares reading a row again for every token.


def draw(logits, u, top_k=0):
    """A token for each row from softmax(logits), or with top_k > 0 from its top_k likeliest: (B, V) -> (B,).

    u (B,): random numbers from 0 to 1. The token is the one in whose share of the probability u falls (inverse transform
    sampling; torch.multinomial would draw V numbers a row).
    """
    if top_k:
        kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -inf)
    cdf = logits.softmax(-1).cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(cdf, u[:, None] * cdf[:, -1:], right=True).clamp(max=logits.shape[-1] - 1).squeeze(1)


def captured(function, *inputs):
    """The same function of tensors shaped like `inputs`, as a CUDA graph: the GPU gets all of its work once, and a word to redo it.

    A step of decoding is some hundred small kernels, and to launch one from Python can take longer than to run it. Only `inputs`
    are copied: whatever else the function reads or writes (weights, a cache) is used where it was, with what it holds by then.
    The result stands in the same memory after every call: it has to be used before the next.
    """
    held = [x.clone() for x in inputs]
    function(*held)  # once for real: libraries set themselves up at a first call, which must not become part of the graph
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # in here nothing runs, it is written down
        result = function(*held)

    def replay(*inputs):
        for mine, new in zip(held, inputs):
            mine.copy_(new)
        graph.replay()
        return result

    return replay


@torch.no_grad()
def generate(policy, prompts, max_new_tokens, temperature=1.0, top_k=0, cuda_graph=False):
    """Sample one response to each prompt, until end-of-text, max_new_tokens, or the end of the context.

    prompts: B non-empty lists of ids, each shorter than the context (else ValueError). Returns tokens (B, T), and (B, T-1) each:
    mask, the log-probability of each sampled token (of the full distribution, in nats) and the value before it, 0 outside the mask.
    top_k > 0 samples among so many likeliest tokens only. That is for reading what a finished model writes: PPO needs
    samples of the full distribution, which is the one that it scores. cuda_graph=True is for a GPU, see captured().
    """
    if not all(0 < len(prompt) < policy.config.context for prompt in prompts):
        raise ValueError(f"a prompt must have between 1 and {policy.config.context - 1} tokens (the context less one)")
    prompt_tokens, lengths = pad(prompts, policy.lm_head.weight.device)
    B, longest = prompt_tokens.shape
    steps = min(max_new_tokens, policy.config.context - min(map(len, prompts)))
    T = min(longest + steps, policy.config.context)
    u = torch.rand(steps, B, device=lengths.device)  # drawn at once, so that no row depends on when others end
    tokens = F.pad(prompt_tokens, (0, T + 1 - longest))  # one column too many: rows that have ended write there
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    logprobs, values = policy.lm_head.weight.new_zeros(2, B, T + 1)

    rows = torch.arange(B, device=lengths.device)  # the R rows still in work
    alive = torch.ones_like(rows, dtype=torch.bool)
    position = lengths  # the column that each row writes next
    cache = policy.trunk.new_cache(B, T)
    column = torch.arange(longest, device=lengths.device)
    last = column == lengths[:, None] - 1  # (B, longest)
    hidden = policy.trunk(prompt_tokens, last, [kept[:, :, :longest] for kept in cache], column.expand(B, -1))

    def decode(token, position):  # (R,), (R,) -> (R, C); width: the columns of the cache that some row may have filled
        return policy.trunk(token[:, None], cache=[kept[:, :, :width] for kept in cache], positions=position[:, None])[:, 0]

    advance = None
    for step in range(steps):  # hidden (R, C): after the last token of each row
        logits = policy.lm_head(hidden) / temperature  # (R, V)
        token = draw(logits, u[step, rows], top_k)  # (R,)
        at = rows, torch.where(alive, position, T)
        tokens[at], mask[at] = token, True
        logprobs[at], values[at] = gather_logprobs(logits, token), policy.value_head(hidden).squeeze(-1)

        # Rows that have ended are carried along until they are the majority; then all of them are dropped.
        alive = alive & (token != policy.config.eot) & (position + 1 < T)
        if step % 4 == 3 and 2 * (left := int(alive.sum())) < len(rows):  # to look makes a GPU wait, so not at every step
            cache, advance = [kept[:, alive] for kept in cache], None  # a graph is bound to its shapes and its cache
            rows, token, position, alive = rows[alive], token[alive], position[alive], alive[alive]
            if not left:
                break
        if step + 1 < steps:
            width = T if cuda_graph else min(longest + step + 1, T)  # a graph must have one shape, so it takes them all
            advance = advance or (captured(decode, token, position) if cuda_graph else decode)
            hidden = advance(token, position)
            position = (position + 1).clamp(max=T - 1)
    tokens, mask, logprobs, values = tokens[:, :T], mask[:, 1:T], logprobs[:, 1:T], values[:, 1:T]
    if policy.critic is not None:
        values = torch.zeros_like(values).masked_scatter(mask, policy.value_head(policy.critic(tokens[:, :-1], mask)))
    T = int(last_action(mask).max()) + 2  # cut the columns that no response has reached
    return tokens[:, :T], mask[:, : T - 1], logprobs[:, : T - 1], values[:, : T - 1]


# ----------------------------------------------------------------------------------------------------------------------
# 5. The reward model's loss
#
# Bradley and Terry (1952): people prefer answer a to answer b with probability sigmoid(score(a) - score(b)).


def reward_model_loss(chosen_scores, rejected_scores):
    """(B,), (B,) -> the mean negative log-likelihood of the choices (InstructGPT, eq. 1), and stats."""
    margin = chosen_scores - rejected_scores
    loss = -torch.nn.functional.logsigmoid(margin).mean()
    accuracy = (margin > 0).float().mean() + 0.5 * (margin == 0).float().mean()  # a tie is half a hit
    return loss, {"accuracy": accuracy.item(), "margin": margin.mean().item()}


# ----------------------------------------------------------------------------------------------------------------------
# 6. PPO (Schulman et al., arXiv:1707.06347), for language (Ziegler et al., arXiv:1909.08593)
#
# Each iteration samples responses with the policy as it is now (the *old* policy), has them scored, works out how much
# better than expected each token turned out (its advantage), and takes a few gradient steps that make good tokens
# likelier. Two other policies are at work, and they are not to be confused: the old one, a few steps behind, against
# which the ratio is taken; and the reference, the SFT model, from which the KL penalty keeps the policy from straying.
#
# The loop of train_ppo.py calls what is defined here in this order:
#
#     generate -> score_responses -> evaluate_actions (reference) -> kl_adjusted_rewards -> gae -> whiten -> ppo_update


@dataclass
class PPOConfig:
    steps: int = option(400, "PPO iterations; each samples, scores and updates once", 1)
    batch_size: int = option(128, "prompts, and so responses, per iteration", 1)
    max_new_tokens: int = option(48, "longest response, in tokens", 1)
    temperature: float = option(1.0, "divides the logits, in sampling and in scoring alike", 0.01)
    lr: float = option(6e-4, "peak learning rate of AdamW; it falls linearly to 0", 0)
    warmup: int = option(5, "iterations in which the learning rate climbs to its peak", 0)
    max_grad_norm: float = option(1.0, "longer gradients are scaled down to this norm", 0)
    epochs: int = option(1, "passes over each batch of responses", 1)
    minibatches: int = option(4, "gradient steps per pass", 1)
    cuda_graph: bool = option(False, "on a GPU, record the kernels of a decoding step once and replay them")
    rollout_batch: int = option(0, "responses sampled and scored at once; 0: all of them", 0)
    micro_batch: int = option(0, "responses in memory at once in a gradient step; 0: all of its minibatch", 0)
    kl_coef: float = option(0.1, "beta, the price of one nat of KL to the reference, paid in the reward", 0, 1e6)
    kl_target: float = option(6.0, "KL in nats that the adaptive beta steers to; needs a finite kl_horizon", 1e-6)
    kl_horizon: float = option(inf, "responses in which the adaptive beta changes by a fifth at most; inf: fixed beta", 1)
    kl_loss_coef: float = option(0.0, "weight of a penalty on the KL per token, in the loss, not in the reward", 0, 1e6)
    gamma: float = option(1.0, "discount per token", 0, 1)
    lam: float = option(1.0, "GAE's lambda: 0 trusts the value function, 1 the sampled return", 0, 1)
    clip_eps: float = option(0.2, "the ratio pi / old counts only within 1 - clip_eps .. 1 + clip_eps; inf: no clipping", 0)
    value_clip: float = option(0.2, "the same for the step of a value away from its old one; inf: no clipping", 0)
    vf_coef: float = option(0.1, "weight of the value loss; on a shared trunk a large one disturbs the policy", 0)
    entropy_coef: float = option(0.0, "weight of a bonus for entropy, which keeps the policy from settling too early", 0)
    length_penalty: float = option(0.0, "taken off the score for each token of the response", 0, 1e6)
    missing_eos_penalty: float = option(1.0, "taken off the score of a response that does not end by itself", 0, 1e6)
    ref_update_every: int = option(0, "iterations after which the reference becomes a copy of the policy; 0: never", 0)
    separate_critic: bool = option(False, "a value network of its own, started from the reward model")
    models: str = option("", "folder of sft.pt and rm.pt; the same as --out unless it is given")
    reward: str = option("", "module:function of yours, (prompts, responses) -> floats, instead of the reward model")
    no_report: bool = option(False, "end without measuring the result on the validation prompts")

    def __post_init__(self):
        if self.minibatches > self.batch_size:
            raise UserError(f"minibatches ({self.minibatches}) must not exceed batch_size ({self.batch_size})")
        if self.kl_horizon < self.batch_size:
            raise UserError(f"kl_horizon ({self.kl_horizon}) must not be below batch_size ({self.batch_size})")


@torch.no_grad()
def score_responses(reward_model, tokens, mask, eot, length_penalty=0.0, missing_eos_penalty=0.0):
    """The scores that PPO maximises, (B,), and which responses ended by themselves, (B,).

    tokens (B, T), mask (B, T-1). The reward model's score, less what a long and an unfinished response costs.
    """
    last = last_action(mask) + 1  # the column of the last token
    ended = tokens.gather(1, last[:, None]).squeeze(1) == eot
    return reward_model(tokens, last + 1) - length_penalty * mask.sum(1) - missing_eos_penalty * ~ended, ended


def kl_per_response(logprobs, ref_logprobs, mask):
    """Two estimates of KL(pi || ref) for each response, in nats, from samples of pi: k1 and k3, (B,) each.

    k1 = sum of log pi - log ref: unbiased; for one response it may well be negative, on average it cannot.
    k3 = sum of ref/pi - 1 - log(ref/pi): unbiased too, never negative, and steadier as long as the two policies are close
    (Schulman, "Approximating KL divergence"). Both are sums over the tokens of a response.
    """
    log_ratio = torch.where(mask, ref_logprobs - logprobs, 0.0)  # log ref/pi
    return -log_ratio.sum(1), (log_ratio.exp() - 1 - log_ratio).sum(1)


def kl_adjusted_rewards(scores, logprobs, ref_logprobs, mask, kl_coef):
    """Rewards per token: the price of leaving the reference at every action, the score at the last one.

    scores (B,); logprobs, ref_logprobs (in nats), mask (B, T-1) -> rewards (B, T-1), 0 outside the mask.
    """
    # InstructGPT, eq. 2, token by token: r_t = -beta * (log pi(a_t | s_t) - log ref(a_t | s_t)). The bracket is k1: a policy
    # pays where it has made a token likelier than the reference has it.
    rewards = torch.where(mask, -kl_coef * (logprobs - ref_logprobs), 0.0)
    # The reward model judges whole responses: nothing is known before the last token is there.
    last = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(1)
    rewards[torch.arange(len(mask), device=mask.device), last] += scores
    return rewards


def adapt_kl_coef(kl_coef, kl, kl_target, responses, kl_horizon):
    """Raise beta when the KL (nats per response) is above its target, lower it below; kl_horizon = inf leaves it alone."""
    error = min(max(kl / kl_target - 1, -0.2), 0.2)  # Ziegler et al., section 2.2
    return kl_coef * (1 + error * responses / kl_horizon)


def gae(rewards, values, mask, gamma, lam):
    """Generalised advantage estimation (Schulman et al., arXiv:1506.02438): all (B, T-1) -> advantages, returns.

    How much better than expected was the action? With lam = 1 the return that followed less the value, which is right
    on average and noisy; with lam = 0 one reward and the next value, which is steady and as wrong as the values are.
    After the last action there is nothing to come: the value there is 0, also when the length limit cut the response.
    """
    rewards, values = torch.where(mask, rewards, 0.0), torch.where(mask, values, 0.0)
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]  # eq. 10: delta_t = r_t + gamma V_t+1 - V_t
        next_advantage = delta + gamma * lam * next_advantage  # eq. 16: A_t = delta_t + gamma lam A_t+1
        advantages[:, t], next_value = next_advantage, values[:, t]
    advantages = torch.where(mask, advantages, 0.0)
    return advantages, advantages + values  # A + V is what the values are trained towards; with lam = 1 the return that followed


def policy_loss(logprobs, old_logprobs, advantages, mask, clip_eps):
    """PPO's clipped objective (arXiv:1707.06347, eq. 7) with the sign of a loss; all (B, T-1) -> scalar, stats.

    ratio = pi / old starts at 1. Once an action of positive advantage is likelier by the factor 1 + clip_eps than when it was
    sampled, or one of negative advantage less likely by 1 - clip_eps, the objective is flat and pushes no further. The min
    leaves the other side alone: a ratio that has moved in the harmful direction still gets its full gradient back.
    """
    logprobs, old_logprobs, advantages = logprobs[mask], old_logprobs[mask], advantages[mask]  # (N,)
    log_ratio = logprobs - old_logprobs
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_eps, 1 + clip_eps)
    loss = -torch.min(ratio * advantages, clipped * advantages).mean()
    return loss, {
        "policy_loss": loss.item(),
        "approx_kl": (ratio - 1 - log_ratio).mean().item(),  # KL(old || pi) per token, k3
        "clip_frac": ((ratio - 1).abs() > clip_eps).float().mean().item(),
        "ratio_max": ratio.max().item(),
    }


def value_loss(values, old_values, returns, mask, clip):
    """Half the squared error of the values, all (B, T-1) -> scalar, stats.

    As in OpenAI's code, the worse of two errors counts: of the value, and of the value moved at most `clip` away from
    what it was when the responses were sampled. clip = inf: the plain squared error.
    """
    values, old_values, returns = values[mask], old_values[mask], returns[mask]  # (N,)
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    loss = 0.5 * torch.max((values - returns) ** 2, (clipped - returns) ** 2).mean()
    return loss, {"value_loss": loss.item()}


def explained_variance(values, returns, mask):
    """1 - Var(returns - values) / Var(returns) over the mask: 1 foresees everything, 0 no better than a constant."""
    return (1 - (returns - values)[mask].var() / (returns[mask].var() + 1e-8)).item()


def optimizer_step(loss, model, optimizer, max_grad_norm, step):
    """One move down the gradient that backward() has left behind; returns its norm before it was scaled down.

    Raises UserError, which names the step, when loss or gradient is not finite; the weights are as they were then.
    """
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm).item()
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise UserError(f"step {step}: the loss is {loss}, the norm of its gradient {norm}; try a smaller --lr")
    optimizer.step()
    return norm


def ppo_loss(policy, batch, config):
    """The loss of some responses, a mean over their tokens, and its stats. batch: as in ppo_update."""
    columns = int(last_action(batch["mask"]).max()) + 1  # cut to the longest row
    old = {name: x[:, :columns] for name, x in batch.items() if name != "tokens"}
    tokens, mask = batch["tokens"][:, : columns + 1], old["mask"]
    logprobs, values, entropy = evaluate_actions(policy, tokens, mask, config.temperature, config.entropy_coef > 0)
    actor, actor_stats = policy_loss(logprobs, old["logprobs"], old["advantages"], mask, config.clip_eps)
    critic, critic_stats = value_loss(values, old["values"], old["returns"], mask, config.value_clip)
    # k2 = (log pi - log ref)^2 / 2: averaged over samples of pi its gradient is that of the KL; k1's is 0
    kl_loss = masked_mean(0.5 * (logprobs - old["ref_logprobs"]) ** 2, mask)
    entropy = masked_mean(entropy, mask)
    loss = actor + config.vf_coef * critic - config.entropy_coef * entropy + config.kl_loss_coef * kl_loss
    return loss, {"loss": loss.item(), **actor_stats, **critic_stats}


def ppo_update(policy, optimizer, batch, config, step=0):
    """One PPO update: epochs x minibatches gradient steps on one batch of responses. Returns the mean stats.

    batch: tokens (B, T), and (B, T-1) each: mask, logprobs and values (both of when the responses were sampled, so *old* by
    now), ref_logprobs, advantages, returns.
    """
    sums, ratio_max = Counter(), 0.0
    for _ in range(config.epochs):
        for rows in torch.randperm(len(batch["tokens"]), device=batch["tokens"].device).tensor_split(config.minibatches):
            rows = rows.sort().values  # neighbours stay neighbours, so that the trunk finds those that begin alike
            optimizer.zero_grad()
            loss_of_step, tokens_of_step = 0.0, int(batch["mask"][rows].sum())
            for piece in rows.split(config.micro_batch or len(rows)):
                loss, stats = ppo_loss(policy, {name: x[piece] for name, x in batch.items()}, config)
                count = int(batch["mask"][piece].sum())
                share = count / tokens_of_step  # so weighted, the means over the pieces add up to that over the minibatch
                (share * loss).backward()
                loss_of_step += share * loss.item()
                ratio_max = max(ratio_max, stats.pop("ratio_max"))
                sums.update({name: count * x for name, x in stats.items()})
            norm = optimizer_step(loss_of_step, policy, optimizer, config.max_grad_norm, step)
            sums.update({"tokens": tokens_of_step, "grad_norm": tokens_of_step * norm})
    tokens = sums.pop("tokens")
    return {name: total / tokens for name, total in sums.items()} | {"ratio_max": ratio_max}


# ----------------------------------------------------------------------------------------------------------------------
# 7. Checkpoints


def write_file(path, contents):
    """torch.save beside the file and rename: whatever happens, the path holds an old or a new version, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".tmp")
    try:
        with open(beside, "wb") as file:
            torch.save(contents, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except (OSError, RuntimeError) as error:
        beside.unlink(missing_ok=True)
        reason = getattr(error, "strerror", "is the disk full?")
        raise UserError(f"{path}: cannot be written ({reason}); what was there before is still there")


def read_file(path, kinds):
    """What write_file wrote, as a dict on the CPU; UserError unless it is whole and its "kind" is one of `kinds`."""
    hint = "leave --resume out" if kinds[0] == "state" else f"train_{kinds[0]}.py makes it"
    if not Path(path).is_file():
        raise UserError(f"{path}: not found; {hint}")
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True)  # a pickle that would run code is refused
        kind = contents["kind"]
    except Exception as error:  # torch.load raises many kinds of error at a damaged file
        raise UserError(f"{path}: damaged, or no checkpoint ({type(error).__name__}); {hint}")
    if kind not in kinds:
        raise UserError(f"{path}: holds {kind!r}, not {' or '.join(kinds)!r}; {hint}")
    return contents


def save_checkpoint(path, kind, model, tokenizer, **facts):
    """Everything needed to use the model, in one file. kind: "sft" or "ppo" (a GPT), or "rm" (a RewardModel)."""
    vocabulary = [token.decode("latin-1") for token in tokenizer.tokens]
    config = dataclasses.asdict(model.config)
    write_file(Path(path), {"kind": kind, "config": config, "vocabulary": vocabulary, "model": model.state_dict(), "facts": facts})


def load_checkpoint(path, kinds, device="cpu"):
    """A checkpoint of one of `kinds` -> model in eval mode, tokenizer, and the dict of facts saved with it."""
    contents = read_file(path, kinds)
    try:
        model = (RewardModel if contents["kind"] == "rm" else GPT)(GPTConfig(**contents["config"]))
        model.load_state_dict(contents["model"])
        tokenizer = Tokenizer([token.encode("latin-1") for token in contents["vocabulary"]])
        return model.to(device).eval(), tokenizer, contents["facts"]
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise UserError(f"{path}: damaged, or made by another version ({type(error).__name__}); make it again")
