"""minippo: RLHF with PPO, from scratch, in one file.

RLHF (reinforcement learning from human feedback) has three stages. Supervised fine-tuning (SFT,
train_sft.py) teaches a language model to imitate demonstrations. A reward model (train_rm.py)
learns which of two answers people prefer, and gives each answer a score. PPO (train_ppo.py) raises
the scores, but keeps the model close to the SFT model. For prompts x and responses y (also called
answers or completions), PPO maximises

    J(pi) = E[ score(x, y) ] - beta * KL(pi || ref)

(InstructGPT, arXiv:2203.02155, eq. 2, without its pretraining term).

The *policy* pi is the language model, seen as a rule for choosing the next token. The *reference*
ref is the frozen SFT model. KL(pi || ref), the Kullback-Leibler divergence, is the mean of
log pi(y | x) - log ref(y | x) over responses y of pi: how far the policy has moved, in nats (the
unit of natural logarithms). Without "(y | x)", log pi is the log-probability of one token. Beta
(kl_coef in the code) is the penalty per nat. E is the mean over prompts and responses of pi. PPO
repeats four phases:

    prompts --> 1. policy --> responses, log pi, values -----------------+
                     ^            |                                      |
                     |            +--> 2. reward model ----> scores -----+
                     |            +-->    reference -------> log ref ----+
                     |                                                   v
                     +---- 4. update: the clipped loss <---- 3. rewards, advantages

    policy            starts as the SFT model; trained          log pi of each token
    value function    a second head on the policy; trained      reward still to come
    reference         the SFT model; frozen                     log ref of each token
    reward model      SFT model, new head; trained, now frozen  one score per response

A *score* rates a whole response; a *reward* belongs to one token (except in the traditional names
*reward model*, rlhf_reward and --reward).

Shapes: B rows in a batch, T columns, C channels, H attention heads, V tokens in the vocabulary, N
response tokens.

One convention holds everywhere. A row starts at column 0: a prompt, its response, then padding,
which no response sees, because attention is causal. Choosing token t + 1 is the *action* taken in
the *state* "tokens 0 .. t have been read", and every number about that choice is stored at index t:
log pi at index 1 is that of token 2, "sweet". With the prompt "Bees eat", a score of 1.40 and beta
0.1 (a dot means: not used):

    index t      0      1      2      3      4      5
    tokens       Bees   eat    sweet  nectar <eos>  pad     (B, T); <eos> is the end token
    action       eat    sweet  nectar <eos>  pad            tokens[:, t + 1]; from here on (B, T-1)
    mask         .      x      x      x      .              does the action belong to the response?
    log pi       .     -0.50  -1.20  -0.10   .              old_logprobs: when sampled
    log ref      .     -1.00  -1.00  -0.30   .              ref_logprobs: by the reference
    KL           .      0.50  -0.20   0.20   .              log pi - log ref: a sample of the KL
    reward       .     -0.05   0.02   1.38   .              -beta * KL; the last gets the score too
    value        .      0.80   1.00   1.20   .              prediction: sum of the rewards to come

Phase 3 (section 5): how much better than expected did each action turn out? The value after the
last action counts as 0. (Here gamma and lam, see section 5, are 1; this row is the whole batch.)

    delta        .      0.15   0.22   0.18   .              reward + next value - value
    advantage    .      0.55   0.40   0.18   .              sum of this delta and all later ones
    return       .      1.35   1.40   1.38   .              advantage + value: rewards from here on
    whitened     .      1.14   0.15  -1.29   .              scaled to mean 0, variance 1 in a batch

Phase 4 makes actions with a whitened advantage above 0 more probable, those below 0 less. (<eos>
turned out better than expected, but by less than average, and whitening subtracts the average.)
"""

import copy
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

# ------------------------------------------------------------
# 1. The networks
#
# GPT-2 (Radford et al., 2019) without dropout, because dropout would make sampling and update
# disagree about log pi (section 5).


@dataclass
class GPTConfig:
    vocab_size: int = 1024  # tokens in the vocabulary; the last is the end token
    context: int = 128  # maximum length of prompt plus response, in tokens
    layers: int = 4  # transformer blocks
    heads: int = 4  # attention heads
    channels: int = 96  # width of the model; a multiple of heads
    bfloat16: bool = False  # matrix products of the blocks in 16 bits: faster on GPUs and some CPUs

    def __post_init__(self):
        if self.channels % self.heads:
            raise ValueError(f"channels ({self.channels}): not a multiple of heads ({self.heads})")

    @property
    def eos(self):
        return self.vocab_size - 1


class Attention(nn.Module):
    """Causal self-attention: a position reads itself and those before it."""

    def __init__(self, config):
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.channels, 3 * config.channels)
        self.out = nn.Linear(config.channels, config.channels)

    def forward(self, x, cache=None):
        """(B, T, C) -> (B, T, C).

        cache: a list for the keys and values of the earlier positions, to which this call adds its
        own. Unless the list is empty, T must be 1.
        """
        q, k, v = (y.unflatten(-1, (self.heads, -1)) for y in self.qkv(x).chunk(3, -1))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, T, C/H)
        if cache is not None:
            if cache:
                k, v = (torch.cat(pair, 2) for pair in zip(cache, (k, v)))
            cache[:] = k, v  # (B, H, positions so far, C/H) each
        causal = q.shape[2] > 1  # a single query is the last position: it may read all of them
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """x + attention, then x + MLP, each of a normalised x (pre-norm): (B, T, C) -> (B, T, C)."""

    def __init__(self, config):
        super().__init__()
        C = config.channels
        self.norm1 = nn.LayerNorm(C)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(C)
        self.mlp = nn.Sequential(nn.Linear(C, 4 * C), nn.GELU("tanh"), nn.Linear(4 * C, C))

    def forward(self, x, cache=None):
        x = x + self.attention(self.norm1(x), cache)
        return x + self.mlp(self.norm2(x))


