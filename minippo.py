"""minippo: RLHF with PPO, from scratch, in one file. Read it from top to bottom, and run it.

RLHF (reinforcement learning from human feedback) turns a language model that merely imitates into
one that does what people prefer, in three stages with a script each. Supervised fine-tuning (SFT,
train_sft.py) imitates demonstrations. A reward model (train_rm.py) learns which of two answers
people prefer. PPO (train_ppo.py) raises the reward model's score, but stays close to the SFT model.
For prompts x, responses y sampled from the policy pi, and their scores, it maximises

    J(pi) = E[ score(x, y) ] - beta * KL(pi || ref)

(InstructGPT, arXiv:2203.02155, eq. 2; its last term, the loss of pretraining, is left out here.)

The *policy* pi is the language model, seen as a rule for choosing the next token. The *reference*
ref is a frozen copy of the policy before PPO: the SFT model. KL(pi || ref), the Kullback-Leibler
divergence, is the mean of log pi(y | x) - log ref(y | x) over such y: how far the policy has moved,
in nats (the unit of natural logarithms). Beta is the price of a nat. An iteration of PPO has four
phases:

    prompts --> 1. policy --> responses, log pi, values -----------------+
                     ^            |                                      |
                     |            +--> 2. reward model ----> scores -----+
                     |            +-->    reference -------> log ref ----+
                     |                                                   v
                     +---- 4. update: the clipped loss <---- 3. rewards, advantages

    policy            starts as the SFT model; trained                    log pi of each token
    value function    a second head on the policy, starts at 0; trained   reward still to come
    reference         the SFT model; frozen                               log ref of each token
    reward model      the SFT model with a new head, trained; now frozen  one score per response

Shapes: B rows in a batch, T columns, C channels, H attention heads, V tokens in the vocabulary.
One convention holds everywhere. A row is a prompt, its response, then padding, and starts at column
0. (Causal attention looks only to the left, so no response ever sees its padding.) Choosing token
t + 1 is the *action* taken in the *state* "tokens 0 .. t have been read", and every number about
that choice stands at index t. With the prompt "Bees eat", a score of 1.40 and beta 0.1:

    index t      0      1      2      3      4      5
    tokens       Bees   eat    sweet  nectar <eos>  pad     (B, T); <eos> is the end token
    action       eat    sweet  nectar <eos>  pad            tokens[:, t + 1]; from here on (B, T-1)
    mask         .      x      x      x      .              is the action part of the response?
    log pi       .     -0.50  -1.20  -0.10   .              of the action; below, pi is called old
    log ref      .     -1.00  -1.00  -0.30   .              of the action, under the reference
    KL           .      0.50  -0.20   0.20   .              its part of the KL: log pi - log ref
    reward       .     -0.05   0.02   1.38   .              -beta * KL; the last gets the score too
    value        .      0.80   1.00   1.20   .              prediction: sum of the rewards to come

Phase 3 (section 5): how much better than expected did each action turn out? The value after the
last action counts as 0. (Two settings, gamma and lam, are 1 here. Numbers are rounded last.)

    delta        .      0.15   0.22   0.18   .              reward + next value - value
    advantage    .      0.55   0.40   0.18   .              sum of this delta and all later ones
    return       .      1.35   1.40   1.38   .              rewards from here on; advantage + value
    whitened     .      1.14   0.15  -1.29   .              mean 0, variance 1 (a batch of one row)

Phase 4, after a gradient step, with clip_eps 0.2. A is the whitened advantage. (That of <eos> is
below 0: better than expected, but by less than the others.)

    log pi now   .     -0.25  -1.10  -0.40   .              of the same actions, after the step
    ratio        .      1.28   1.11   0.74   .              pi now / old: exp of the difference
    clipped      .      1.20   1.11   0.80   .              the ratio, kept from 0.8 to 1.2
    ratio * A    .      1.46   0.17  -0.96   .
    clipped * A  .      1.37   0.17  -1.04   .              loss: minus the mean of the smaller ones
    gradient     .      no     yes    no     .

Where the clipped product is the smaller one, the token has no gradient, because a clipped ratio is
a constant. The values are clipped too (value_clip 0.2). The value at index 1 was 0.80 and is now
1.05; its clipped copy stops at 1.00. In the loss of the values the larger of the two squared errors
counts, (1.35 - 1.00)^2 = 0.12 and not 0.30^2 = 0.09. That error has no gradient either.
"""

import copy
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

# --------------------------------------------------------------------------------------------------
# 1. The networks
#
# A GPT-2 (Radford et al., 2019). The policy adds a value head to it: one number per position. The
# reward model has a score head in place of the vocabulary head: one number per row. The scripts
# train these very networks. In the settings below, brackets hold the range that the scripts allow.


