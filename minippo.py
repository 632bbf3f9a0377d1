"""minippo: RLHF with PPO, from scratch, in one file.

RLHF (reinforcement learning from human feedback) has three stages. Supervised fine-tuning (SFT,
train_sft.py) teaches a language model to imitate demonstrations. A reward model (train_rm.py)
learns which of two answers people prefer, and gives each answer a score. PPO (train_ppo.py) raises
the scores, but keeps the model close to the SFT model. For prompts x and responses y (also called
answers or completions), PPO maximises

    J = E[ score(x, y) ] - beta * KL(pi || ref)      (InstructGPT, arXiv:2203.02155, eq. 2)

    pi       the *policy*: the language model, seen as a rule for choosing the next token (a
             distribution over all tokens, not only the likeliest one)
    ref      the *reference*: the SFT model, frozen
    log pi   the log-probability of one token; log pi(y): of a whole response, the sum over tokens
    E        the mean over prompts, and over responses that pi writes
    KL       the Kullback-Leibler divergence, E[log pi(y) - log ref(y)]: how far the policy has
             moved, in nats (the unit of natural logarithms)
    beta     the penalty per nat; kl_coef in the code

PPO repeats four phases:

    prompts --> 1. policy --> responses, log pi, values -----------------+
                     ^            |                                      |
                     |            +--> 2. reward model ----> scores -----+
                     |            +-->    reference -------> log ref ----+
                     |                                                   v
                     +---- 4. update: the clipped loss <---- 3. rewards, advantages

In code (section 6):

    batch = rollout(policy, ref, score, prompts, config)     # phases 1 and 2
    batch |= compute_advantages(batch, config)               # phase 3
    ppo_update(policy, optimizer, batch, config)             # phase 4

Four models take part:

    policy            starts as the SFT model; trained          log pi of each token
    value function    a second head on the policy; trained      reward still to come
    reference         the SFT model; frozen                     log ref of each token
    reward model      SFT model, new head; trained, now frozen  one score per response

A *score* rates a whole response, a *reward* belongs to one token (except in the name *reward
model*). Shapes: B rows in a batch, T columns, C channels, H attention heads, V tokens in the
vocabulary, N response tokens.

One convention holds everywhere. A row is a prompt, its response, then padding, and starts at column
0. Attention is causal, so no response sees padding. Choosing token t + 1 is the *action* taken in
the *state* "tokens 0 .. t have been read". Everything about this choice is stored at index t: log
pi at index 1 is that of token 2, "sweet". An example, with the prompt "Bees eat", a score of 1.40
and beta 0.1 (a dot means: not used):

    index t      0      1      2      3      4      5
    tokens       Bees   eat    sweet  nectar <eos>  pad     (B, T); <eos> is the end token
    action       eat    sweet  nectar <eos>  pad            tokens[:, t + 1]; (B, T-1), as all below
    mask         .      yes    yes    yes    .              does the action belong to the response?
    log pi       .     -0.50  -1.20  -0.10   .              old_logprobs: when sampled
    log ref      .     -1.00  -1.00  -0.30   .              ref_logprobs: under the reference
    d            .      0.50  -0.20   0.20   .              log pi - log ref; its mean is the KL
    reward       .     -0.05   0.02   1.38   .              -beta * d; the last gets the score too
    value        .      0.80   1.00   1.50   .              prediction: sum of the rewards to come

Phase 3 asks how much better than expected each action turned out. The value after the last action
counts as 0. (Gamma and lam, see section 5, are 1 here.)

    delta        .      0.15   0.52  -0.12   .              reward + next value - value
    advantage    .      0.55   0.40  -0.12   .              sum of this delta and all later ones
    return       .      1.35   1.40   1.38   .              advantage + value: rewards still to come
    whitened     .      0.95   0.43  -1.38   .              scaled to mean 0, variance 1 in a batch

Phase 4 makes actions with a whitened advantage above 0 more probable, and those below 0 less
probable. (Here the batch is one response. The advantage of <eos> is below 0: 1.50 had been
predicted, and 1.38 came.)
"""

import copy
import math
from collections import defaultdict
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

# ------------------------------------------------------------
# 1. The networks
#
# GPT-2 (Radford et al., 2019) without dropout, which would make sampling and update disagree about
# log pi. (If you know nanoGPT, read what is new, the cache in Attention and the mask and the value
# head in GPT, and go on to section 2.)


