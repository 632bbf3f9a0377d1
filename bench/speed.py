"""How fast: always beside something else in the same run.

    python -m bench.speed                     all of it, some minutes; writes bench/results.json
    python -m bench.speed --workload small    one: small, medium, or default (make run comes first)

Steps of the three stages are timed in turn with the same steps without plumbing/packing.py; and,
where TRL is installed, an iteration of PPO with TRL's, and sampling with the generate() of
transformers.
"""

import importlib.util
import itertools
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import minippo
from bench.tables import ROOT, keep, made, tables
from bench.trl_ppo import make_trainer
from data.files import UserError
from minippo import GPT, GPTConfig, PPOConfig, RewardModel, frozen_copy, generate, gradient_step
from plumbing.checkpoints import load_checkpoint, save_checkpoint
from plumbing.errors import run_script
from plumbing.flags import RunConfig, prepare, read_flags
from plumbing.packing import packed
from plumbing.page import rounded
from plumbing.rows import batch_of, read_ids, read_prompts
from plumbing.tokenizer import Tokenizer
from plumbing.training import adamw, backward
from train_ppo import StageConfig
from train_rm import rm_loss
from train_sft import completion_tokens, sft_loss

# Vocabulary, context, layers, heads, channels; rows, longest prompt, new tokens. None: in out/
SIZES = {
    "default": None,
    "small": (1024, 128, 4, 4, 128, 64, 24, 48),
    "medium": (4096, 256, 6, 6, 384, 32, 48, 64),
}