@dataclass
class GPTConfig:
    vocab_size: int = 1024  # tokens in the vocabulary; the last is the end token [257, 1e6]
    context: int = 128  # longest prompt and response together, in tokens [8, inf]
    layers: int = 4  # transformer blocks [1, inf]
    heads: int = 4  # attention heads [1, inf]
    channels: int = 96  # width of the model; a multiple of heads [1, inf]
    dropout: float = 0.0  # share of activations dropped in stages 1 and 2; never in PPO [0, 0.9]
    separate_critic: bool = False  # values from a network of their own, not from a second head

    def __post_init__(self):
        if self.channels % self.heads:
            raise ValueError(f"channels ({self.channels}): not a multiple of heads ({self.heads})")
        self.eos = self.vocab_size - 1


class Attention(nn.Module):
    """Causal self-attention: every position reads from itself and from those before it."""

    def __init__(self, config):
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.qkv = nn.Linear(config.channels, 3 * config.channels)
        self.out = nn.Linear(config.channels, config.channels)

    def forward(self, x):
        return self.out(self.attend(self.qkv(x)))

    def attend(self, qkv):
        """Queries, keys and values side by side, (B, T, 3C) -> (B, T, C)."""
        q, k, v = (x.unflatten(-1, (self.heads, -1)) for x in qkv.chunk(3, -1))  # (B, T, H, C/H)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, T, C/H)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return y.transpose(1, 2).flatten(2)


class Block(nn.Module):
    """x + attention, then x + MLP, each of a normalised x (pre-norm): (B, T, C) -> (B, T, C)."""

    def __init__(self, config):
        super().__init__()
        C = config.channels
        self.norm1 = nn.LayerNorm(C)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(C)
        self.mlp = nn.Sequential(nn.Linear(C, 4 * C), nn.GELU("tanh"), nn.Linear(4 * C, C))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Trunk(nn.Module):
    """The body below the heads: tokens (B, T) -> hidden states (B, T, C)."""

    def __init__(self, config):
        super().__init__()
        self.token_embedding = nn.Embedding(config.vocab_size, config.channels)
        self.position_embedding = nn.Embedding(config.context, config.channels)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.channels)
        std = 0.02 * math.sqrt(768 / config.channels)  # GPT-2's 0.02, carried over to other widths
        for name, parameter in self.named_parameters():
            if name.endswith(("out.weight", "mlp.2.weight")):  # smaller: all blocks add to x
                nn.init.normal_(parameter, std=std / math.sqrt(2 * config.layers))
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class GPT(nn.Module):
    """The policy: which token next? And the value function: how much reward is still to come?"""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.trunk = Trunk(config)
        self.critic = Trunk(config) if config.separate_critic else None
        self.lm_head = nn.Linear(config.channels, config.vocab_size, bias=False)
        self.lm_head.weight = self.trunk.token_embedding.weight  # shared, as in GPT-2
        self.value_head = nn.Linear(config.channels, 1)
        nn.init.zeros_(self.value_head.weight)  # all values start at 0, not at random ones
        nn.init.zeros_(self.value_head.bias)

    def hidden(self, tokens):
        """tokens (B, T) -> what vocabulary head and value head read, (B, T, C) each."""
        hidden = self.trunk(tokens)
        value_hidden = hidden if self.critic is None else self.critic(tokens)
        return hidden, value_hidden

    def forward(self, tokens):
        """tokens (B, T) -> logits (B, T, V), values (B, T); both at t belong to token t + 1.

        The loop does not call this. It reads trunk or hidden(), and computes logits and values
        where it needs them."""
        hidden, value_hidden = self.hidden(tokens)
        return self.lm_head(hidden), self.value_head(value_hidden).squeeze(-1)


class RewardModel(nn.Module):
    """Scores a whole row, prompt and response, with one number: how much would people like it?

    Made from a GPT, it starts with a copy of that trunk. After its training train_rm.py sets `mean`
    and `std`, so that the SFT model's own answers have scores of mean 0 and standard deviation 1:
    then beta means the same whatever the reward model. And it sets `cap`, exceeded by one answer in
    a hundred. Scores above it are cut off: so high, the model may well be wrong, and a policy
    should gain nothing there (Fu et al., arXiv:2502.18770).
    """

    def __init__(self, config_or_gpt):
        super().__init__()
        gpt = config_or_gpt if isinstance(config_or_gpt, GPT) else GPT(config_or_gpt)
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
        last = torch.arange(tokens.shape[1], device=tokens.device) == lengths[:, None] - 1  # (B, T)
        hidden = self.trunk(tokens)[last]  # (B, C): `last` is true once in each row
        scores = (self.score_head(hidden).squeeze(-1) - self.mean) / self.std
        return torch.minimum(scores, self.cap)