class Trunk(nn.Module):
    """The body below the heads: tokens (B, T) -> hidden states (B, T, C). cache: see Attention, one
    list per block; start: the position of the first token."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.channels)
        self.position_embedding = nn.Embedding(config.context, config.channels)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.channels)
        std = 0.02 * math.sqrt(768 / config.channels)  # GPT-2's 0.02, rescaled for other widths
        for name, parameter in self.named_parameters():
            if name.endswith(("out.weight", "mlp.2.weight")):  # smaller: every block adds to x
                nn.init.normal_(parameter, std=std / math.sqrt(2 * config.layers))
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens, cache=None, start=0):
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        with torch.autocast(x.device.type, torch.bfloat16, self.config.bfloat16):
            for i, block in enumerate(self.blocks):
                x = block(x, None if cache is None else cache[i])
        return self.norm(x)


class GPT(nn.Module):
    """The policy: which token next? And the value function: how much reward is still to come?"""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.trunk = Trunk(config)
        self.value_trunk = None  # or a Trunk of its own for the value head to read
        self.lm_head = nn.Linear(config.channels, config.vocab_size, bias=False)
        self.lm_head.weight = self.trunk.token_embedding.weight  # shared, as in GPT-2
        self.value_head = nn.Linear(config.channels, 1)
        nn.init.zeros_(self.value_head.weight)  # all values start at 0; see center_values()
        nn.init.zeros_(self.value_head.bias)

    def hidden(self, tokens):
        """tokens (B, T) -> what the two heads read: (B, T, C) each."""
        hidden = self.trunk(tokens)
        return hidden, (hidden if self.value_trunk is None else self.value_trunk(tokens))

    def forward(self, tokens):
        """tokens (B, T) -> logits (B, T, V), values (B, T); both at t are about token t + 1."""
        hidden, value_hidden = self.hidden(tokens)
        return self.lm_head(hidden), self.value_head(value_hidden).squeeze(-1)


class RewardModel(nn.Module):
    """Scores a row, prompt and response, with one number: how much would people like it?

    After training, train_rm.py sets `mean` and `std`, so that the SFT model's own answers have mean
    0 and standard deviation 1, and beta means the same for any reward model. It also sets `cap`,
    the score that one in a hundred of these answers exceeds. Higher scores are lowered to it,
    because they are often wrong (arXiv:2502.18770).
    """

    def __init__(self, gpt):
        super().__init__()
        self.config, self.trunk = gpt.config, copy.deepcopy(gpt.trunk)
        self.score_head = nn.Linear(self.config.channels, 1)
        std = 1 / math.sqrt(self.config.channels + 1)  # Stiennon et al., arXiv:2009.01325
        nn.init.normal_(self.score_head.weight, std=std)
        nn.init.zeros_(self.score_head.bias)
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("std", torch.ones(()))
        self.register_buffer("cap", torch.tensor(math.inf))

    def forward(self, tokens, lengths):
        """tokens (B, T), lengths (B,) -> (B,), read at the last token, which has seen them all."""
        rows = torch.arange(len(lengths), device=lengths.device)
        last = self.trunk(tokens)[rows, lengths - 1]  # (B, C)
        scores = (self.score_head(last).squeeze(-1) - self.mean) / self.std
        return torch.minimum(scores, self.cap)


# ------------------------------------------------------------
# 2. Log-probabilities and masks
#
# Sums and means run over response tokens only: x[mask] picks these N tokens. Prompts or padding
# that leak in would be trained on, dilute every mean, and add to the KL.


def check_mask(mask, *tensors):
    """ValueError unless the mask is boolean and all tensors have its shape: a mask of 0 and 1 would
    silently pick rows 0 and 1, and a (B, 1) tensor would be broadcast."""
    shapes = [tuple(x.shape) for x in (mask, *tensors)]
    if mask.dtype != torch.bool or len(set(shapes)) > 1:
        raise ValueError(f"wanted a boolean mask and equal shapes, got {mask.dtype} and {shapes}")


def response_mask(prompt_lengths, lengths, columns):
    """(B,), (B,), T -> (B, T-1): true at t where token t + 1 is part of the response. lengths: of
    prompt and response together."""
    action = torch.arange(1, columns, device=lengths.device)
    return (action >= prompt_lengths[:, None]) & (action < lengths[:, None])


def row_lengths(mask):
    """mask (B, T-1) -> (B,): tokens of prompt and response. The mask is last true at length - 2,
    where the last token is chosen. ValueError if a response is empty."""
    if not mask.any(1).all():
        raise ValueError("a response is empty: it needs a token, at least the end token")
    return (mask * torch.arange(mask.shape[1], device=mask.device)).amax(1) + 2


def masked_mean(x, mask):
    """Mean of x over the mask: (B, T-1) each -> scalar."""
    check_mask(mask, x)
    return x[mask].mean()


def at_least_float32(x):
    """x, but never in 16 bits: in bfloat16, a log-probability of -10 is off by up to 0.03."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def gather_logprobs(logits, targets, temperature=1.0):
    """log softmax(logits / temperature) at the targets, in nats: (..., V), (...) -> (...)."""
    log_p = torch.log_softmax(at_least_float32(logits) / temperature, -1)
    return log_p.gather(-1, targets[..., None]).squeeze(-1)