@dataclass
class GPTConfig:
    vocab_size: int = 1024  # tokens in the vocabulary; the last is the end token
    context: int = 128  # maximum length of prompt plus response, in tokens
    layers: int = 4  # transformer blocks
    heads: int = 4  # attention heads
    channels: int = 96  # width of the model; a multiple of heads
    bfloat16: bool = False  # 16 bits inside the blocks

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

    def forward(self, hidden, cache=None):
        """(B, T, C) -> (B, T, C). cache: an empty list, or the keys and values of the earlier
        positions, and then T must be 1. This call adds its own."""
        B, T, C = hidden.shape
        q, k, v = self.qkv(hidden).split(C, dim=2)
        q = q.view(B, T, self.heads, -1).transpose(1, 2)  # (B, H, T, C/H)
        k = k.view(B, T, self.heads, -1).transpose(1, 2)
        v = v.view(B, T, self.heads, -1).transpose(1, 2)
        if cache is not None:
            if cache:
                k = torch.cat((cache[0], k), dim=2)  # (B, H, positions so far, C/H)
                v = torch.cat((cache[1], v), dim=2)
            cache[:] = [k, v]
        # A single query is the last position: it may read all of them.
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=T > 1)
        return self.out(mixed.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    """Add attention, then an MLP, each of the normalised input: (B, T, C) -> (B, T, C)."""

    def __init__(self, config):
        super().__init__()
        C = config.channels
        self.norm1 = nn.LayerNorm(C)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(C)
        self.mlp = nn.Sequential(nn.Linear(C, 4 * C), nn.GELU("tanh"), nn.Linear(4 * C, C))

    def forward(self, hidden, cache=None):
        hidden = hidden + self.attention(self.norm1(hidden), cache)
        return hidden + self.mlp(self.norm2(hidden))


class Trunk(nn.Module):
    """The body below the heads: tokens (B, T) -> hidden states (B, T, C). cache: see Attention, a
    list for each block. start: the position of the first token."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.channels)
        self.position_embedding = nn.Embedding(config.context, config.channels)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.channels)
        std = 0.02 * math.sqrt(768 / config.channels)  # GPT-2's 0.02 is for a width of 768
        for name, parameter in self.named_parameters():
            if name.endswith(("out.weight", "mlp.2.weight")):  # smaller: all blocks add to hidden
                nn.init.normal_(parameter, std=std / math.sqrt(2 * config.layers))
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens, cache=None, start=0):
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        hidden = self.token_embedding(tokens) + self.position_embedding(positions)
        with torch.autocast(hidden.device.type, torch.bfloat16, self.config.bfloat16):
            for i, block in enumerate(self.blocks):
                hidden = block(hidden, None if cache is None else cache[i])
        return self.norm(hidden)


class GPT(nn.Module):
    """The policy: which token next? And the value function: how much reward is still to come?"""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.trunk = Trunk(config)
        self.lm_head = nn.Linear(config.channels, config.vocab_size, bias=False)
        self.lm_head.weight = self.trunk.token_embedding.weight  # shared, as in GPT-2
        self.value_head = nn.Linear(config.channels, 1)
        nn.init.zeros_(self.value_head.weight)  # all values start at 0: section 5.6 says why
        nn.init.zeros_(self.value_head.bias)

    def forward(self, tokens, mask):
        """tokens and a mask of the same shape -> logits (N, V), values (N,) of the N states where
        the mask is true. (Logits of all states would need much memory: V is large.)"""
        hidden = self.trunk(tokens)[mask]  # (N, C)
        return self.lm_head(hidden), self.value_head(hidden).squeeze(-1)


def frozen_copy(model):
    """A copy that is never trained."""
    return copy.deepcopy(model).eval().requires_grad_(False)


# ------------------------------------------------------------
# 2. Log-probabilities and masks
#
# Sums and means run over response tokens only: numbers[mask] selects them. If prompts or padding
# leaked in, they would be trained on, and count in every mean and in the KL. (Padding is id 0, an
# ordinary token, which no response reads and no sum contains.)


def check_shapes(*tensors, mask=None):
    """ValueError if the shapes differ (PyTorch would broadcast (B, 1)), if a tensor is in 16 bits
    (a log-probability of -10 would be off by up to 0.03), or if the mask is not boolean (numbers 0
    and 1 would pick rows 0 and 1). Most functions below call it."""
    if mask is not None:
        tensors = (*tensors, mask)
    shapes = [tuple(tensor.shape) for tensor in tensors]
    dtypes = [tensor.dtype for tensor in tensors]
    if len(set(shapes)) > 1 or torch.float16 in dtypes or torch.bfloat16 in dtypes:
        raise ValueError(f"wanted equal shapes and no 16 bits, got {shapes}, {dtypes}")
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError(f"wanted a boolean mask, got {mask.dtype}")


def row_lengths(mask):
    """mask (B, T-1) -> (B,): tokens of prompt and response. The last action, which chooses the last
    token, is at index length - 2. ValueError if a response is empty."""
    if not mask.any(1).all():
        raise ValueError("a response is empty: it needs a token, at least the end token")
    return (mask * torch.arange(mask.shape[1], device=mask.device)).amax(1) + 2


def pad(sequences, device="cpu"):
    """B lists of ids -> tokens (B, T), rows padded on the right, and their lengths (B,)."""
    lengths = [len(ids) for ids in sequences]
    tokens = [ids + [0] * (max(lengths) - len(ids)) for ids in sequences]
    return torch.tensor(tokens, device=device), torch.tensor(lengths, device=device)


def pad_completions(rows, device="cpu"):
    """B pairs (prompt, completion) of lists of ids -> tokens (B, T), and the mask (B, T-1): at t,
    is token t + 1 part of the completion? For rows that are not sampled, as in SFT. Needs pad."""
    tokens, lengths = pad([prompt + completion for prompt, completion in rows], device)
    prompt_lengths = torch.tensor([len(prompt) for prompt, _ in rows], device=device)
    column = torch.arange(1, tokens.shape[1], device=device)  # of the chosen token
    mask = (column >= prompt_lengths[:, None]) & (column < lengths[:, None])
    return tokens, mask


def masked_mean(numbers, mask):
    """Mean over the mask: (B, T-1) each -> scalar."""
    check_shapes(numbers, mask=mask)
    return numbers[mask].mean()


def gather_logprobs(logits, targets, temperature=1.0):
    """log softmax(logits / temperature) at the targets, in nats: (..., V), (...) -> (...)."""
    if logits.shape[:-1] != targets.shape:  # gather would accept fewer
        raise ValueError(f"logits {logits.shape} do not fit targets {targets.shape}")
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # never in 16 bits
    logprobs = torch.log_softmax(logits / temperature, -1)
    return logprobs.gather(-1, targets[..., None]).squeeze(-1)


def evaluate_actions(policy, tokens, mask, temperature=1.0):
    """tokens (B, T), mask (B, T-1) -> log pi of the actions, in nats, and the values of the states
    before them: (B, T-1) each, 0 outside the mask.

    The tokens are those of the row, not what the policy would sample (*teacher forcing*). The mean
    of -log pi over the mask is the loss of SFT. policy: as GPT, (tokens, mask) -> logits (N, V),
    values (N,). Needs gather_logprobs.
    """
    check_shapes(tokens[:, 1:], mask=mask)
    states, actions = tokens[:, :-1], tokens[:, 1:]
    logits, values_inside = policy(states, mask)
    logprobs_inside = gather_logprobs(logits, actions[mask], temperature)  # (N,)
    logprobs = torch.zeros(mask.shape, dtype=logprobs_inside.dtype, device=mask.device)
    values = torch.zeros_like(logprobs)
    logprobs[mask] = logprobs_inside
    values[mask] = values_inside.to(values.dtype)
    return logprobs, values


# ------------------------------------------------------------
# 3. Sampling
#
# To add a token, a transformer need not reread the row: attention needs only the keys and values of
# the earlier tokens, which the *KV cache* keeps.


def draw(logits, temperature=1.0):
    """A random token from each softmax(logits / temperature): (B, V) -> (B,).

    Cut the interval from 0 to 1 into a piece for each token, as long as its probability. Take the
    token whose piece contains a random number u (*inverse transform sampling*). torch.multinomial
    does the same, but has returned tokens of probability 0 (pytorch issue 50034).
    """
    probs = (logits.float() / temperature).softmax(-1)
    ends = probs.cumsum(-1, dtype=torch.float64)  # of the pieces: (B, V)
    u = torch.rand(len(ends), 1, dtype=torch.float64, device=ends.device) * ends[:, -1:]
    return torch.searchsorted(ends, u, right=True).squeeze(1)


@torch.no_grad()
def generate(policy, prompts, max_new_tokens, temperature=1.0):
    """Sample a response to each prompt, until the end token, max_new_tokens or the end of the
    context. prompts: B lists of 1 to context - 1 ids (else ValueError) -> tokens (B, T), and the
    mask of the sampled ones, (B, T-1). Needs draw.

    The rows advance together. Prompts of 1, 2 and 4 tokens (p), sampled tokens (s), <eos> (e):

        column    0  1  2  3  4  5    Column 0 is read for all rows, then a token is drawn for
        row 0     p  s  s  e          column 1; rows 1 and 2 discard it and keep their prompt's.
        row 1     p  p  s  s  s  s    Row 0 ends at column 3 and drops out. Row 1 is cut off by
        row 2     p  p  p  p  s  e    max_new_tokens = 4.

    Sampling starts at the shortest prompt and reads the others token by token: prompts of very
    different lengths are slow.
    """
    context = policy.config.context
    device = policy.lm_head.weight.device
    if not all(0 < len(prompt) < context for prompt in prompts):
        raise ValueError(f"a prompt should have 1 to {context - 1} tokens, the context less one")
    columns = min(max(len(prompt) for prompt in prompts) + max_new_tokens, context)
    padded = [list(prompt) + [0] * (columns - len(prompt)) for prompt in prompts]
    tokens = torch.tensor(padded, device=device)
    mask = torch.zeros_like(tokens[:, 1:], dtype=torch.bool)
    prompt_lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    limits = (prompt_lengths + max_new_tokens).clamp(max=context)
    rows = torch.arange(len(prompts), device=device)  # those that have not ended
    cache = [[] for _ in range(policy.config.layers)]
    begin = 0
    t = int(prompt_lengths.min())
    while len(rows) > 0:  # read the columns from begin to t - 1, and draw a token for column t
        hidden = policy.trunk(tokens[rows, begin:t], cache, begin)[:, -1]  # (rows, C)
        token = draw(policy.lm_head(hidden), temperature)  # (rows,)
        responding = prompt_lengths[rows] <= t
        tokens[rows, t] = torch.where(responding, token, tokens[rows, t])
        mask[rows, t - 1] = responding
        ended = responding & ((token == policy.config.eos) | (t + 1 == limits[rows]))
        if ended.any():
            rows = rows[~ended]
            cache = [[tensor[~ended] for tensor in block] for block in cache]
        begin = t
        t += 1
    return tokens[:, :t], mask[:, : t - 1]


# ------------------------------------------------------------
# 4. The reward model
#
# Usually two answers to a prompt are sampled from the SFT model, and a person picks the better one.
# (This is easier than giving grades.) In the model of Bradley and Terry (1952), a is
# preferred to b with probability sigmoid(score(a) - score(b)), so only differences count. The loss
# is -log of this probability. For a margin score(a) - score(b) of 2, 0 or -2, it is 0.13, 0.69 or
# 2.13.
#
# Why a model? PPO needs a score for each response as soon as it is sampled. But these responses
# differ from the answers in the pairs (*distribution shift*), so their scores may be wrong: too
# high, for example, for long, flattering or evasive answers. Learning to exploit this is *reward
# hacking* or *overoptimisation*: the score rises, and the text gets worse. Hence the penalty on the
# KL, and the cap on the scores.


class RewardModel(nn.Module):
    """Scores a row, prompt and response, with one number: how much would people like it?

    After training, train_rm.py sets `mean` and `std`, so that the scores of the SFT model's answers
    have mean 0 and standard deviation 1: then beta means the same for any reward model. `cap` is
    the score that one in a hundred of these answers exceeds. Scores above it are often wrong, and
    are lowered to it (arXiv:2502.18770).
    """

    def __init__(self, gpt):
        super().__init__()
        self.config = gpt.config
        self.trunk = copy.deepcopy(gpt.trunk)
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


def reward_model_loss(chosen_scores, rejected_scores):
    """(B,), (B,) -> the mean negative log-likelihood of the choices (InstructGPT, eq. 1), stats."""
    check_shapes(chosen_scores, rejected_scores)
    margin = chosen_scores - rejected_scores
    loss = -F.logsigmoid(margin).mean()
    accuracy = (margin.sign().mean() + 1) / 2  # a tie is half right
    return loss, {"loss": loss.item(), "accuracy": accuracy.item(), "margin": margin.mean().item()}


# ------------------------------------------------------------
# 5. From the policy gradient to PPO (Schulman et al., arXiv:1707.06347), and to PPO for language
# models (Ziegler et al., arXiv:1909.08593)
#
# 5.1 The policy gradient
#
# SFT shows the model which token to write in every state. Here the policy chooses the tokens, and
# gets one score at the end (a *sparse reward*). We want to maximise E[score]. A random draw has no
# gradient, but its probability does. With respect to the weights of the policy,
#
#     grad E[score] = grad sum_y pi(y) * score(y) = sum_y grad pi(y) * score(y)
#                   = sum_y pi(y) * grad log pi(y) * score(y)   because grad pi = pi * grad log pi
#                   = E[ grad log pi(y) * score(y) ]            (the log-derivative trick)
#
# This is the *policy gradient*, a mean over samples: SFT on the policy's own responses, each
# weighted by its score. A loss is minimised, so it gets a minus: REINFORCE (Williams, 1992)
#
#     tokens, mask = generate(policy, prompts, max_new_tokens)
#     logprobs, _ = evaluate_actions(policy, tokens, mask)
#     scores = score(prompts, tokens, mask)
#     loss = -(logprobs.sum(1) * scores).mean()    # the sum is log pi(y)
#
# (The next state is always the row plus the chosen token: there is no other chance in pi(y).)
# Sampling is how the policy *explores*: what is never sampled is never rewarded. A mean over
# samples is noisy, and most of what follows fights this noise. Four changes lead from here to PPO.
#
# 5.2 The first change: the KL joins the reward
#
# In J, score(y) - beta * (log pi(y) - log ref(y)) replaces the score. As log pi(y) has a gradient
# too, the product rule gives one more term:
#
#     grad J = E[ grad log pi(y) * (score(y) - beta * (log pi(y) - log ref(y))) ]
#              - beta * E[ grad log pi(y) ]
#
# The last term is 0: it is the sum over y of pi(y) * grad log pi(y) = grad pi(y), and the sum of
# all pi(y) is 1, whose gradient is 0. The logarithms are sums over the tokens of y, so the KL
# splits into a reward for each token, -beta * (log pi - log ref). The last one gets the score too.


def kl_adjusted_rewards(scores, logprobs, ref_logprobs, mask, kl_coef):
    """scores (B,), the rest (B, T-1) -> the reward of each token, (B, T-1): it pays beta per nat of
    its KL, and the last one gets the score. Needs row_lengths."""
    check_shapes(logprobs, ref_logprobs, mask=mask)
    check_shapes(scores, mask=mask[:, 0])  # one score per row
    rewards = torch.where(mask, -kl_coef * (logprobs - ref_logprobs), 0.0)
    rows = torch.arange(len(mask), device=mask.device)
    rewards[rows, row_lengths(mask) - 2] += scores
    return rewards


# 5.3 The second and the third change: later rewards only, and a baseline
#
# How much credit does each token deserve (*credit assignment*)? So far each grad log pi is
# multiplied by the sum of all rewards of its response (its *episode* or *trajectory*). Two changes
# usually make this gradient less noisy.
#
# Drop the earlier rewards. When a token is chosen, the rewards before it are constants. Given the
# state, E[grad log pi] is 0 (as in 5.2), and a constant times it is 0 too. So grad log pi is
# multiplied by the *return*: the sum of the token's own and all later rewards.
#
# Subtract a baseline. For the same reason, any number that does not depend on the action may be
# subtracted from the return. (Without a baseline, scores that are all positive push up every
# response, good or bad.) PPO subtracts the *value*, a prediction of the return from this state. The
# difference is the *advantage* A. (Textbooks write A = Q - V, where Q is the expected return once
# the action is chosen.) The value function is the *critic*, the policy the *actor*.
#
# 5.4 How far to trust the values: generalised advantage estimation (GAE, arXiv:1506.02438)
#
# return - value uses the whole sampled future (*Monte Carlo*): right on average, but noisy. The
# other extreme looks one step ahead, and trusts the next value for the rest (*bootstrapping*). With
# rewards r, values v and a discount gamma, it is the *temporal difference error*
#
#     delta_t = r_t + gamma v_{t+1} - v_t
#
# It is less noisy, but biased where values are wrong. GAE lies in between: it adds the later
# deltas, each with a smaller weight (eq. 16):
#
#     A_t = delta_t + (gamma lam) delta_{t+1} + (gamma lam)^2 delta_{t+2} + ...
#         = delta_t + (gamma lam) A_{t+1}
#
# The response of the header:       lam 1      0.55   0.40  -0.12     return - value
#                                   lam 0.9    0.52   0.41  -0.12
#                                   lam 0      0.15   0.52  -0.12     delta
#
# With lam = 1 and gamma = 1 the values in between cancel: delta_0 + delta_1 + ... is
# r_0 + r_1 + ... - v_0. (Below 1, A averages the estimates that look 1, 2, 3, ... steps ahead, with
# weights that fall by the factor lam.) The default here is 1. For responses of hundreds of tokens,
# 0.95 is a common first choice. With gamma below 1, later rewards count less; for text, 1 is usual.


def gae(rewards, values, mask, gamma, lam):
    """(B, T-1) each, the mask without gaps -> advantages, returns. The value after the last action
    counts as 0, even if the length limit cut the response off: the score is paid by then."""
    check_shapes(rewards, values, mask=mask)
    rewards = torch.where(mask, rewards, 0.0)
    values = torch.where(mask, values, 0.0)
    advantages = torch.zeros_like(rewards)
    advantage = torch.zeros_like(rewards[:, 0])
    next_value = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * advantage
        next_value = values[:, t]
        advantages[:, t] = advantage
    advantages = torch.where(mask, advantages, 0.0)  # not those of the prompt
    # The values are trained towards these returns, which with lam below 1 are partly predictions.
    returns = torch.where(mask, advantages + values, 0.0)
    return advantages, returns


def whiten(numbers, mask):
    """Shift and scale to mean 0 and standard deviation 1 over the mask; 0 elsewhere: (B, T-1).

    The mean is one more baseline. The policy loss no longer depends on the scale of the rewards,
    though the value loss still does. But the advantages of nearly equal responses are scaled up,
    noise included. Returns are never whitened: the values must learn their true size.
    """
    check_shapes(numbers, mask=mask)
    mean = numbers[mask].mean()
    std = numbers[mask].std(correction=0)
    rounding = 1e-5 * mean.abs() + 1e-8  # if all are equal, their std is only a rounding error
    return torch.where(mask, (numbers - mean) / (std + rounding), 0.0)


# 5.5 The fourth change: several gradient steps on one batch, because sampling is slow
#
# A pass over the batch is cut into minibatches, with a gradient step for each. At the first step,
# the policy being trained is still the one that sampled the batch (*on-policy*). From then on, the
# one that sampled is called the *old* policy, and the steps are *off-policy*. The *ratio* pi / old
# corrects for that, choice by choice (*importance sampling*). For an action a:
#
#     E_old[ratio * A] = sum_a old(a) (pi(a) / old(a)) A(a) = E_pi[A]
#
# (States and advantages are not corrected: they are those of old, and go stale.) The gradient of
# ratio * A is ratio * A * grad log pi, because grad pi = pi * grad log pi. At ratio 1, where an
# update begins, this is the policy gradient. Far from 1, a few large ratios dominate. So PPO clips
# the ratio.
#
# Do not confuse the old policy with the reference: the ratio compares pi with old, the KL compares
# pi with ref. The clip does not replace the KL. It restrains each update (as a constraint on
# KL(old || pi) did in TRPO, PPO's forerunner), but small steps add up.
#
# For each token PPO maximises the smaller of ratio * A and clipped * A, where "clipped" is the
# ratio limited to the range 1 - eps to 1 + eps. This is the response of the header after a gradient
# step, with eps 0.2 (computed from unrounded numbers):
#
#     log pi now    -0.25  -1.10  -0.40     of the same actions
#     ratio          1.28   1.11   0.74     pi / old: exp(log pi now - log pi)
#     A              0.95   0.43  -1.38     the whitened advantage
#     clipped        1.20   1.11   0.80
#     ratio * A      1.22   0.47  -1.02
#     clipped * A    1.14   0.47  -1.11     here the smaller one, or equal
#     gradient       0      0.47   0        what multiplies grad log pi
#
# The loss is -(1.14 + 0.47 - 1.11) / 3 = -0.17. Where the clipped product is the smaller one, there
# is no gradient, because a clipped ratio is a constant: the first token has risen enough, the last
# has fallen enough. Why not always the clipped one? Tokens share the weights, so steps for others
# may have moved a ratio the wrong way. If the ratio of the first token (A = 0.95) had fallen to
# 0.70, ratio * A = 0.67 would be less than clipped * A = 0.76, and have a gradient: the ratio is
# pulled back up. The clip alone would freeze it there.
#
# What multiplies grad log pi in all cases:
#
#                 ratio < 1 - eps    in between    ratio > 1 + eps
#     A > 0       ratio * A          ratio * A     0
#     A < 0       0                  ratio * A     ratio * A
#
# A single step can still carry a ratio out of the range. In one pass of four steps, the default,
# the clip rarely acts: with lam = 1, PPO is then almost REINFORCE with a baseline. This is enough
# for small tasks, as here. In four passes (--epochs 4) the clip is needed: on a scale from 0, the
# SFT model, to 1, the best possible policy (*optimality*), PPO gets 0.89 with this clip and -0.59
# without it (200 iterations, --value_clip inf; RESULTS.md).


def policy_loss(logprobs, old_logprobs, advantages, clip_eps):
    """PPO's clipped objective (eq. 7), negated -> losses, stats, to be averaged over the mask:
    (B, T-1) each. Only logprobs has a gradient."""
    check_shapes(logprobs, old_logprobs, advantages)
    if torch.is_grad_enabled() and not logprobs.requires_grad:
        raise ValueError("logprobs has no gradient: is it old_logprobs, or from a frozen network?")
    log_ratio = (logprobs - old_logprobs.detach()).clamp(max=20)  # exp must not overflow
    ratio = log_ratio.exp()  # pi / old
    unclipped = ratio * advantages.detach()
    clipped = ratio.clamp(1 - clip_eps, 1 + clip_eps) * advantages.detach()
    losses = -torch.min(unclipped, clipped)
    return losses, {
        "policy_loss": losses,
        "approx_kl": ratio - 1 - log_ratio,  # KL(old || pi): k3 of section 5.7, d = -log_ratio
        "clip_frac": ((ratio - 1).abs() > clip_eps).float(),  # is the ratio out of range?
        "ratio": ratio,
    }


# 5.6 The value function
#
# It is trained beside the policy, to predict the returns of section 5.4. Four details help:
#
# - The weights of its head start at 0: random values would be noise in the advantages.
# - center_values() first sets its bias to the mean score (about the mean return, as the KL is 0).
#   Otherwise many updates may be spent on learning a constant. (Scores of our reward model have a
#   mean near 0. Those of your own function need not.)
# - The head has far to go: train_ppo.py trains it at 30 times the learning rate of the trunk.
# - Its gradient enters the trunk too, where vf_coef = 0.1 keeps it below that of the policy.
#
# Most published code also clips the loss of the values, and so does the default here. A large study
# found no evidence that this helps (Andrychowicz et al., arXiv:2006.05990).
#
# In theory values make the gradient less noisy. With batches of 128 short responses, as here, PPO
# hardly needs them (RESULTS.md): the mean of the batch is a good baseline already.


def value_loss(values, old_values, returns, clip):
    """Half the squared error of the values -> losses, stats, to be averaged over the mask: (B, T-1)
    each. Only values has a gradient.

    The loss is the larger of two errors: that of the value, and that of the value kept within
    `clip` of the old one, so that values do not follow one noisy batch too far. The first value of
    the header, 0.80, should become 1.35. If it moves to 1.10, its error is 0.25^2 / 2 = 0.03. With
    clip 0.2 it may move to 1.00, where the error is 0.35^2 / 2 = 0.06. So 0.06 counts, and has no
    gradient, as the clipped value is a constant.
    """
    check_shapes(values, old_values, returns)
    old_values = old_values.detach()
    returns = returns.detach()
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    errors = 0.5 * (values - returns) ** 2
    clipped_errors = 0.5 * (clipped - returns) ** 2
    losses = torch.max(errors, clipped_errors)
    return losses, {"value_loss": losses}


@torch.no_grad()
def center_values(policy, batch):
    """Before the first update, shift all values: their mean becomes the mean score of a rollout.
    Needs masked_mean."""
    mean_value = masked_mean(batch["old_values"], batch["mask"])
    policy.value_head.bias += batch["scores"].mean() - mean_value


# 5.7 The KL: how it is measured, and why it is in the reward
#
# The KL is 0 if pi and ref agree, and above 0 otherwise. With d = log pi - log ref of one sampled
# token there are three estimates (Schulman, "Approximating KL divergence"). The table has their
# means over the tokens that pi may choose in a state, and the mean gradient of each as a loss:
#
#                             mean     gradient            used in
#     k1 = d                  KL       0                   the reward; metric kl
#     k2 = d^2 / 2            near KL  of KL(pi || ref)    variations/kl_in_loss.py
#     k3 = exp(-d) - 1 + d    KL       of KL(ref || pi)    metrics; the loss of GRPO
#
# For the header's d, which are 0.50, -0.20 and 0.20, k2 is 0.125, 0.020 and 0.020, and k3 is 0.107,
# 0.021 and 0.019. k1 is often below 0. k3 never is, because exp(z) >= 1 + z, and near 0 it varies
# less. Its mean is the KL, because E[exp(-d)] = E[ref / pi] = sum ref = 1. The gradients are
# grad log pi times 1, d and 1 - exp(-d). (k1 is useless as a loss: that is the last term of 5.2. In
# the reward, it is a constant by which grad log pi is multiplied.)
#
# Why not in the loss? A token decides which states follow, and with them the later KL. In the
# reward, the return of a token contains its own d and all later ones. The gradient of a loss
# contains only its own: it ignores the states that the token leads to.
#
# KL(pi || ref) is a mean over what pi writes: an answer that ref hardly ever writes costs a lot,
# one that pi stops writing costs little. (If pi keeps only half of what ref writes, this costs
# log 2 = 0.69 nats. Losing variety like this is *mode collapse*.) The penalty contains an *entropy
# bonus*, a reward for variety: -beta * KL = beta * (entropy of pi) + beta * E[log ref].


def k3(d):
    """From d = log pi - log ref of tokens sampled from pi, of any shape."""
    d = d.clamp(min=-20)  # exp must not overflow
    return (-d).exp() - 1 + d


def kl_per_response(logprobs, ref_logprobs, mask):
    """k1, summed over the tokens of each response, in nats: (B, T-1) each -> (B,)."""
    check_shapes(logprobs, ref_logprobs, mask=mask)
    return torch.where(mask, logprobs - ref_logprobs, 0.0).sum(1)


# ------------------------------------------------------------
# 6. The loop
#
# A *rollout* is a batch of sampled responses and what is recorded about them, a dict:
#
#     (B, T)      tokens
#     (B,)        scores (less the penalties below), ended (not cut off)
#     (B, T-1)    mask, old_logprobs, old_values, ref_logprobs; phase 3 adds rewards, returns, and
#                 the (whitened) advantages, which multiply the ratios in the policy loss
#
# The old policy is not kept as a network, only as old_logprobs and old_values. Two penalties are
# subtracted from the scores: missing_eos_penalty if a response was cut off, as the policy might
# otherwise learn not to end at all, and length_penalty for each token.


@dataclass
class PPOConfig:
    max_new_tokens: int = 48  # longest response, in tokens
    temperature: float = 1.0  # divides the logits, in sampling and in every log pi
    length_penalty: float = 0.0  # subtracted from the score for each token of a response
    missing_eos_penalty: float = 1.0  # subtracted from the score if a response was cut off
    kl_coef: float = 0.1  # beta, the penalty per nat of KL to the reference
    gamma: float = 1.0  # discount per token
    lam: float = 1.0  # GAE's lambda: 0 trusts the value function, 1 the sampled return
    whiten: bool = True  # advantages with mean 0 and standard deviation 1
    clip_eps: float = 0.2  # the ratio is clipped to 1 plus or minus this; inf: no clip
    value_clip: float = 0.2  # a value is clipped to the old one plus or minus this; inf: no clip
    vf_coef: float = 0.1  # weight of the loss of the value function
    epochs: int = 1  # passes over each batch of responses
    minibatches: int = 4  # gradient steps per pass
    micro_batch: int = 0  # responses trained on at once, if memory is short; 0: a whole minibatch
    max_grad_norm: float = 1.0  # gradients are clipped to this norm


@torch.no_grad()
def rollout(policy, ref, score, prompts, config):
    """Phases 1 and 2: sample a response to each prompt (a list of ids), and record what the next
    phases need. score(prompts, tokens, mask) -> (B,); with a reward model that is
    reward_model(tokens, row_lengths(mask))."""
    tokens, mask = generate(policy, prompts, config.max_new_tokens, config.temperature)
    # Sampling has computed log pi too, but rounded differently. This way the first ratio is 1.
    old_logprobs, old_values = evaluate_actions(policy, tokens, mask, config.temperature)
    ref_logprobs, _ = evaluate_actions(ref, tokens, mask, config.temperature)
    last = tokens.gather(1, row_lengths(mask)[:, None] - 1).squeeze(1)
    ended = last == policy.config.eos
    penalties = config.length_penalty * mask.sum(1) + config.missing_eos_penalty * ~ended
    scores = score(prompts, tokens, mask)
    check_shapes(scores, penalties)
    return {
        "tokens": tokens,
        "mask": mask,
        "scores": scores - penalties,
        "ended": ended,
        "old_logprobs": old_logprobs,
        "old_values": old_values,
        "ref_logprobs": ref_logprobs,
    }


def compute_advantages(batch, config):
    """Phase 3: a rollout -> rewards, returns and advantages, (B, T-1) each."""
    mask = batch["mask"]
    rewards = kl_adjusted_rewards(
        batch["scores"], batch["old_logprobs"], batch["ref_logprobs"], mask, config.kl_coef
    )
    advantages, returns = gae(rewards, batch["old_values"], mask, config.gamma, config.lam)
    if config.whiten:
        advantages = whiten(advantages, mask)
    return {"rewards": rewards, "returns": returns, "advantages": advantages}


def ppo_loss(logprobs, values, batch, config):
    """The loss of each token, and stats of each token: (B, T-1)."""
    policy_losses, policy_stats = policy_loss(
        logprobs, batch["old_logprobs"], batch["advantages"], config.clip_eps
    )
    value_losses, value_stats = value_loss(
        values, batch["old_values"], batch["returns"], config.value_clip
    )
    return policy_losses + config.vf_coef * value_losses, policy_stats | value_stats


def set_lr(optimizer, step, steps, warmup=0):
    """The learning rate of each group of parameters climbs to its "peak" in `warmup` steps (at most
    a tenth of all), then falls linearly to 0."""
    warmup = min(warmup, steps // 10)
    climb = (step + 1) / (warmup + 1)
    fall = max(0, steps - step) / (steps - warmup)
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * min(climb, fall)


def gradient_step(optimizer, max_grad_norm):
    """Clip the gradient, and take a step -> the norm before clipping. FloatingPointError, before
    any weight changes, if it is not finite. (PPO's own clip does not help in the first step of an
    update, when all ratios are 1.)"""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = nn.utils.clip_grad_norm_(parameters, max_grad_norm).item()
    if not math.isfinite(norm):
        raise FloatingPointError(f"the norm of the gradient is {norm}")
    optimizer.step()
    return norm


def ppo_update(policy, optimizer, batch, config, loss=ppo_loss):
    """Phase 4: epochs x minibatches gradient steps -> means of the stats. loss(logprobs, values,
    batch, config) -> losses, and stats, with "ratio" among them, of each token: (B, T-1).

    The loss of a step is the mean over its tokens. (The derivation has the mean over responses of
    the sum over their tokens, which is larger by a nearly constant factor, the mean length.)
    """
    B = len(batch["mask"])
    history = defaultdict(list)  # of the stats
    norms = []
    for _ in range(config.epochs):
        shuffled = torch.randperm(B, device=batch["mask"].device)
        for minibatch in shuffled.tensor_split(min(config.minibatches, B)):
            optimizer.zero_grad()
            N = batch["mask"][minibatch].sum()
            for rows in minibatch.split(config.micro_batch or B):  # pieces that fit into memory
                piece = {name: tensor[rows] for name, tensor in batch.items()}
                tokens, mask = piece["tokens"], piece["mask"]
                logprobs, values = evaluate_actions(policy, tokens, mask, config.temperature)
                losses, stats = loss(logprobs, values, piece, config)
                (losses[mask].sum() / N).backward()
                for name, numbers in {"loss": losses, **stats}.items():
                    history[name].append(numbers[mask].detach())
            norms.append(gradient_step(optimizer, config.max_grad_norm))
    means = {name: torch.cat(pieces).mean().item() for name, pieces in history.items()}
    means["ratio_max"] = torch.cat(history["ratio"]).max().item()
    means["grad_norm"] = sum(norms) / len(norms)
    return means


def batch_metrics(batch, config):
    """What to watch in a rollout: means over its responses or their tokens. In a healthy run score
    rises, kl climbs to a few nats and stays, entropy falls, but not to 0. objective estimates J."""
    mask, scores, old_logprobs = batch["mask"], batch["scores"], batch["old_logprobs"]
    kl = kl_per_response(old_logprobs, batch["ref_logprobs"], mask)
    d = (old_logprobs - batch["ref_logprobs"])[mask]
    return {
        "score": scores.mean().item(),
        "kl": kl.mean().item(),
        "kl_k3": k3(d).sum().item() / len(scores),
        "objective": (scores - config.kl_coef * kl).mean().item(),
        "entropy": -masked_mean(old_logprobs, mask).item(),  # an estimate of E[-log pi]
        "response_length": mask.sum(1).float().mean().item(),
        "eos_rate": batch["ended"].float().mean().item(),
    }


# ------------------------------------------------------------
# `python minippo.py`: a tiny GPT learns to write what a function likes. Here an untrained network
# stands in for the SFT model, and the function for the reward model.


LETTERS = [*"abcdefghijklmnopqrstuvwxyz", "<eos>"]


def turns_score(prompts, tokens, mask):
    """Vowels and consonants should alternate (<eos> is a consonant): (B, T), (B, T-1) -> (B,)."""
    vowels = torch.tensor([LETTERS.index(letter) for letter in "aeiou"], device=tokens.device)
    is_vowel = torch.isin(tokens, vowels)
    turns = is_vowel[:, 1:] != is_vowel[:, :-1]  # at t: is token t + 1 of another kind than t?
    return (torch.where(turns, 0.5, -0.5) * mask).sum(1)


def main():
    torch.manual_seed(0)
    config = PPOConfig(max_new_tokens=8)
    policy = GPT(GPTConfig(len(LETTERS), context=16, layers=2, channels=32))
    ref = frozen_copy(policy)
    # Here the value head does well at the same learning rate.
    optimizer = torch.optim.Adam([{"params": policy.parameters(), "peak": 3e-3}])
    prompts = [[letter] for letter in range(26)]
    center_values(policy, rollout(policy, ref, turns_score, prompts, config))
    for step in range(100):
        set_lr(optimizer, step, 100)
        prompts = torch.randint(26, (128, 1)).tolist()
        batch = rollout(policy, ref, turns_score, prompts, config)  # phases 1 and 2
        batch |= compute_advantages(batch, config)  # phase 3
        ppo_update(policy, optimizer, batch, config)  # phase 4
        if step % 20 == 0 or step == 99:
            stats = batch_metrics(batch, config)
            rows = zip(batch["tokens"][:4].tolist(), row_lengths(batch["mask"]))
            words = ["".join(LETTERS[i] for i in row[:length]) for row, length in rows]
            line = "  ".join(f"{name} {stats[name]:5.2f}" for name in ("score", "kl", "entropy"))
            print(f"iteration {step + 1:3}  {line}  {' '.join(words)}")

    names = "old_logprobs", "ref_logprobs", "rewards", "old_values", "returns", "advantages"
    print("\n      action", *(f"{name:>12}" for name in names))
    for t in batch["mask"][0].nonzero().flatten():  # of the first response
        action = LETTERS[batch["tokens"][0, t + 1]]
        print(f"{action:>12}", *(f"{batch[name][0, t].item():12.2f}" for name in names))


if __name__ == "__main__":
    main()