# --------------------------------------------------------------------------------------------------
# 2. Log-probabilities and masks
#
# Sums and means run over response tokens alone: x[mask] picks these N tokens. So no position in a
# prompt or in the padding has a term in a loss or a metric. A pad that leaks in would be trained
# on, and dilute the loss (one more term in the mean); move the mean and the spread that whiten
# every advantage; and add to the KL the log pi - log ref of a token that nobody chose.


def check_mask(mask, *tensors):
    """ValueError unless the mask is boolean and all tensors have its shape: a mask of 0 and 1 would
    silently pick rows 0 and 1, and a (B, 1) tensor would be broadcast."""
    shapes = [tuple(x.shape) for x in (mask, *tensors)]
    if mask.dtype != torch.bool or len(set(shapes)) > 1:
        raise ValueError(f"wanted a boolean mask and equal shapes, got {mask.dtype} and {shapes}")


def response_mask(prompt_lengths, lengths, columns):
    """(B,), (B,), T -> (B, T-1): true at t where token t + 1 is part of the response. lengths: of
    prompt and response together, the end token included."""
    action = torch.arange(1, columns, device=lengths.device)
    return (action >= prompt_lengths[:, None]) & (action < lengths[:, None])


def row_lengths(mask):
    """mask (B, T-1) -> (B,): tokens of prompt and response. The last action is at length - 2.
    ValueError if a response is empty: it has no action, so its score could be paid nowhere."""
    if not mask.any(1).all():
        raise ValueError("a response is empty: it needs a token, if only the end token")
    return (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(1) + 2


def masked_mean(x, mask):
    """Mean of x over the mask: (B, T-1) each -> scalar."""
    check_mask(mask, x)
    return x[mask].mean()


def at_least_float32(x):
    """x, but never in 16 bits: in bfloat16, a log-probability of -10 is off by up to 0.03."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def gather_logprobs(logits, targets, temperature=1.0):
    """log softmax(logits / temperature) at the targets, in nats: (..., V), (...) -> (...)."""
    flat = at_least_float32(logits.reshape(-1, logits.shape[-1]))
    flat = flat if temperature == 1 else flat / temperature
    nats = torch.nn.functional.cross_entropy(flat, targets.flatten(), reduction="none")
    return -nats.view(targets.shape)  # cross-entropy is -log softmax at the target


def evaluate_actions(policy, tokens, mask, temperature=1.0, with_entropy=True):
    """tokens (B, T), mask (B, T-1) -> logprobs of the actions taken, values of the states in which
    they were taken, and entropy of the choice there: (B, T-1) each, 0 outside the mask.

    Each action follows the tokens of the row, whatever the policy would have said (*teacher
    forcing*). Log-probabilities and entropy are in nats, and those of softmax(logits /
    temperature). The mean of -logprobs over the mask is the loss of SFT. The policy must have three
    attributes: lm_head; value_head; and hidden(tokens), which returns two tensors (B, T, C), the
    input of lm_head and the input of value_head.
    """
    check_mask(mask, tokens[:, 1:])
    states, actions = tokens[:, :-1], tokens[:, 1:]
    hidden, value_hidden = policy.hidden(states)
    logits = at_least_float32(policy.lm_head(hidden[mask]))  # (N, V), not (B, T-1, V): V is large
    logprobs = gather_logprobs(logits, actions[mask], temperature)  # (N,)
    values = at_least_float32(policy.value_head(value_hidden[mask]).squeeze(-1))  # (N,)
    entropy = torch.zeros_like(values)
    if with_entropy:  # H = E[-log p]; without it the entropy is 0, and time is saved
        log_p = torch.log_softmax(logits / temperature, -1)
        entropy = -(log_p.exp() * log_p).sum(-1)
    blank = logits.new_zeros(mask.shape)
    return [blank.masked_scatter(mask, x) for x in (logprobs, values, entropy)]


# --------------------------------------------------------------------------------------------------
# 3. Sampling


def draw(logits):
    """A random token from each softmax(logits): (B, V) -> (B,)."""
    return torch.multinomial(logits.softmax(-1), 1).squeeze(1)


@torch.no_grad()
def generate(policy, prompts, max_new_tokens, temperature=1.0, draw=draw):
    """Sample a response to each prompt, up to the end token, max_new_tokens or the whole context.

    prompts: B lists of 1 to context - 1 ids (else ValueError). -> tokens (B, T), and (B, T-1) each:
    mask, logprobs (in nats) and values of the sampled tokens. Another `draw` is for looking at a
    finished model: PPO needs samples of the whole distribution.
    """
    context, device = policy.config.context, policy.lm_head.weight.device
    if not all(0 < len(prompt) < context for prompt in prompts):
        raise ValueError(f"a prompt should have 1 to {context - 1} tokens, the context less one")
    T = min(max(map(len, prompts)) + max_new_tokens, context)
    tokens = torch.tensor([ids + [0] * (T - len(ids)) for ids in prompts], device=device)
    prompt_lengths = torch.tensor([len(ids) for ids in prompts], device=device)
    limits = (prompt_lengths + max_new_tokens).clamp(max=context)
    lengths = prompt_lengths.clone()
    unfinished = torch.ones_like(lengths, dtype=torch.bool)  # rows that have not ended
    while unfinished.any():  # each round adds a token to these rows
        last = torch.arange(T, device=device) == lengths[:, None] - 1  # (B, T)
        hidden = policy.trunk(tokens)[last]  # (B, C). Slow but simple: it reads whole rows again
        token = draw(policy.lm_head(hidden) / temperature)  # (B,)
        tokens[unfinished, lengths[unfinished]] = token[unfinished]
        lengths += unfinished
        unfinished = unfinished & (token != policy.config.eos) & (lengths < limits)
    T = int(lengths.max())
    tokens, mask = tokens[:, :T], response_mask(prompt_lengths, lengths, T)
    logprobs, values, _ = evaluate_actions(policy, tokens, mask, temperature, with_entropy=False)
    return tokens, mask, logprobs, values


# --------------------------------------------------------------------------------------------------
# 4. The reward model's loss
#
# Bradley and Terry (1952): people prefer answer a to b with probability sigmoid(score(a) -
# score(b)). Only differences count: adding a number to all scores changes nothing. Why pairs?
# People agree on which of two answers is better more than on grades. Why a model? Nobody would
# grade all responses that PPO samples, 57,600 in train_ppo.py. They differ from the answers in the
# pairs (*distribution shift*), and there the scores may be wrong. A policy that learns to get high
# scores where they are wrong does *reward hacking*. That is why the KL has a price, and the scores
# have a cap.


def reward_model_loss(chosen_scores, rejected_scores):
    """(B,), (B,) -> the mean negative log-likelihood of the choices (InstructGPT, eq. 1), stats."""
    if chosen_scores.shape != rejected_scores.shape:
        raise ValueError(f"shapes {chosen_scores.shape} and {rejected_scores.shape} differ")
    margin = chosen_scores - rejected_scores
    loss = -torch.nn.functional.logsigmoid(margin).mean()
    accuracy = (margin > 0).float().mean() + 0.5 * (margin == 0).float().mean()  # a tie: half a hit
    return loss, {"accuracy": accuracy.item(), "margin": margin.mean().item()}


# --------------------------------------------------------------------------------------------------
# 5. From the policy gradient to PPO (Schulman et al., arXiv:1707.06347), and to PPO for language
# models (Ziegler et al., arXiv:1909.08593)
#
# Why a policy gradient? We want a high E[score], the mean over sampled responses y. A score is a
# function of tokens, tokens are drawn at random, and one cannot differentiate through a draw. But
# the probability p(y) of a response can be differentiated:
#
#     grad E[score] = grad sum_y p(y) score(y) = sum_y grad p(y) score(y)
#                   = sum_y p(y) grad log p(y) score(y)             because grad p = p grad log p
#                   = E[ grad log p(y) score(y) ]                   (the log-derivative trick)
#
# This is the *policy gradient*, a mean over samples again. So: sample responses, and make each one
# more probable, or less, in proportion to its score. (Sampling is the *exploration*: only what is
# tried can be learned.) log p(y) is the sum of log pi over the *trajectory*, the states and actions
# of y. (In a game, p(y) has factors for what the game does. Here the next state is certain: the
# token is appended.) So each token's grad log pi is multiplied by a number, the score. Which token
# deserves how much of the score? That is the question of *credit assignment*. Three changes lead
# from here to PPO:
#
# 1. Only what comes after. Let tokens have rewards of their own (they will pay for their KL). A
#    token cannot change the rewards before it: on average these add 0 (see 2). So its number is
#    the sum of the rewards from it on, the *return*.
# 2. A baseline. Something that does not depend on the action may be subtracted from the return. On
#    average it changes nothing: sum_a pi(a) grad log pi(a) = grad sum_a pi(a) = grad 1 = 0. But the
#    gradient is less noisy if it is the *value* V, the return to be expected in this state. What is
#    left is the *advantage* A: how much better than expected did this action turn out? (It
#    estimates Q - V, where Q is the return to be expected after the action.) The network that
#    predicts values is called the *critic*, and the policy the *actor*.
# 3. Several gradient steps on one batch, or on its parts, because for large models sampling is
#    slow. The first step is *on-policy*: the policy that is trained has sampled the batch. After
#    it, the sampler is called the *old* policy, and the next steps are *off-policy*. The *ratio*
#    pi / old corrects for that, choice by choice (*importance sampling*): E_old[ratio * A] =
#    sum_a old(a) (pi(a) / old(a)) A(a) = E_pi[A]. (The states are still those that old reached;
#    this is not corrected.) Since grad ratio = ratio * grad log pi, at ratio 1, where an update
#    begins, ratio * A has the gradient from above. Far from 1, a few tokens with a large ratio
#    dominate the mean. So PPO clips the ratio.
#
# Do not confuse two policies: the old one sampled this batch, a few gradient steps ago. The
# reference is the SFT model, frozen. The ratio compares pi with old; the KL, pi with ref. The
# KL has a direction. KL(pi || ref) is a mean over what pi says. So saying what ref hardly ever says
# is expensive; giving up answers is cheap. KL(ref || pi), a mean over what ref says, would keep all
# of its answers alive, mistakes too.

# The KL is not computed but estimated, from the tokens that pi has sampled. With q = ref / pi,
#
#                           what is right about it                        where it is used
#     k1 = -log q           on average the KL, but often below 0          reward, metric
#     k2 = (log q)^2 / 2    has on average the gradient of the KL         loss, if kl_loss_coef > 0
#     k3 = q - 1 - log q    on average the KL, and never below 0          metric
#
# (Schulman, "Approximating KL divergence".) k3: E_pi[q] = sum ref = 1, so q - 1 adds 0 on average;
# it is never below 0, because x - 1 >= log x. k2: its gradient is grad log pi (log pi - log ref),
# whose mean over pi's choices is sum_a grad pi (log pi - log ref), because pi grad log pi = grad
# pi. That is the gradient of the KL of one choice: the rest of the product rule, sum_a pi grad log
# pi, is 0 as above. k1: used as a loss, it teaches nothing, because E[grad log pi] = 0. So it goes
# into the reward, as a plain number that multiplies grad log pi.


def kl_per_response(logprobs, ref_logprobs, mask):
    """k1 and k3, summed over the tokens of each response, in nats: (B, T-1) each -> (B,) each."""
    check_mask(mask, logprobs, ref_logprobs)
    log_q = torch.where(mask, ref_logprobs - logprobs, 0.0)
    return -log_q.sum(1), (log_q.exp() - 1 - log_q).sum(1)


def kl_adjusted_rewards(scores, logprobs, ref_logprobs, mask, kl_coef):
    """The reward of each token: scores (B,); logprobs, ref_logprobs, mask (B, T-1) -> (B, T-1).

    InstructGPT, eq. 2, token by token. A token to which the policy gives a higher probability than
    the reference does costs beta times the difference of the logs; one to which it gives a lower
    probability earns as much. The reward model has learned to judge whole responses, so its score
    comes with the last token.
    """
    check_mask(mask, logprobs, ref_logprobs)
    check_mask(mask[:, 0], scores)  # one score per row
    rewards = torch.where(mask, -kl_coef * (logprobs - ref_logprobs), 0.0)
    rewards[torch.arange(len(mask), device=mask.device), row_lengths(mask) - 2] += scores
    return rewards


def gae(rewards, values, mask, gamma, lam):
    """Generalised advantage estimation (arXiv:1506.02438): (B, T-1) each -> advantages, returns.

    delta_t = r_t + gamma V_{t+1} - V_t, the *temporal difference error*: how much more is expected
    after the action than before? The advantage also counts what is found out later (eq. 16):

        A_t = delta_t + (gamma lam) delta_{t+1} + (gamma lam)^2 delta_{t+2} + ...
            = delta_t + (gamma lam) A_{t+1}

    lam = 1, the default, gives the sampled return less the value (*Monte Carlo*): right on average,
    and noisy. lam = 0 gives delta alone, which takes the next value on trust (*bootstrap*): steady,
    and as wrong as the values are. gamma below 1 makes a reward count less for each token that it
    lies ahead; for text 1 is usual. No reward follows the last action, so the value of what comes
    after it counts as 0, also where the length limit cut the response off.
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
    return advantages, advantages + values  # the values are trained towards the returns


def whiten(x, mask):
    """Shift and scale x, (B, T-1), to mean 0 and standard deviation 1 over the mask; 0 elsewhere.

    Because of the scaling, the policy's step does not depend on the scale of the scores. (A spread
    below 1e-4 is rounding, and is not enlarged.) The shift is one more baseline: each action
    competes with the average of the whole batch; an action below the average becomes less probable
    even if its A was positive. Returns are never whitened: the values must learn their true size.
    """
    check_mask(mask, x)
    whitened = (x - x[mask].mean()) / x[mask].std(correction=0).clamp(min=1e-4)
    return torch.where(mask, whitened, 0.0)


# The clip. For each token PPO maximises min(ratio * A, clipped ratio * A). A is whitened. Nothing
# is gained by leaving the range from 1 - eps to 1 + eps on the side that A asks for. A ratio that
# has left on the other side, moved by other tokens (all share the weights), is pulled back. A
# *trust region* is a limit that the new policy cannot leave. This range is none: one step can jump
# past it. By default each response is used once, in one of four steps, because sampling is not the
# slow part here (RESULTS.md, "Speed"). So the clip hardly acts. In four passes over a batch, with
# neither clip, the policy ends up near the SFT model or worse (RESULTS.md). There are six cases.
# Does a token have a gradient?
#
#              ratio < 1 - eps                 in between     ratio > 1 + eps
#     A > 0    yes: pulled back up             yes            no: has risen enough
#     A < 0    no: has fallen enough           yes            yes: pulled back down
#
# The sum over the tokens of a response has become a mean over all tokens of a gradient step. That
# changes the length of its gradient, and not the direction.


def policy_loss(logprobs, old_logprobs, advantages, mask, clip_eps):
    """PPO's clipped objective (eq. 7 of its paper) as a loss: (B, T-1) each -> scalar, stats.

    Only logprobs has a gradient. What was recorded is constant: hence detach(), for callers who
    recorded it with a gradient.
    """
    check_mask(mask, logprobs, old_logprobs, advantages)
    log_ratio = (logprobs - old_logprobs.detach())[mask]  # (N,)
    advantages = advantages.detach()[mask]
    ratio = log_ratio.exp()  # pi / old
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_eps, 1 + clip_eps) * advantages
    loss = -torch.min(unclipped, clipped).mean()
    return loss, {
        "policy_loss": loss.item(),
        "approx_kl": (ratio - 1 - log_ratio).mean().item(),  # k3 of KL(old || pi): q = pi / old
        "clip_frac": ((ratio - 1).abs() > clip_eps).float().mean().item(),
        "ratio_max": ratio.max().item(),
    }