def evaluate_actions(policy, tokens, mask, temperature=1.0, with_entropy=False):
    """tokens (B, T), mask (B, T-1) -> logprobs of the actions; the value of the state before each;
    the entropy of the choice there, if wanted: (B, T-1) each, 0 outside the mask.

    Each action is conditioned on the tokens in the row, not on what the policy would sample
    (*teacher forcing*). Logprobs and entropy, in nats, are those of softmax(logits / temperature).
    The mean of -logprobs over the mask is the loss of SFT.
    """
    check_mask(mask, tokens[:, 1:])
    states, actions = tokens[:, :-1], tokens[:, 1:]
    hidden, value_hidden = (x[mask] for x in policy.hidden(states))  # (N, C) each
    logits = at_least_float32(policy.lm_head(hidden))  # (N, V), not (B, T-1, V): V is large
    logprobs = gather_logprobs(logits, actions[mask], temperature)  # (N,)
    values = at_least_float32(policy.value_head(value_hidden).squeeze(-1))  # (N,)
    entropy = torch.zeros_like(values)
    if with_entropy:
        log_p = torch.log_softmax(logits / temperature, -1)
        entropy = -(log_p.exp() * log_p).sum(-1)  # E[-log p]
    blank = logits.new_zeros(mask.shape)
    return [blank.masked_scatter(mask, x) for x in (logprobs, values, entropy)]  # to (B, T-1)


# ------------------------------------------------------------
# 3. Sampling
#
# To add a token, a transformer need not reread the row: attention needs only the keys and values of
# the earlier tokens, which the *KV cache* keeps. (Reading a row in one pass is called *prefill*,
# writing token by token *decoding*.)


def draw(logits):
    """A random token from each softmax(logits): (B, V) -> (B,).

    Cut the interval from 0 to 1 into a piece for each token, as long as its probability. Draw a
    number u from the interval, and take the token whose piece contains u (*inverse transform
    sampling*). torch.multinomial draws from the same distribution.
    """
    # The end of each piece: (B, V), the last at about 1
    ends = logits.softmax(-1).cumsum(-1, dtype=torch.float64)
    if ends[:, -1].isnan().any():
        raise FloatingPointError("the logits are not finite: no token can be drawn from them")
    u = torch.rand(len(ends), 1, dtype=torch.float64, device=ends.device) * ends[:, -1:]
    return torch.searchsorted(ends, u, right=True).squeeze(1)


@torch.no_grad()
def generate(policy, prompts, max_new_tokens, temperature=1.0, draw=draw):
    """Sample a response to each prompt, until the end token, max_new_tokens or the end of the
    context.

    prompts: B lists of 1 to context - 1 ids (else ValueError). Returns tokens (B, T); and mask,
    logprobs (in nats) and values of the sampled tokens, (B, T-1) each.

    The rows advance together. Prompts of 1, 2 and 4 tokens (p), sampled tokens (s), <eos> (e):

        column    0  1  2  3  4  5    Column 0 is read for all rows, then a token is drawn for
        row 0     p  s  s  e          column 1; rows 1 and 2 discard it and keep their prompt's.
        row 1     p  p  s  s  s  s    Row 0 ends at column 3 and drops out. Row 1 is cut off by
        row 2     p  p  p  p  s  e    max_new_tokens = 4.

    draw: logits (rows, V) -> tokens (rows,), to watch or replace the sampling.
    """
    context, device = policy.config.context, policy.lm_head.weight.device
    if not all(0 < len(prompt) < context for prompt in prompts):
        raise ValueError(f"a prompt should have 1 to {context - 1} tokens, the context less one")
    T = min(max(map(len, prompts)) + max_new_tokens, context)
    tokens = torch.tensor([ids + [0] * (T - len(ids)) for ids in prompts], device=device)
    prompt_lengths = torch.tensor([len(ids) for ids in prompts], device=device)
    limits = (prompt_lengths + max_new_tokens).clamp(max=context)
    lengths, rows = prompt_lengths.clone(), torch.arange(len(prompts), device=device)
    cache = [[] for _ in range(policy.config.layers)]
    begin, t = 0, int(prompt_lengths.min())
    while len(rows):  # read the columns from begin to t - 1, and draw a token for column t
        hidden = policy.trunk(tokens[rows, begin:t], cache=cache, start=begin)[:, -1]  # (rows, C)
        token = draw(policy.lm_head(hidden) / temperature)  # (rows,)
        responding = prompt_lengths[rows] <= t
        tokens[rows, t] = torch.where(responding, token, tokens[rows, t])
        lengths[rows] += responding
        done = responding & ((token == policy.config.eos) | (lengths[rows] == limits[rows]))
        if done.any():
            rows = rows[~done]
            cache = [[x[~done] for x in block] for block in cache]
        begin, t = t, t + 1
    T = int(lengths.max())
    tokens, mask = tokens[:, :T], response_mask(prompt_lengths, lengths, T)
    # These numbers are computed as in the update, so that the ratio (section 5) starts at 1. Those
    # of the loop would be rounded differently.
    logprobs, values, _ = evaluate_actions(policy, tokens, mask, temperature)
    return tokens, mask, logprobs, values


