"""How fast, beside what the matrix products alone would take on the same machine in the same run.

    python -m bench.speed           all of it, a few minutes; writes bench/results.json
    python -m bench.speed small     one workload: small, medium, or default (make run comes first)
    python -m bench.speed --nanogpt FOLDER   a training step beside that of nanoGPT, a clone of it

An iteration is minippo.ppo_iteration(), computed as train_ppo.py computes it. Beside it stand the
same matrix products, counted by hand, each by itself at its own shape.
"""

import functools
import importlib.util
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch

import minippo
from bench import parser
from bench.tables import ROOT, keep
from minippo import GPT, GPTConfig, PPOConfig, RewardModel
from plumbing.checkpoints import load_checkpoint
from plumbing.errors import UserError, run_script
from plumbing.fast import generate
from plumbing.rows import read_prompts
from plumbing.settings import RunConfig, prepare
from plumbing.training import adamw, rollout_in_pieces

SHAPE = ("vocab_size", "context", "layers", "heads", "channels")
SMALL = {"vocab_size": 1024, "context": 128, "layers": 4, "heads": 4, "channels": 128}
MEDIUM = {"vocab_size": 4096, "context": 256, "layers": 6, "heads": 6, "channels": 384}
SMALL |= {"batch": 64, "prompt": (8, 24), "new": 48}
MEDIUM |= {"batch": 32, "prompt": (16, 48), "new": 64}
SIZES = {"small": SMALL, "medium": MEDIUM}
NAMES = [*SIZES, "default"]  # the last: the models of make run, in out/