def value_loss(values, old_values, returns, mask, clip):
    """Half the mean squared error of the values: (B, T-1) each -> scalar, stats.

    Published code clips the values too, so that they do not follow one noisy batch too far: a
    value whose clipped copy is further from its return has no gradient (the header has an example).
    On the default task this makes no difference.
    """
    check_mask(mask, values, old_values, returns)
    values, old_values, returns = values[mask], old_values.detach()[mask], returns.detach()[mask]
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    loss = 0.5 * torch.max((values - returns) ** 2, (clipped - returns) ** 2).mean()
    return loss, {"value_loss": loss.item()}


def adapt_kl_coef(kl_coef, kl, kl_target, responses, kl_horizon):
    """Raise beta when the KL (nats per response) is above its target, else lower it, by about a
    fifth at most in kl_horizon responses. train_ppo.py can do so (--kl_horizon; off by default)."""
    error = min(max(kl / kl_target - 1, -0.2), 0.2)  # Ziegler et al., section 2.2
    return kl_coef * (1 + error * min(1, responses / kl_horizon))


# --------------------------------------------------------------------------------------------------
# 6. The loop
#
#     ppo_iteration
#         rollout               phases 1 and 2: generate, score_responses, evaluate_actions by ref
#         compute_advantages    phase 3: kl_adjusted_rewards, gae, whiten
#         ppo_update            phase 4: for each gradient step ppo_loss, backward(), gradient_step
#
# A *rollout* is a batch of sampled responses and what is recorded of them, a dict: tokens (B, T);
# scores, ended (B,); mask, old_logprobs, old_values, ref_logprobs (B, T-1). There is no old
# network: the old policy lives on in old_logprobs, old_values. Phase 3 adds rewards, advantages,
# whitened, returns (B, T-1). In ppo_loss, logprobs and values are those of the policy as it is now.


