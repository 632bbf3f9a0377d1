"""How fast, beside what the matrix products alone would take on the same machine in the same run.

    python -m bench.speed              all of it, a few minutes; writes bench/results.json
    python -m bench.speed small        one workload: small, medium, or default (the models of `make run`, in out/)
    python -m bench.speed small --profile    where the time of an iteration goes
    python -m bench.speed --nanogpt FOLDER   a plain training step beside that of nanoGPT, of which FOLDER is a clone

An iteration is minippo.ppo_iteration(), computed as the scripts compute it. Two floors stand beside it, for the same matrix
products, counted by hand: each product by itself, at its own shape; and all of them at the rate of one large product.
"""

import argparse
import dataclasses
import functools
import importlib.util
import json
import resource
import statistics
import sys
import time
from pathlib import Path

import torch

import minippo
from minippo import GPT, GPTConfig, PPOConfig, RewardModel, evaluate_actions, frozen_copy, gradient_step
from minippo import ppo_iteration, ppo_update, row_lengths
from plumbing.checkpoints import load_checkpoint
from plumbing.fast import generate
from plumbing.settings import RunConfig, UserError, prepare, run_script
from plumbing.text import read_ids
from plumbing.training import adamw

ROOT = Path(__file__).parents[1]
SMALL = {"layers": 4, "heads": 4, "channels": 128, "vocab_size": 1024, "context": 128, "batch": 64, "prompt": (8, 24), "new": 48}
MEDIUM = {"layers": 6, "heads": 6, "channels": 384, "vocab_size": 4096, "context": 256, "batch": 32, "prompt": (16, 48), "new": 64}
GPT2 = {"layers": 12, "heads": 12, "channels": 768, "vocab_size": 50257, "context": 1024, "prompt": (64, 64), "new": 64}
SIZES = {"small": SMALL, "medium": MEDIUM, "gpt2": GPT2}  # the last for bench/gpu.py
FOUR = {"epochs": 4, "minibatches": 4}
SHAPE = ("vocab_size", "context", "layers", "heads", "channels")