# ------------------------------------------------------------
# 4. The reward model's loss
#
# Usually two answers to a prompt are sampled from the SFT model, and a person picks the better one,
# which is easier than grading answers on a common scale. In the model of Bradley and Terry (1952),
# a is preferred to b with probability sigmoid(score(a) - score(b)). Only differences count: the
# zero of the scores is arbitrary. The loss is -log of this probability. For a margin
# score(a) - score(b) of 2, 0 or -2, it is 0.13, 0.69 or 2.13.
#
# Why a model? PPO needs a score for each response as soon as it is sampled. People label a set of
# pairs only once. But the responses of PPO differ from the answers in the pairs (*distribution
# shift*), so their scores may be wrong: too high, for example, for long, flattering or evasive
# answers. Learning to exploit this is *reward hacking* or *overoptimisation*: the score rises, and
# the text gets worse. Hence the penalty on the KL, and the cap.


def reward_model_loss(chosen_scores, rejected_scores):
    """(B,), (B,) -> the mean negative log-likelihood of the choices (InstructGPT, eq. 1), stats."""
    if chosen_scores.shape != rejected_scores.shape:
        raise ValueError(f"shapes {chosen_scores.shape} and {rejected_scores.shape} differ")
    margin = chosen_scores - rejected_scores
    loss = -F.logsigmoid(margin).mean()
    accuracy = (margin.sign().mean() + 1) / 2  # a tie is half right
    stats = {"accuracy": accuracy.item(), "margin": margin.mean().item()}
    return loss, {"loss": loss.item(), **stats}


# ------------------------------------------------------------
# 5. From the policy gradient to PPO (Schulman et al., arXiv:1707.06347), and to PPO for language
# models (Ziegler et al., arXiv:1909.08593)
#
# SFT is given the token to imitate in every state. Here the policy chooses the tokens, and gets one
# score at the end (a *sparse reward*). We want to maximise E[score]. A random draw has no gradient,
# but its probability does. Write p(y) for pi(y | x) and q(y) for ref(y | x), the probabilities of a
# whole response; from here on, log pi and log ref are those of one token.
#
#     grad E[score] = grad sum_y p(y) * score(y) = sum_y grad p(y) * score(y)
#                   = sum_y p(y) * grad log p(y) * score(y)     because grad p = p * grad log p
#                   = E[ grad log p(y) * score(y) ]             (the log-derivative trick)
#
# This is the *policy gradient*, a mean over samples: each response is made more or less probable,
# in proportion to its score. As code, it is REINFORCE (Williams, 1992):
#
#     tokens, mask, _, _ = generate(policy, prompts, max_new_tokens)
#     logprobs, _, _ = evaluate_actions(policy, tokens, mask)
#     loss = -(logprobs.sum(1) * score(tokens, mask)).mean()    # log p(y) is the sum of log pi
#
# Sampling is how the policy *explores*: what is never sampled is never rewarded. The error of the
# mean shrinks only with the square root of the batch size, so most of what follows fights noise.
# Four changes lead from here to PPO.
#
# The first change: the KL joins the reward. In J, score - beta * (log p - log q) of the whole
# response replaces the score. As log p has a gradient too, the product rule gives one more term:
#
#     grad J = E[ grad log p * (score - beta * (log p - log q)) ] - beta * E[ grad log p ]
#
# The last term is 0: E[grad log p] = sum_y p * grad log p = sum_y grad p = grad 1 = 0. And log p is
# a sum over the tokens of y, so the KL splits into a reward for each token,
# -beta * (log pi - log ref). The last token gets the score too.
#
# The KL is never negative, and is 0 only if pi and ref agree; a sample of it may be negative. It is
# not symmetric. KL(pi || ref) is a mean over what pi writes: an answer that ref hardly ever writes
# costs a lot, one that pi stops writing costs little. (A policy that drops answers worth half of
# ref's probability pays log 2 = 0.69 nats. Losing variety like this is called *mode collapse*.)
# KL(ref || pi), a mean over what ref writes, would keep all of ref's answers, even its mistakes.
#
# Three estimates of the KL at one token, where d is log pi - log ref of the sampled token
# (Schulman, "Approximating KL divergence"; on a first reading, k1 is enough):
#
#     k1 = d                  on average the KL, but often below 0   in the reward; metric kl
#     k2 = d^2 / 2            its mean gradient is that of the KL    in the loss, with kl_loss_coef
#     k3 = exp(-d) - 1 + d    on average the KL, and never below 0   metric kl_k3
#
# k3 is never below 0, because exp(x) >= 1 + x, and near 0 it varies less than k1. Its mean is the
# KL, because E[exp(-d)] = E[ref / pi] = sum ref = 1.


def bounded_exp(x):
    """exp(x), capped so that an extreme probability ratio cannot overflow."""
    return x.clamp(max=20).exp()


def kl_per_response(logprobs, ref_logprobs, mask):
    """k1 and k3, summed over the tokens of each response, in nats: (B, T-1) each -> (B,) each."""
    check_mask(mask, logprobs, ref_logprobs)
    d = torch.where(mask, logprobs - ref_logprobs, 0.0)
    return d.sum(1), (bounded_exp(-d) - 1 + d).sum(1)


def kl_adjusted_rewards(scores, logprobs, ref_logprobs, mask, kl_coef):
    """The reward of each token (InstructGPT, eq. 2): scores (B,), the rest (B, T-1) -> (B, T-1).
    Each token pays beta per nat of its KL; the score is added at the last."""
    check_mask(mask, logprobs, ref_logprobs)
    check_mask(mask[:, 0], scores)  # one score per row
    rewards = torch.where(mask, -kl_coef * (logprobs - ref_logprobs), 0.0)
    rewards[torch.arange(len(mask), device=mask.device), row_lengths(mask) - 2] += scores
    return rewards