def now():
    """The time when everything begun so far is done, on a GPU too."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class Workload:
    """Models, prompts and settings of one PPO iteration; size None: those of the default task."""

    def __init__(self, size, device="cpu", recompute_logprobs=False):
        torch.manual_seed(0)
        self.recompute_logprobs = recompute_logprobs
        if size is None:
            policy, tokenizer, _ = load_checkpoint(ROOT / "out" / "sft.pt", ["sft"])
            reward_model, _, _ = load_checkpoint(ROOT / "out" / "rm.pt", ["rm"])
            zoo, batch, self.config = ROOT / "data" / "zoo", 128, PPOConfig()
            prompts = read_prompts(zoo, "train", tokenizer, policy.config.context)
            self.prompts = [prompts[i % len(prompts)] for i in range(batch)]
        else:
            policy, eos = GPT(GPTConfig(*map(size.get, SHAPE))).eval(), size["vocab_size"] - 1
            trunk = policy.trunk
            with torch.no_grad():  # the end token has a logit of -100: no response ends early
                trunk.norm.weight[0], trunk.norm.bias[0] = 0, 1
                trunk.token_embedding.weight[eos, 0] = -100
            reward_model, (low, high) = RewardModel(policy), size["prompt"]
            lengths = torch.randint(low, high + 1, (size["batch"],)).tolist()
            self.prompts = [torch.randint(eos, (n,)).tolist() for n in lengths]
            self.config = PPOConfig(max_new_tokens=size["new"], epochs=4, minibatches=4)
        self.policy, self.ref = policy.to(device), minippo.frozen_copy(policy)
        self.reward_model = minippo.frozen_copy(reward_model.to(device))
        self.optimizer = adamw(policy, 1e-6)

    def score(self, tokens, mask):
        return self.reward_model(tokens, minippo.row_lengths(mask))

    def iteration(self):
        """One iteration of PPO -> seconds of rollout, scoring and update."""
        times = [now()]

        def timed(function):
            def call(*args, **kwargs):
                out = function(*args, **kwargs)
                times.append(now())
                return out

            return call

        # Timed are generate() by itself and all of the rollout.
        rollout = rollout_in_pieces(0, self.recompute_logprobs, timed(generate))
        models = self.policy, self.ref, self.score
        settings = self.optimizer, self.config, self.config.kl_coef, timed(rollout)
        self.batch, _ = minippo.ppo_iteration(*models, self.prompts, *settings)
        times.append(now())
        phases = ("rollout", "scoring", "update")
        return {phase: b - a for phase, a, b in zip(phases, times, times[1:])}

    def step(self):
        """One gradient step alone, on the first minibatch of the last iteration."""
        rows = len(self.prompts) // self.config.minibatches
        part = {name: x[:rows] for name, x in self.batch.items()}
        config = replace(self.config, epochs=1, minibatches=1)
        minippo.ppo_update(self.policy, self.optimizer, part, config)

    def products(self):
        """{phase: [(times, matrices, rows, inner, columns)]}: all matrix products of the last
        iteration.

        Padding is not counted, no one needs it. Beginnings that rows have in common are counted in
        each row: only the default task has them, and they are computed once.
        """
        c, tokens = self.policy.config, int(self.batch["mask"].sum())
        B, C, d = len(self.prompts), c.channels, c.channels // c.heads
        read = sum(map(len, self.prompts)) + tokens - B
        T = read // B

        def forward(B, positions, responses, V):
            """A trunk on B rows; the last MLP, which nobody reads elsewhere, and the head at the
            responses only."""
            yield (c.layers, 1, positions, C, 3 * C)
            yield (c.layers, 1, positions, C, C)
            for where, times in ((positions, c.layers - 1), (responses, 1)):
                yield (times, 1, where, C, 4 * C)
                yield (times, 1, where, 4 * C, C)
            yield (c.layers, B * c.heads, T, d, T)
            yield (c.layers, B * c.heads, T, T, d)
            if V:
                yield (1, 1, responses, C, V)

        def with_backward(products):  # the product, and one for the gradient of each factor
            for times, matrices, m, k, n in products:
                for shape in ((m, k, n), (m, n, k), (k, m, n)):
                    yield (times, matrices, *shape)

        parts, V = self.config.minibatches, c.vocab_size
        steps = self.config.epochs * parts
        update = with_backward(forward(B // parts, read // parts, tokens // parts, V))
        return {
            "rollout": list(forward(B, read, tokens, V)),
            "scoring": [*forward(B, read, B, 0), *forward(B, read, tokens, V)],
            "update": [(steps * times, *shape) for times, *shape in update],
        }


def seconds_of(function, repeats=5):
    function()
    out = []
    for _ in range(repeats):
        start = now()
        function()
        out.append(now() - start)
    return statistics.median(out)


def operations(products):
    return sum(2 * times * matrices * m * k * n for times, matrices, m, k, n in products)


def floor_of(products):
    """Seconds of these products, each by itself, at its own shape."""
    seconds = 0.0
    for times, matrices, m, k, n in products:
        a, b = torch.randn(matrices, m, k), torch.randn(matrices, k, n)
        out = torch.empty(matrices, m, n)
        if matrices == 1:  # mm is what a linear layer calls
            a, b, out = a[0], b[0], out[0]
        seconds += times * seconds_of(functools.partial(torch.matmul, a, b, out=out))
    return seconds


def measure(name):
    """Medians over some iterations, and their ratios to the products; both are printed."""
    work = Workload(SIZES.get(name))
    work.iteration()
    runs = [work.iteration() for _ in range(3 if name == "medium" else 5)]
    seconds = {phase: statistics.median(run[phase] for run in runs) for phase in runs[0]}
    floor = {phase: floor_of(products) for phase, products in work.products().items()}
    tokens, total = int(work.batch["mask"].sum()), sum(seconds.values())
    seconds["iteration"], floor["iteration"] = total, sum(floor.values())
    ratios = {phase: s / floor[phase] for phase, s in seconds.items()}
    print(f"\n{name}: {tokens / total:,.0f} response tokens/s")
    for phase, s in seconds.items():
        print(
            f"    {phase:<10}{s:8.3f} s   {ratios[phase]:.2f} x its products ({floor[phase]:.3f} s)"
        )
    print(f"    one gradient step alone: {1e3 * seconds_of(work.step):.1f} ms")
    return {"seconds": seconds, "ratios": ratios}


def beside_nanogpt(folder, size, rounds=9):
    """A training step on full rows of random tokens: nanoGPT's, the same with GPT-2's form of GELU,
    which takes longer, and ours -> the medians of the three, and ours to each of the others."""
    spec = importlib.util.spec_from_file_location("nanogpt", Path(folder) / "model.py")
    spec.loader.exec_module(nanogpt := importlib.util.module_from_spec(spec))
    torch.manual_seed(0)
    V, T, B = size["vocab_size"], size["prompt"][1] + size["new"], size["batch"]
    layers, heads, channels = (size[name] for name in SHAPE[2:])
    theirs = nanogpt.GPT(nanogpt.GPTConfig(T, V, layers, heads, channels, dropout=0.0, bias=True))
    ours = GPT(GPTConfig(V, T + 1, layers, heads, channels)).train()
    settings = {"betas": (0.9, 0.95), "fused": True}
    their_optimizer = torch.optim.AdamW(theirs.parameters(), 1e-6, **settings)
    our_optimizer = adamw(ours, 1e-6)
    tokens, mask = torch.randint(V, (B, T + 1)), torch.ones(B, T, dtype=torch.bool)
    states, actions = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step_of_theirs(gelu):
        for module in theirs.modules():
            if isinstance(module, torch.nn.GELU):
                module.approximate = gelu
        loss = theirs(states, actions)[1]
        their_optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        their_optimizer.step()
        return loss.item()

    def step_of_ours():
        logprobs, _, _ = minippo.evaluate_actions(ours, tokens, mask, with_entropy=False)
        loss = -logprobs.mean()
        our_optimizer.zero_grad()
        loss.backward()
        minippo.gradient_step(our_optimizer, 1.0)
        return loss.item()

    steps = lambda: step_of_theirs("none"), lambda: step_of_theirs("tanh"), step_of_ours
    times = [[seconds_of(step, 1) for step in steps] for _ in range(rounds)]
    ratios = [statistics.median(row[2] / row[i] for row in times) for i in (0, 1)]
    return {"seconds": [statistics.median(x) for x in zip(*times)], "ratios": ratios}


def main():
    flags = parser(__doc__)
    flags.add_argument("workload", nargs="?", choices=NAMES)
    flags.add_argument("--nanogpt", metavar="FOLDER", help="a clone of nanoGPT")
    args = flags.parse_args()
    prepare(RunConfig(device="cpu"))
    if args.nanogpt:
        result = {name: beside_nanogpt(args.nanogpt, size) for name, size in SIZES.items()}
        print(*result.items(), sep="\n")
        return keep({"beside_nanogpt": result})
    if args.workload:
        return measure(args.workload)
    result = {}
    for name in NAMES:
        try:
            result[name] = measure(name)
        except UserError as error:
            print(f"{name}: left out ({error})")
    keep({"speed": result})


if __name__ == "__main__":
    run_script(main)