@dataclass
class PPOConfig:
    max_new_tokens: int = 48  # longest response, in tokens [1, inf]
    temperature: float = 1.0  # divides the logits, in sampling and in every log pi [0.01, inf]
    length_penalty: float = 0.0  # subtracted from the score for each token of a response [0, 1e6]
    missing_eos_penalty: float = 1.0  # subtracted if a response was cut off [0, 1e6]
    kl_coef: float = 0.1  # beta, the price in the reward of one nat of KL to the reference [0, 1e6]
    gamma: float = 1.0  # discount per token [0, 1]
    lam: float = 1.0  # GAE's lambda: 0 trusts the value function, 1 the sampled return [0, 1]
    whiten: bool = True  # advantages with mean 0 and standard deviation 1
    epochs: int = 1  # passes over each batch of responses [1, inf]
    minibatches: int = 4  # gradient steps per pass [1, inf]
    max_grad_norm: float = 1.0  # longer gradients are scaled down to this norm [1e-6, inf]
    clip_eps: float = 0.2  # no gain from a ratio further from 1 than this; inf: no clip [0, inf]
    value_clip: float = 0.2  # nor from a value further from its old one; inf: no clip [0, inf]
    vf_coef: float = 0.1  # weight of the value loss; large, it disturbs the shared trunk [0, inf]
    entropy_coef: float = 0.0  # weight of a bonus for entropy: for varied responses [0, inf]
    kl_loss_coef: float = 0.0  # weight of a penalty on the KL per token in the loss (k2) [0, 1e6]