# How much credit does each token deserve (*credit assignment*)? So far each grad log pi is
# multiplied by the sum of all rewards of its response (its *episode* or *trajectory*). Two more
# changes usually make this gradient less noisy.
#
# The second change: drop the earlier rewards. When a token is chosen, the rewards before it are
# constants, and a constant times E[grad log pi] is 0. So its grad log pi is multiplied by the
# *return*: the sum of its own and all later rewards.
#
# The third change: a baseline. Any number that does not depend on the action may be subtracted from
# the return: on average this changes nothing, because E[grad log pi] = 0. (Without a baseline,
# scores that are all positive push up every response, good or bad.) PPO subtracts the *value* v, a
# prediction of the return from this state. The difference is the *advantage* A. (Textbooks
# write A = Q - V, where Q is the expected return once the action is chosen; reward + next value
# estimates Q.) The value function is the *critic*, the policy the *actor*.
#
# Why does the KL go into the reward, and not into the loss? A token decides which states follow,
# and with them the later KL. If the KL is a reward, the return of a token contains its own d and
# all later ones. As a loss, k2 has the gradient d * grad log pi: it ignores the states that the
# token leads to. As a loss, k1 would teach nothing: its gradient, grad log pi, has mean 0.


def gae(rewards, values, mask, gamma, lam):
    """Generalised advantage estimation (arXiv:1506.02438): (B, T-1) each -> advantages, returns.

    With rewards r and values v, delta_t = r_t + gamma v_{t+1} - v_t is the *temporal difference
    error*. The advantage counts the later deltas too (eq. 16):

        A_t = delta_t + (gamma lam) delta_{t+1} + (gamma lam)^2 delta_{t+2} + ...
            = delta_t + (gamma lam) A_{t+1}

    The response of the header:       lam 1      0.55   0.40   0.18
                                      lam 0.9    0.49   0.38   0.18
                                      lam 0      0.15   0.22   0.18

    With lam = 1 the values in between cancel: A is the sampled return minus the value (*Monte
    Carlo*), unbiased, but noisy. lam = 0 gives only delta, which trusts the next value
    (*bootstrapping*): less noisy, but biased where the values are wrong. For responses of hundreds
    of tokens, many start with lam = 0.95: the noise of lam = 1 grows with the number of rewards.

    With gamma below 1, later rewards count less. For text, gamma = 1 is usual: a long answer is
    worth no less than a short one. No reward follows the last action, so the value after it counts
    as 0, even if the length limit cut the response off: the score is paid by then.
    """
    check_mask(mask, rewards, values)
    rewards, values = torch.where(mask, rewards, 0.0), torch.where(mask, values, 0.0)
    advantages = torch.zeros_like(rewards)
    next_value = advantage = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):  # right of the response all numbers are 0
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * advantage
        advantages[:, t], next_value = advantage, values[:, t]
    advantages = torch.where(mask, advantages, 0.0)  # in the prompt they mean nothing
    # The values are trained towards these returns, which with lam below 1 are partly predictions.
    return advantages, advantages + values


def whiten(x, mask):
    """Shift and scale x, (B, T-1), to mean 0 and standard deviation 1 over the mask; 0 elsewhere.
    If all numbers are equal, up to rounding, they become 0.

    If scores, beta and values are multiplied by 10, the whitened advantages, and with them the
    policy loss, stay the same. (The value loss does not: scores with a standard deviation of about
    1 are best.) The mean acts as one more baseline. Whitening hides the size of the advantages:
    those of nearly equal responses are scaled up, noise included. Returns are never whitened: the
    values must learn their true size.
    """
    check_mask(mask, x)
    selected = x[mask]
    std, rounding = selected.std(correction=0), 8 * torch.finfo(x.dtype).eps * selected.abs().max()
    return torch.where(mask & (std > rounding), (x - selected.mean()) / std, 0.0)


# The fourth change: several gradient steps on one batch, because for large models sampling is slow.
# A pass over the batch is cut into minibatches, with a gradient step for each. (More steps use the
# samples better, but lead further away from the policy that sampled them.) The first step is
# *on-policy*: the policy being trained sampled the batch. After that, the policy that sampled is
# called the *old* policy, and the next steps are *off-policy*. The *ratio* pi / old corrects for
# that, choice by choice (*importance sampling*). For an action a:
#
#     E_old[ratio * A] = sum_a old(a) (pi(a) / old(a)) A(a) = E_pi[A]
#
# (The states are not corrected: they are those that old reached.) The gradient of ratio * A is
# ratio * A * grad log pi, because grad pi = pi * grad log pi. At ratio 1, where an update begins,
# this is the policy gradient. Far from 1, a few large ratios dominate. So PPO clips the ratio.
#
# Do not confuse the old policy with the reference. The ratio compares pi with old, the KL compares
# pi with ref. The clip does not replace the KL: it keeps each update small (as a constraint on
# KL(old || pi) did in TRPO, PPO's forerunner), but small steps add up.
#
# For each token PPO maximises the smaller of ratio * A and clipped * A, where "clipped" is the
# ratio limited to the range 1 - eps to 1 + eps. This is the response of the header after a gradient
# step, with eps 0.2 (computed from unrounded numbers):
#
#     log pi now    -0.25  -1.10  -0.40     of the same actions
#     ratio          1.28   1.11   0.74     pi / old: exp(log pi now - log pi)
#     A              1.14   0.15  -1.29     the whitened advantage
#     clipped        1.20   1.11   0.80
#     ratio * A      1.46   0.17  -0.96
#     clipped * A    1.37   0.17  -1.04     here the smaller of the two, or equal
#     gradient       0      0.17   0        what multiplies grad log pi
#
# The loss is -(1.37 + 0.17 - 1.04) / 3 = -0.17. Where the clipped product is the smaller one, there
# is no gradient, because a clipped ratio is a constant. The first token has risen enough, the last
# has fallen enough. Why not always the clipped one? Tokens share the weights, so steps for others
# may have moved a ratio the wrong way. If the ratio of the first token (A = 1.14) had fallen to
# 0.70, the clip alone would freeze it there. But ratio * A = 0.80 is less than clipped * A = 0.91,
# and has a gradient: the ratio is pulled back up.
#
# The gradient in all cases, where x stands for ratio * A * grad log pi:
#
#                 ratio < 1 - eps    in between    ratio > 1 + eps
#     A > 0       x                  x             0
#     A < 0       0                  x             x
#
# A single step can still carry a ratio out of the range. In one pass of four steps, the default,
# the clip hardly acts; four passes without any clip ruin the policy (RESULTS.md).
#
# The loss is a mean over tokens, where the derivation has a sum for each response. The factor
# between the two, the mean length of a response, hardly changes from batch to batch.


