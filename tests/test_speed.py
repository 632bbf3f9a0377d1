"""The comparison of training steps. Run: python -m pytest tests/test_speed.py"""

import torch

from bench import results, speed

MODEL = """
from dataclasses import dataclass
import torch

SEEN = []

@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool

class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.gelu = config, torch.nn.GELU()
        self.embedding, self.head = torch.nn.Embedding(config.vocab_size, 4), torch.nn.Linear(4, config.vocab_size)

    def forward(self, tokens, targets):
        SEEN.append((self.config, self.gelu.approximate, tokens.shape, targets))
        logits = self.head(self.gelu(self.embedding(tokens)))
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""


def test_three_training_steps_are_timed_in_turn_and_ours_is_compared_with_both_others(tmp_path, monkeypatch):
    (tmp_path / "model.py").write_text(MODEL)
    tiny = {"layers": 1, "heads": 2, "channels": 8, "vocab_size": 11, "context": 9, "batch": 3, "prompt": (2, 4), "new": 2}
    monkeypatch.setattr(speed, "SMALL", tiny)
    monkeypatch.setattr(speed, "MEDIUM", tiny | {"layers": 2})
    took, losses = [], []

    def seconds_of(step, repeats):
        losses.append(step())
        took.append([2.0, 4.0, 6.0][len(took) % 3] * (1 + (len(took) // 3) % 3))  # rounds of the machine's own pace
        return took[-1]

    monkeypatch.setattr(speed, "seconds_of", seconds_of)
    modules = []
    real = speed.importlib.util.module_from_spec
    monkeypatch.setattr(speed.importlib.util, "module_from_spec", lambda spec: modules.append(real(spec)) or modules[-1])
    out = speed.beside_nanogpt(tmp_path, rounds=3)
    assert out == {name: {"seconds": [4.0, 8.0, 12.0], "ratios": [3.0, 1.5]} for name in ("small", "medium")}
    (module,) = [module for module in modules if module.__name__ == "nanogpt"]
    assert [gelu for _, gelu, _, _ in module.SEEN] == ["none", "tanh"] * 6 and {shape for _, _, shape, _ in module.SEEN} == {(3, 6)}
    config = module.SEEN[0][0]
    assert (config.block_size, config.vocab_size, config.n_layer, config.n_head, config.n_embd) == (6, 11, 1, 2, 8)
    assert (config.dropout, config.bias) == (0.0, True) and module.SEEN[-1][0].n_layer == 2
    assert all(abs(loss - torch.log(torch.tensor(11.0))) < 1 for loss in losses)


def test_the_table_of_training_steps():
    x = {"beside_nanogpt": {"small": {"seconds": [0.2, 0.22, 0.21], "ratios": [1.05, 0.954]}}, "speed": {"growth": {}}}
    assert results.speed_tables(x)["nanogpt"].splitlines()[2] == "| small | 200 | 220 | 210 | 1.05 | 0.95 |"