def frozen_copy(model):
    """A copy that is never trained and has no dropout: the reference, or a reward model in use."""
    return copy.deepcopy(model).eval().requires_grad_(False)


@torch.no_grad()
def score_responses(score, tokens, mask, config, eos):
    """The scores minus penalties, and which responses ended by themselves: (B,) each.
    For a reward model, score is `lambda tokens, mask: reward_model(tokens, row_lengths(mask))`."""
    ended = tokens.gather(1, row_lengths(mask)[:, None] - 1).squeeze(1) == eos
    penalty = config.length_penalty * mask.sum(1) + config.missing_eos_penalty * ~ended
    return score(tokens, mask) - penalty, ended


@torch.no_grad()
def rollout(policy, ref, score, prompts, config, generate=generate):
    """Phases 1 and 2: responses to the prompts (lists of ids), and what is recorded of them."""
    tokens, mask, old_logprobs, old_values = generate(
        policy, prompts, config.max_new_tokens, config.temperature
    )
    scores, ended = score_responses(score, tokens, mask, config, policy.config.eos)
    ref_logprobs, _, _ = evaluate_actions(ref, tokens, mask, config.temperature, with_entropy=False)
    return {
        "tokens": tokens,
        "mask": mask,
        "scores": scores,
        "ended": ended,
        "old_logprobs": old_logprobs,
        "old_values": old_values,
        "ref_logprobs": ref_logprobs,
    }