def policy_loss(logprobs, old_logprobs, advantages, mask, clip_eps):
    """PPO's clipped objective (eq. 7 of its paper) as a loss: (B, T-1) each -> scalar, stats.
    Only logprobs has a gradient."""
    check_mask(mask, logprobs, old_logprobs, advantages)
    log_ratio = (logprobs - old_logprobs.detach())[mask]  # (N,)
    advantages = advantages.detach()[mask]
    ratio = bounded_exp(log_ratio)  # pi / old
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_eps, 1 + clip_eps) * advantages
    loss = -torch.min(unclipped, clipped).mean()
    return loss, {
        "policy_loss": loss.item(),
        "approx_kl": (ratio - 1 - log_ratio).mean().item(),  # k3 of KL(old || pi)
        # Ratios out of the range, whether or not the clip stops their gradient
        "clip_frac": ((ratio - 1).abs() > clip_eps).float().mean().item(),
        "ratio_max": ratio.max().item(),
    }


def value_loss(values, old_values, returns, mask, clip):
    """Half the mean squared error of the values: (B, T-1) each -> scalar, stats.

    Published code usually clips the values too, so that they do not follow one noisy batch too far.
    The loss is the larger of two errors: that of the value, and that of the value kept within
    `clip` of the old one. (The policy loss takes the smaller of two gains.) The first value of the
    header, 0.80, should become 1.35. If it moves to 1.10, its error is 0.25^2 / 2 = 0.03. With clip
    0.2 it may move to 1.00, where the error is 0.35^2 / 2 = 0.06. So 0.06 counts, and has no
    gradient, as the clipped value is a constant.
    """
    check_mask(mask, values, old_values, returns)
    values, old_values, returns = values[mask], old_values.detach()[mask], returns.detach()[mask]
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    errors, clipped_errors = 0.5 * (values - returns) ** 2, 0.5 * (clipped - returns) ** 2
    loss = torch.max(errors, clipped_errors).mean()
    return loss, {"value_loss": loss.item()}


# ------------------------------------------------------------
# 6. The loop
#
# A *rollout* is a batch of sampled responses and what is recorded about them, a dict:
#
#     (B, T)      tokens
#     (B,)        scores (less the penalties below), ended (not cut off)
#     (B, T-1)    mask, old_logprobs, old_values, ref_logprobs; phase 3 adds rewards, returns, and
#                 advantages, which multiply the ratios in the policy loss
#
# The old policy is not kept as a network, only as old_logprobs and old_values. In ppo_loss,
# logprobs and values are those of the policy as it is now.


@dataclass
class PolicyGradientConfig:
    """What any policy gradient on responses needs."""

    max_new_tokens: int = 48  # longest response, in tokens
    temperature: float = 1.0  # divides the logits, in sampling and in every log pi
    length_penalty: float = 0.0  # subtracted from the score for each token of a response
    missing_eos_penalty: float = 1.0  # subtracted if a response was cut off
    kl_coef: float = 0.1  # beta, the penalty per nat of KL to the reference
    k: int = 1  # responses to each prompt, for algorithms that compare them
    epochs: int = 1  # passes over each batch of responses
    minibatches: int = 4  # gradient steps per pass
    micro_batch: int = 0  # responses in memory at once; 0: all of them
    max_grad_norm: float = 1.0  # gradients are clipped to this norm

    def __post_init__(self):
        if not self.temperature > 0:
            raise ValueError(f"temperature ({self.temperature}): should be above 0")


@dataclass
class PPOConfig(PolicyGradientConfig):
    gamma: float = 1.0  # discount per token
    lam: float = 1.0  # GAE's lambda: 0 trusts the value function, 1 the sampled return
    whiten: bool = True  # advantages with mean 0 and standard deviation 1
    clip_eps: float = 0.2  # no gain from moving a ratio further from 1 than this; inf: no clip
    value_clip: float = 0.2  # no lower loss from moving a value further than this; inf: no clip
    vf_coef: float = 0.1  # weight of the loss of the value function
    entropy_coef: float = 0.0  # weight of an entropy bonus, which encourages varied responses
    kl_loss_coef: float = 0.0  # weight of a penalty on the KL per token in the loss (k2)

    def __post_init__(self):
        super().__post_init__()
        if not (0 <= self.gamma <= 1 and 0 <= self.lam <= 1):
            raise ValueError(f"gamma ({self.gamma}) and lam ({self.lam}): should be from 0 to 1")