def now():
    """The time when everything begun so far is done, on a GPU too."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class Workload:
    """Models, prompts and settings of one PPO iteration."""

    def __init__(self, name, changes=(), device="cpu"):
        torch.manual_seed(0)
        if name == "default":
            policy, tokenizer, _ = load_checkpoint(ROOT / "out" / "sft.pt", ["sft"])
            self.reward_model, _, _ = load_checkpoint(ROOT / "out" / "rm.pt", ["rm"])
            rows = read_ids(ROOT / "data" / "zoo", "prompts", "train", tokenizer, policy.config.context)
            self.config = PPOConfig(lr=1e-6)
            self.prompts = [rows[i % len(rows)][0] for i in range(self.config.batch_size)]
        else:
            size = {**SIZES[name], **dict(changes)}
            policy, eos = GPT(GPTConfig(*(size[key] for key in SHAPE))).eval(), size["vocab_size"] - 1
            with torch.no_grad():  # the end token gets a logit of -100 and is never sampled: all responses have full length
                policy.trunk.norm.weight[0], policy.trunk.norm.bias[0], policy.trunk.token_embedding.weight[eos, 0] = 0, 1, -100
            self.reward_model = RewardModel(policy)
            low, high = size["prompt"]
            lengths = torch.randint(low, high + 1, (size["batch"],)).tolist()
            self.prompts = [torch.randint(eos, (n,)).tolist() for n in lengths]
            self.config = PPOConfig(batch_size=size["batch"], max_new_tokens=size["new"], lr=1e-6, **FOUR)
        policy = policy.to(device)
        self.policy, self.ref, self.reward_model = policy, frozen_copy(policy), frozen_copy(self.reward_model.to(device))
        self.optimizer = adamw(policy, 1e-6)

    def score(self, tokens, mask):
        return self.reward_model(tokens, row_lengths(mask))

    def iteration(self):
        """One iteration of PPO -> seconds of rollout, scoring and update."""
        times = [now()]

        def timed(function):
            def call(*args, **kwargs):
                out = function(*args, **kwargs)
                times.append(now())
                return out

            return call

        rollout = timed(functools.partial(minippo.rollout, generate=timed(generate)))
        self.batch, _ = ppo_iteration(
            self.policy, self.ref, self.score, self.prompts, self.optimizer, self.config, self.config.kl_coef, rollout
        )
        times.append(now())
        return {phase: b - a for phase, a, b in zip(("rollout", "scoring", "update"), times, times[1:])}

    def step(self):
        """One gradient step alone, on the first minibatch of the last iteration."""
        part = {name: x[: len(self.prompts) // self.config.minibatches] for name, x in self.batch.items()}
        ppo_update(self.policy, self.optimizer, part, dataclasses.replace(self.config, epochs=1, minibatches=1))

    def products(self):
        """{phase: [(times, matrices, rows, inner, columns)]}: every matrix product of the last iteration.

        Padding is not counted, no one needs it. Beginnings that rows have in common are counted in each row: only the
        default task has them, and they are computed once.
        """
        c, tokens = self.policy.config, int(self.batch["mask"].sum())
        B, d, read = len(self.prompts), c.channels // c.heads, sum(map(len, self.prompts)) + tokens - len(self.prompts)
        T = read // B

        def forward(B, positions, responses, V):
            """A trunk on B rows; the last MLP, which nobody reads elsewhere, and the head at the responses only."""
            yield (c.layers, 1, positions, c.channels, 3 * c.channels)
            yield (c.layers, 1, positions, c.channels, c.channels)
            for where, times in ((positions, c.layers - 1), (responses, 1)):
                yield (times, 1, where, c.channels, 4 * c.channels)
                yield (times, 1, where, 4 * c.channels, c.channels)
            yield (c.layers, B * c.heads, T, d, T)
            yield (c.layers, B * c.heads, T, T, d)
            if V:
                yield (1, 1, responses, c.channels, V)

        def with_backward(products):
            for times, matrices, m, k, n in products:  # the product, and one for the gradient of each factor
                yield from ((times, matrices, m, k, n), (times, matrices, m, n, k), (times, matrices, k, m, n))

        steps = self.config.epochs * self.config.minibatches
        parts = self.config.minibatches
        update = with_backward(forward(B // parts, read // parts, tokens // parts, c.vocab_size))
        return {
            "rollout": list(forward(B, read, tokens, c.vocab_size)),
            "scoring": [*forward(B, read, B, 0), *forward(B, read, tokens, c.vocab_size)],
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


def large_rate():
    """Floating-point operations a second of one large product."""
    a = torch.randn(1024, 1024)
    return 2 * 1024**3 / seconds_of(lambda: a @ a, 20)


def floors(products):
    """Seconds of these products, each by itself at its own shape and all at the rate of a large one; and their operations."""
    alone = 0.0
    for times, matrices, m, k, n in products:
        a, b, out = torch.randn(matrices, m, k), torch.randn(matrices, k, n), torch.empty(matrices, m, n)
        if matrices == 1:  # mm is what a linear layer calls
            a, b, out = a[0], b[0], out[0]
        alone += times * seconds_of(functools.partial(torch.matmul, a, b, out=out))
    operations = sum(2 * times * matrices * m * k * n for times, matrices, m, k, n in products)
    return {"alone": alone, "at_peak": operations / large_rate(), "operations": operations}


def measure(name, changes=(), repeats=5):
    """Medians over some iterations, and their floors."""
    work = Workload(name, changes)
    work.iteration()
    runs = [work.iteration() for _ in range(repeats)]
    seconds = {phase: statistics.median(run[phase] for run in runs) for phase in runs[0]}
    floor = {phase: floors(products) for phase, products in work.products().items()}
    total, tokens = sum(seconds.values()), int(work.batch["mask"].sum())
    alone, peak = (sum(x[kind] for x in floor.values()) for kind in ("alone", "at_peak"))
    return {
        "seconds": seconds | {"iteration": total}, "step": seconds_of(work.step), "floor": floor,
        "tokens_per_second": tokens / total,
        "ratios": {
            "update": seconds["update"] / floor["update"]["alone"], "iteration": total / alone,
            "update, at peak": seconds["update"] / floor["update"]["at_peak"], "iteration, at peak": total / peak,
            "rollout to update": seconds["rollout"] / seconds["update"],
        },
    }  # fmt: skip


def print_measured(name, x):
    print(f"\n{name}: {x['tokens_per_second']:,.0f} response tokens/s")
    for phase, seconds in x["seconds"].items():
        floor = [x["floor"][p] for p in x["floor"] if phase in (p, "iteration")]
        alone, peak = (sum(f[kind] for f in floor) for kind in ("alone", "at_peak"))
        print(f"    {phase:<10}{seconds:8.3f} s   {seconds / alone:.2f} x products alone ({alone:.3f} s)", end="")
        print(f"   {seconds / peak:.2f} x the same at peak ({peak:.3f} s)")
    print(f"    one gradient step alone: {1e3 * x['step']:.1f} ms")


def decoding():
    """Tokens per second of sampling alone, by batch size."""
    policy, out = Workload("small").policy, {}
    for batch in (1, 16, 64, 256):
        seconds = seconds_of(functools.partial(generate, policy, [[1] * 16] * batch, 48), 3)
        out[batch] = {"tokens_per_second": batch * 48 / seconds, "ms_per_step": seconds / 48 * 1e3}
    return out


# Each of these is doubled three times, everything else as in "small".
GROWTH = {
    "batch": [{"batch": 16 * 2**i} for i in range(4)],
    "response": [{"new": 12 * 2**i} for i in range(4)],
    "layers": [{"layers": 2**i} for i in range(4)],
    "channels": [{"channels": 32 * 2**i} for i in range(4)],
}


def growth():
    """{what: rows of value, seconds of an iteration, operations; both beside those of the first row}."""
    out = {}
    for what, steps in GROWTH.items():
        rows = []
        for change in steps:
            work = Workload("small", change.items())
            seconds = seconds_of(lambda work=work: work.iteration(), 3)
            operations = sum(2 * t * b * m * k * n for products in work.products().values() for t, b, m, k, n in products)
            rows.append({"value": change[next(iter(change))], "seconds": seconds, "operations": operations})
        for row in rows:
            row |= {f"times_{name}": row[name] / rows[0][name] for name in ("seconds", "operations")}
        out[what] = rows
    return out


def beside_nanogpt(folder, rounds=9):
    """A training step on full rows of random tokens, nanoGPT's, the same with GPT-2's form of GELU, which takes longer, and ours:
    {workload: {"seconds": the medians of the three, "ratios": ours to each of the others}}."""
    spec = importlib.util.spec_from_file_location("nanogpt", Path(folder) / "model.py")
    spec.loader.exec_module(nanogpt := importlib.util.module_from_spec(spec))
    out = {}
    for name, size in (("small", SMALL), ("medium", MEDIUM)):
        torch.manual_seed(0)
        V, T, B = size["vocab_size"], size["prompt"][1] + size["new"], size["batch"]
        shape = {"n_layer": size["layers"], "n_head": size["heads"], "n_embd": size["channels"], "dropout": 0.0, "bias": True}
        theirs = nanogpt.GPT(nanogpt.GPTConfig(block_size=T, vocab_size=V, **shape))
        ours = GPT(GPTConfig(V, T + 1, size["layers"], size["heads"], size["channels"])).train()
        optimizers = [torch.optim.AdamW(theirs.parameters(), 1e-6, betas=(0.9, 0.95), fused=True), adamw(ours, 1e-6)]
        tokens, mask = torch.randint(V, (B, T + 1)), torch.ones(B, T, dtype=torch.bool)
        states, actions = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

        def step_of_theirs(gelu, model=theirs, optimizer=optimizers[0], states=states, actions=actions):
            for module in model.modules():
                if isinstance(module, torch.nn.GELU):
                    module.approximate = gelu
            loss = model(states, actions)[1]
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss.item()

        def step_of_ours(model=ours, optimizer=optimizers[1], tokens=tokens, mask=mask):
            loss = -evaluate_actions(model, tokens, mask, with_entropy=False)[0].mean()
            optimizer.zero_grad()
            loss.backward()
            gradient_step(optimizer, 1.0)
            return loss.item()

        steps = functools.partial(step_of_theirs, "none"), functools.partial(step_of_theirs, "tanh"), step_of_ours
        times = [[seconds_of(step, 1) for step in steps] for _ in range(rounds)]
        ratios = [statistics.median(row[2] / row[i] for row in times) for i in (0, 1)]
        out[name] = {"seconds": [statistics.median(x) for x in zip(*times)], "ratios": ratios}
    return out


def peak_memory():
    """Peak resident memory in MB after 3 and after 30 iterations of "small" in this process."""
    work, out = Workload("small"), {}
    for i in range(1, 31):
        work.iteration()
        if i in (3, 30):
            out[i] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="?", choices=["small", "medium", "default"])
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--nanogpt", metavar="FOLDER", help="a clone of nanoGPT")
    args = parser.parse_args()
    prepare(RunConfig(device="cpu"))
    if args.nanogpt:
        result = beside_nanogpt(args.nanogpt)
        for name, x in result.items():
            (theirs, same, ours), (ratio, fair) = x["seconds"], x["ratios"]
            print(f"{name:>8}: nanoGPT {theirs:.3f} s a step, with GPT-2's GELU {same:.3f} s, minippo {ours:.3f} s,")
            print(f"{'':>10}{ratio:.3f} and {fair:.3f} times as long")
        return keep({"beside_nanogpt": result})
    if args.profile:
        work = Workload(args.workload or "small")
        work.iteration()
        with torch.profiler.profile() as profile:
            work.iteration()
        return print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=50))
    result = {"peak_memory": peak_memory()} if not args.workload else {}  # first: the peak of a process only ever rises
    for name in [args.workload] if args.workload else ["small", "medium", "default"]:
        try:
            result[name] = measure(name, repeats=3 if name == "medium" else 5)
        except UserError as error:
            print(f"{name}: left out ({error})", file=sys.stderr)
            continue
        print_measured(name, result[name])
    if args.workload:
        return None
    result |= {"decoding": decoding(), "growth": growth(), "gflops": large_rate() / 1e9, "threads": torch.get_num_threads()}
    print("\nsampling alone, tokens/s:", {f"batch {b}": round(x["tokens_per_second"]) for b, x in result["decoding"].items()})
    for what, rows in result["growth"].items():
        print(f"{what:>10}: " + ", ".join(f"{row['value']}: {row['seconds']:.3f} s" for row in rows))
        print(f"{'':>12}" + ", ".join(f"{row['times_seconds']:.1f} x for {row['times_operations']:.1f} x the work" for row in rows))
    print("peak memory, MB:", {f"{n} iterations": round(mb) for n, mb in result["peak_memory"].items()})
    return keep({"speed": result})


def keep(result):
    """Write it into bench/results.json."""
    path = ROOT / "bench" / "results.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | result, indent=1) + "\n")


if __name__ == "__main__":
    run_script(main)