def compute_advantages(batch, config, kl_coef):
    """Phase 3: the reward of each token; and how much better than expected each action turned out.

    A rollout -> rewards, advantages, whitened (what the policy loss uses), returns: (B, T-1) each.
    """
    old_logprobs, ref_logprobs, mask = batch["old_logprobs"], batch["ref_logprobs"], batch["mask"]
    rewards = kl_adjusted_rewards(batch["scores"], old_logprobs, ref_logprobs, mask, kl_coef)
    advantages, returns = gae(rewards, batch["old_values"], mask, config.gamma, config.lam)
    whitened = whiten(advantages, mask) if config.whiten else advantages
    return {"rewards": rewards, "advantages": advantages, "whitened": whitened, "returns": returns}


def ppo_loss(policy, batch, config):
    """The loss of some responses, a mean over their tokens; and stats, the count of tokens too."""
    tokens, mask, old_logprobs = batch["tokens"], batch["mask"], batch["old_logprobs"]
    logprobs, values, entropy = evaluate_actions(
        policy, tokens, mask, config.temperature, with_entropy=config.entropy_coef > 0
    )
    loss, stats = policy_loss(logprobs, old_logprobs, batch["whitened"], mask, config.clip_eps)
    value_term, value_stats = value_loss(
        values, batch["old_values"], batch["returns"], mask, config.value_clip
    )
    k2 = masked_mean(0.5 * (logprobs - batch["ref_logprobs"]) ** 2, mask)
    bonus = config.entropy_coef * masked_mean(entropy, mask)
    loss = loss + config.vf_coef * value_term + config.kl_loss_coef * k2 - bonus
    return loss, {"loss": loss.item(), "count": int(mask.sum()), **stats, **value_stats}