def frozen_copy(model):
    """A copy that is never trained."""
    return copy.deepcopy(model).eval().requires_grad_(False)


@torch.no_grad()
def score_responses(score, tokens, mask, config, eos):
    """score(tokens, mask) -> (B,), such as `reward_model(tokens, row_lengths(mask))`. Returns the
    scores less the penalties, and which responses ended by themselves: (B,) each."""
    ended = tokens.gather(1, row_lengths(mask)[:, None] - 1).squeeze(1) == eos
    penalty = config.length_penalty * mask.sum(1) + config.missing_eos_penalty * ~ended
    return score(tokens, mask) - penalty, ended


def join_rollouts(pieces):
    """Rollouts -> one with all their rows, padded on the right."""
    rows = {name: [x for piece in pieces for x in piece[name]] for name in pieces[0]}
    return {
        name: pad_sequence(x, batch_first=True) if x[0].dim() else torch.stack(x)
        for name, x in rows.items()
    }


@torch.no_grad()
def rollout(policy, ref, score, prompts, config, generate=generate):
    """Phases 1 and 2: sample responses to the prompts (lists of ids) -> a rollout. generate:
    another sampler, if wanted."""
    size = config.micro_batch
    if 0 < size < len(prompts):
        pieces = [prompts[i : i + size] for i in range(0, len(prompts), size)]
        return join_rollouts([rollout(policy, ref, score, x, config, generate) for x in pieces])
    tokens, mask, old_logprobs, old_values = generate(
        policy, prompts, config.max_new_tokens, config.temperature
    )
    scores, ended = score_responses(score, tokens, mask, config, policy.config.eos)
    ref_logprobs, _, _ = evaluate_actions(ref, tokens, mask, config.temperature)
    batch = {"tokens": tokens, "mask": mask, "scores": scores, "ended": ended}
    batch |= {"old_logprobs": old_logprobs, "old_values": old_values}
    return batch | {"ref_logprobs": ref_logprobs}


@torch.no_grad()
def center_values(policy, batch):
    """Before the first update, shift all values so that their mean is the mean score of a rollout.
    Otherwise, if the scores are far from 0, many updates would only learn a constant."""
    mean_value = masked_mean(batch["old_values"], batch["mask"])
    policy.value_head.bias += batch["scores"].mean() - mean_value


def compute_advantages(batch, config):
    """Phase 3: a rollout -> rewards, returns and advantages, (B, T-1) each."""
    mask, old_logprobs = batch["mask"], batch["old_logprobs"]
    rewards = kl_adjusted_rewards(
        batch["scores"], old_logprobs, batch["ref_logprobs"], mask, config.kl_coef
    )
    advantages, returns = gae(rewards, batch["old_values"], mask, config.gamma, config.lam)
    if config.whiten:
        advantages = whiten(advantages, mask)
    return {"rewards": rewards, "returns": returns, "advantages": advantages}


def ppo_loss(policy, batch, config):
    """The loss of some responses, a mean over their tokens -> scalar, stats."""
    tokens, mask, old_logprobs = batch["tokens"], batch["mask"], batch["old_logprobs"]
    logprobs, values, entropy = evaluate_actions(
        policy, tokens, mask, config.temperature, with_entropy=config.entropy_coef > 0
    )
    loss, stats = policy_loss(logprobs, old_logprobs, batch["advantages"], mask, config.clip_eps)
    value_term, value_stats = value_loss(
        values, batch["old_values"], batch["returns"], mask, config.value_clip
    )
    k2 = masked_mean(0.5 * (logprobs - batch["ref_logprobs"]) ** 2, mask)
    bonus = config.entropy_coef * masked_mean(entropy, mask)
    loss = loss + config.vf_coef * value_term + config.kl_loss_coef * k2 - bonus
    return loss, {"loss": loss.item(), **stats, **value_stats}