class Workload:
    """Models, rows and settings of the three stages. prepare_model: packed(), or a function that
    leaves a model as it is."""

    def __init__(self, size, prepare_model=packed):
        torch.manual_seed(0)
        if size is None:
            policy, self.tokenizer, _ = load_checkpoint(ROOT / "out" / "sft.pt", ["sft"])
            rm, _, _ = load_checkpoint(ROOT / "out" / "rm.pt", ["rm"])
            source = "train", self.tokenizer, policy.config.context
            zoo, self.config = ROOT / "data" / "zoo", PPOConfig()
            rows, pairs = (read_ids(zoo, task, *source) for task in ("sft", "pref"))
            self.rows, self.pairs = batch_of(rows, 0, 64, 0), batch_of(pairs, 0, 64, 0)
            self.prompts = batch_of(read_prompts(zoo, *source), 0, 128, 0)
        else:
            *shape, count, longest, new = size
            policy = GPT(GPTConfig(*shape)).eval()
            eos = policy.config.eos
            with torch.no_grad():  # the end token has a logit of -100: no response ends early
                policy.trunk.norm.weight[0], policy.trunk.norm.bias[0] = 0, 1
                policy.lm_head.weight[eos, 0] = -100
            rm, self.tokenizer = RewardModel(policy), made_up_tokenizer(eos)
            self.config = PPOConfig(max_new_tokens=new, epochs=4, minibatches=4)

            def texts(longest):
                lengths = torch.randint(longest // 3, longest + 1, (count,)).tolist()
                return [torch.randint(eos, (n,)).tolist() for n in lengths]

            self.prompts, answers, others = texts(longest), texts(new), texts(new)
            self.rows = [*zip(self.prompts, answers)]
            self.pairs = [*zip(self.prompts, answers, others)]
        self.policy, self.rm = prepare_model(policy), prepare_model(rm)
        self.ref = frozen_copy(self.policy)
        self.optimizer, self.rm_optimizer = adamw(policy, 1e-6), adamw(rm, 1e-6)

    def score(self, tokens, mask):
        return self.rm(tokens, minippo.row_lengths(mask))

    def sft_step(self):
        self.optimizer.zero_grad()
        backward(sft_loss, self.policy, self.rows, 0, completion_tokens)
        gradient_step(self.optimizer, 1.0)

    def rm_step(self):
        self.rm_optimizer.zero_grad()
        backward(rm_loss, self.rm, self.pairs, 0, len)
        gradient_step(self.rm_optimizer, 1.0)

    def iteration(self):
        """One iteration of PPO -> seconds of sampling, scoring and update."""
        times = [time.perf_counter()]

        def timed_generate(*given):
            sampled = generate(*given)
            times.append(time.perf_counter())
            return sampled

        models = self.policy, self.ref, self.score
        batch = minippo.rollout(*models, self.prompts, self.config, timed_generate)
        times.append(time.perf_counter())
        batch |= minippo.compute_advantages(batch, self.config)
        minippo.ppo_update(self.policy, self.optimizer, batch, self.config)
        times.append(time.perf_counter())
        return [end - begin for begin, end in itertools.pairwise(times)]


def made_up_tokenizer(tokens):
    letters = [bytes([b]) for b in range(256)]
    pairs = (a + b for a, b in itertools.product(letters, letters))
    return Tokenizer([*letters, *itertools.islice(pairs, tokens - 256)])


def in_turn(*functions, rounds=5):
    """Seconds of each function, called in turn: a row for each round, after one that does not
    count."""

    def seconds(function):
        start = time.perf_counter()
        function()
        return time.perf_counter() - start

    return [[seconds(function) for function in functions] for _ in range(rounds + 1)][1:]


def ratio(rows):
    """How many times as long the first takes as the second."""
    return statistics.median(row[0] / row[1] for row in rows)


def measure(name):
    """{what: seconds, or how many times as long something else takes}"""
    work, plain = Workload(SIZES[name]), Workload(SIZES[name], lambda model: model)
    found = {
        f"{step} without packing, times as long": ratio(in_turn(a, b))
        for step, a, b in (
            ("SFT step", plain.sft_step, work.sft_step),
            ("reward model's step", plain.rm_step, work.rm_step),
            ("iteration of PPO", plain.iteration, work.iteration),
        )
    }
    phases = [statistics.median(x) for x in zip(*(work.iteration() for _ in range(5)))]
    found |= {f"{phase}, s": x for phase, x in zip(("sampling", "scoring", "update"), phases)}
    return found | (beside_others(work) if importlib.util.find_spec("trl") else {})


def beside_others(work):
    """How many times as long transformers takes to sample, and TRL for an iteration of PPO."""
    from plumbing.hf import export, import_transformers

    transformers, B, rows = import_transformers(), len(work.prompts), []
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        for kind, model in (("sft", work.policy), ("rm", work.rm)):
            save_checkpoint(folder / f"{kind}.pt", kind, model, work.tokenizer)
            export(folder / f"{kind}.pt", folder / kind)
        run = RunConfig(out=folder, device="cpu")
        stage = StageConfig(steps=4, batch_size=B, lr=1e-6, warmup=0)
        trainer, model = make_trainer(run, work.config, stage, work.prompts)
        given = trainer.processing_class.pad({"input_ids": work.prompts}, return_tensors="pt")
        given["input_ids"] *= given["attention_mask"]  # this model does not know their padding
        new = work.config.max_new_tokens
        settings = {"do_sample": True, "top_k": 0, "max_new_tokens": new, "pad_token_id": 0}
        sampling = in_turn(
            lambda: model.generate(**given, **settings),
            lambda: generate(work.policy, work.prompts, new),
        )

        class InTurn(transformers.TrainerCallback):
            def on_train_begin(self, *_, **__):
                self.start = time.perf_counter()

            def on_step_end(self, *_, **__):
                rows.append([time.perf_counter() - self.start, sum(work.iteration())])
                self.start = time.perf_counter()

        trainer.add_callback(InTurn())
        trainer.train()
    beside = {"generate() of transformers, times as long": ratio(sampling)}
    return beside | {"iteration of TRL's PPO, times as long": ratio(rows[1:])}


@dataclass
class SpeedConfig:
    workload: str = ""  # small, medium or default; all if it is empty


def main():
    (args,) = read_flags(__doc__, SpeedConfig())
    if args.workload not in ("", *SIZES):
        raise UserError(f"--workload {args.workload}: should be one of {', '.join(SIZES)}")
    prepare(RunConfig(device="cpu", out=ROOT / "out" / "speed"))
    names = [args.workload] if args.workload else SIZES
    found, source = {name: measure(name) for name in names}, {"made": made()}
    labels = dict.fromkeys(label for x in found.values() for label in x)
    speed = {x: {name: found[name].get(x) for name in names} | source for x in labels}
    if not args.workload:
        keep({"speed": speed})
    print(tables(rounded({"speed": speed}))["speed"])


if __name__ == "__main__":
    run_script(main)