def gradient_step(optimizer, max_grad_norm):
    """One step down the gradient that backward() has left -> its norm, before it was scaled down.
    FloatingPointError, before any weight changes, if that is not finite."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = nn.utils.clip_grad_norm_(parameters, max_grad_norm).item()
    if not math.isfinite(norm):
        raise FloatingPointError(f"the norm of the gradient is {norm}")
    optimizer.step()
    return norm


def average(stats):
    """Dicts of numbers, one for each gradient step -> their means; of ratio_max, the largest."""
    means = {name: sum(s[name] for s in stats) / len(stats) for name in stats[0]}
    largest = {name: max(s[name] for s in stats) for name in stats[0] if name == "ratio_max"}
    return means | largest


def ppo_update(policy, optimizer, batch, config, loss_of=ppo_loss):
    """Phase 4: make more probable what turned out better than expected, and correct the
    expectations, in epochs x minibatches gradient steps -> the average stats of each epoch."""
    passes, tokens = [], batch["tokens"]
    for _ in range(config.epochs):
        order, stats_of_steps = torch.randperm(len(tokens), device=tokens.device), []
        for rows in order.tensor_split(config.minibatches):
            optimizer.zero_grad()
            loss, stats = loss_of(policy, {name: x[rows] for name, x in batch.items()}, config)
            loss.backward()
            stats["grad_norm"] = gradient_step(optimizer, config.max_grad_norm)
            stats_of_steps.append(stats)
        passes.append(average(stats_of_steps))
    return passes


def explained_variance(values, returns, mask):
    """1 - Var(returns - values) / Var(returns): 1 foresees all, 0 is no better than the mean."""
    check_mask(mask, values, returns)
    unexplained = (returns - values)[mask].var(correction=0)
    return (1 - unexplained / (returns[mask].var(correction=0) + 1e-8)).item()


def batch_metrics(batch, kl_coef):
    """What to watch in a batch: means over its responses, or over their tokens."""
    mask, scores, old_logprobs = batch["mask"], batch["scores"], batch["old_logprobs"]
    kl, kl_k3 = kl_per_response(old_logprobs, batch["ref_logprobs"], mask)
    means = {
        "score": scores,
        "kl": kl,
        "kl_k3": kl_k3,
        "rlhf_reward": scores - kl_coef * kl,
        "entropy": -old_logprobs[mask],  # H = E[-log pi], over what was sampled
        "response_length": mask.sum(1).float(),
        "eos_rate": batch["ended"].float(),
    }
    stats = {name: x.mean().item() for name, x in means.items()}
    if "returns" in batch:
        old_values, returns = batch["old_values"], batch["returns"]
        stats["explained_variance"] = explained_variance(old_values, returns, mask)
    return stats | {"kl_coef": kl_coef}


def ppo_iteration(
    policy,
    ref,
    score,
    prompts,
    optimizer,
    config,
    kl_coef,
    rollout=rollout,
    compute_advantages=compute_advantages,
    loss_of=ppo_loss,
):
    """One iteration of PPO on some prompts (lists of ids) -> the batch, and what to watch.

    kl_coef: beta as it is now. rollout, compute_advantages and loss_of are the functions above,
    unless a related algorithm passes others (variations/).
    """
    # 1. Sample a response to each prompt.  2. Score it, and ask the reference about its tokens.
    batch = rollout(policy, ref, score, prompts, config)
    # 3. Rewards, advantages, returns.
    batch |= compute_advantages(batch, config, kl_coef)
    # 4. Some steps of gradient descent.
    passes = ppo_update(policy, optimizer, batch, config, loss_of)
    return batch, batch_metrics(batch, kl_coef) | average(passes) | {"passes": passes}


# --------------------------------------------------------------------------------------------------
# `python minippo.py`: a tiny GPT that writes random letters learns to write what a function likes.


def trace(batch, row, spell):
    """One response as lines of text, an action per line: the header's table, turned round."""
    x = {name: values[row] for name, values in batch.items()}
    x["kl"] = x["old_logprobs"] - x["ref_logprobs"]
    columns = {
        "old_logprobs": "log pi",
        "ref_logprobs": "log ref",
        "kl": "KL",
        "rewards": "reward",
        "old_values": "value",
        "advantages": "advantage",
        "returns": "return",
        "whitened": "whitened",
    }
    lines = ["".join(f"{title:>10}" for title in ["action", *columns.values()])]
    for t in x["mask"].nonzero().flatten().tolist():
        # + 0.0 turns -0.0 into 0.0
        numbers = "".join(f"{round(x[name][t].item(), 2) + 0.0:10.2f}" for name in columns)
        lines.append(f"{spell(x['tokens'][t + 1].item()):>10}{numbers}")
    return lines


def main():
    letters = [*"abcdefghijklmnopqrstuvwxyz", "<eos>"]

    def score(tokens, mask):  # vowels and consonants should take turns (<eos> is a consonant)
        vowel = torch.isin(tokens, torch.tensor([letters.index(c) for c in "aeiou"]))
        turns = vowel[:, 1:] != vowel[:, :-1]  # at t: is token t + 1 of another kind than token t?
        return (torch.where(turns, 0.5, -0.5) * mask).sum(1)

    torch.manual_seed(0)
    iterations, lr, config = 100, 3e-3, PPOConfig(max_new_tokens=8)
    policy = GPT(GPTConfig(len(letters), context=16, layers=2, channels=32)).eval()
    ref = frozen_copy(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr)
    for step in range(iterations):
        optimizer.param_groups[0]["lr"] = lr * (1 - step / iterations)
        prompts = torch.randint(26, (128, 1)).tolist()
        batch, stats = ppo_iteration(policy, ref, score, prompts, optimizer, config, config.kl_coef)
        if step % 20 == 0 or step + 1 == iterations:
            rows = zip(batch["tokens"][:4].tolist(), row_lengths(batch["mask"]).tolist())
            words = ["".join(letters[i] for i in ids[:n] if i < 26) for ids, n in rows]
            watch = "  ".join(f"{name} {stats[name]:5.2f}" for name in ("score", "kl", "entropy"))
            print(f"iteration {step + 1:3}  {watch}  {' '.join(words)}")
    print("\n".join(trace(batch, 0, letters.__getitem__)))


# What `uv run minippo.py` installs:
# /// script
# requires-python = ">=3.10"
# dependencies = ["torch==2.13.0", "numpy>=1.26"]
# ///
if __name__ == "__main__":
    main()