def gradient_step(optimizer, max_grad_norm):
    """Clip the accumulated gradient, and take a step -> its norm before clipping.
    FloatingPointError, before any weight changes, if the norm is not finite."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = nn.utils.clip_grad_norm_(parameters, max_grad_norm).item()
    if not math.isfinite(norm):
        raise FloatingPointError(f"the norm of the gradient is {norm}")
    optimizer.step()
    return norm


def mean_stats(weighted):
    """[(share, stats), ...] -> stats: the weighted means (for ratio_max: the maximum)."""
    means = {name: sum(share * x[name] for share, x in weighted) for name in weighted[0][1]}
    if "ratio_max" in means:
        means["ratio_max"] = max(x["ratio_max"] for _, x in weighted)
    return means


def accumulate_gradient(loss_of, rows, micro_batch, count):
    """loss_of(rows)[0].backward(), for at most micro_batch rows (0: all) at a time -> stats.

    loss_of(rows) -> loss, stats: means over the count(rows) tokens, or pairs, in the rows.
    """
    weighted, size = [], micro_batch or len(rows)
    for i in range(0, len(rows), size):
        piece = rows[i : i + size]
        loss, stats = loss_of(piece)
        share = count(piece) / count(rows)
        (share * loss).backward()
        weighted.append((share, stats))
    return mean_stats(weighted)


def ppo_update(policy, optimizer, batch, config, loss=ppo_loss):
    """Phase 4: train policy and values in epochs x minibatches gradient steps -> mean stats."""
    mask, steps = batch["mask"], []
    if config.minibatches > len(mask):
        raise ValueError(f"{config.minibatches} minibatches of only {len(mask)} responses")

    def loss_of(indices):
        return loss(policy, {name: x[indices] for name, x in batch.items()}, config)

    def count_tokens(indices):
        return mask[indices].sum().item()

    for _ in range(config.epochs):
        shuffled = torch.randperm(len(mask), device=mask.device)
        for indices in shuffled.tensor_split(config.minibatches):
            optimizer.zero_grad()
            stats = accumulate_gradient(loss_of, indices, config.micro_batch, count_tokens)
            stats["grad_norm"] = gradient_step(optimizer, config.max_grad_norm)
            steps.append(stats)
    return mean_stats([(1 / len(steps), stats) for stats in steps])


def explained_variance(values, returns, mask):
    """1 - Var(returns - values) / Var(returns): 1 is perfect, 0 no better than the mean."""
    check_mask(mask, values, returns)
    unexplained = (returns - values)[mask].var(correction=0)
    return (1 - unexplained / (returns[mask].var(correction=0) + 1e-8)).item()


def batch_metrics(batch, config):
    """What to watch in a batch: means over its responses or their tokens. rlhf_reward estimates J.

    In a healthy run, score rises; kl climbs to a few nats and stays; entropy falls, but not to 0,
    where only one answer is left. If kl jumps or climbs on, read some answers: this may be reward
    hacking, and kl_coef too low. docs/using.md says more.
    """
    mask, scores, old_logprobs = batch["mask"], batch["scores"], batch["old_logprobs"]
    kl, kl_k3 = kl_per_response(old_logprobs, batch["ref_logprobs"], mask)
    means = {"score": scores, "kl": kl, "kl_k3": kl_k3, "rlhf_reward": scores - config.kl_coef * kl}
    means["entropy"] = -old_logprobs[mask]  # an estimate of E[-log pi]
    means |= {"response_length": mask.sum(1).float(), "eos_rate": batch["ended"].float()}
    stats = {name: x.mean().item() for name, x in means.items()}
    if "returns" in batch:
        old_values, returns = batch["old_values"], batch["returns"]
        stats["explained_variance"] = explained_variance(old_values, returns, mask)
    return stats | {"kl_coef": config.kl_coef}


# ------------------------------------------------------------
# `python minippo.py`: a tiny GPT learns to write what a function likes.


def trace(batch, row, spell):
    """One response as {title: list}: the numbers of the header's table, as far as the batch has
    them; the advantages are those used in the loss. spell: id -> text."""
    x = {name: numbers[row] for name, numbers in batch.items()}
    x["kl"] = x["old_logprobs"] - x["ref_logprobs"]
    titles = {"old_logprobs": "log pi", "ref_logprobs": "log ref", "kl": "KL", "rewards": "reward"}
    titles |= {"old_values": "value", "returns": "return", "advantages": "advantage"}
    titles |= {"logprobs": "log pi now"}
    columns = {"action": [spell(i) for i in x["tokens"][1:][x["mask"]].tolist()]}
    for name, title in titles.items():
        if name in x:
            columns[title] = x[name][x["mask"]].tolist()
    return columns


def table(columns):
    """{title: texts or numbers} -> lines of text."""
    rows = [columns, *zip(*columns.values())]
    cells = [[x if isinstance(x, str) else f"{x:z.2f}" for x in row] for row in rows]  # no -0.00
    return ["".join(f"{cell:>10}" for cell in row) for row in cells]


LETTERS = [*"abcdefghijklmnopqrstuvwxyz", "<eos>"]


def turns_score(tokens, mask):
    """Vowels and consonants should alternate (<eos> is a consonant): (B, T), (B, T-1) -> (B,)."""
    vowel = sum(tokens == LETTERS.index(c) for c in "aeiou")
    turns = vowel[:, 1:] != vowel[:, :-1]  # at t: is token t + 1 of another kind than token t?
    return (torch.where(turns, 0.5, -0.5) * mask).sum(1)


def main():
    torch.manual_seed(0)
    iterations, lr, config = 100, 3e-3, PPOConfig(max_new_tokens=8)
    policy = GPT(GPTConfig(len(LETTERS), context=16, layers=2, channels=32))
    ref = frozen_copy(policy)
    optimizer = torch.optim.Adam(policy.parameters(), lr)
    prompts = [[letter] for letter in range(26)]
    center_values(policy, rollout(policy, ref, turns_score, prompts, config))
    for step in range(iterations):
        optimizer.param_groups[0]["lr"] = lr * (1 - step / iterations)
        prompts = torch.randint(26, (128, 1)).tolist()
        batch = rollout(policy, ref, turns_score, prompts, config)  # phases 1 and 2
        batch |= compute_advantages(batch, config)  # phase 3
        ppo_update(policy, optimizer, batch, config)  # phase 4
        if step % 20 == 0 or step + 1 == iterations:
            stats = batch_metrics(batch, config)
            rows = zip(batch["tokens"][:4].tolist(), row_lengths(batch["mask"]).tolist())
            words = ["".join(LETTERS[i] for i in ids[:n] if i < 26) for ids, n in rows]
            watch = "  ".join(f"{name} {stats[name]:5.2f}" for name in ("score", "kl", "entropy"))
            print(f"iteration {step + 1:3}  {watch}  {' '.join(words)}")
    print("\n".join(table(trace(batch, 0, LETTERS.__getitem__))))


if __name__ == "__main__":
    main()
