"""auto_checkpoint in the trainers that people use, and around models of theirs: the examples of examples/python, adapters of peft,
and models of transformers with checkpoints of their own. script/setup --zoo installs the libraries; without them the test is
skipped.
"""

import copy
import importlib.util
import pathlib
import runpy
import sys
import unittest
import warnings

import torch

import snug

ROOT = pathlib.Path(__file__).resolve().parents[2]
missing = [name for name in ("transformers", "accelerate", "lightning", "peft") if importlib.util.find_spec(name) is None]
if missing:
    print(f"skipped: no {', '.join(missing)}; script/setup --zoo installs them")
    sys.exit(77)
if importlib.util.find_spec("torchvision") and importlib.util.find_spec("timm"):
    sys.path.append(str(ROOT / "tests" / "exported"))
    import zoo  # noqa: F401  which makes torchvision's wheel load beside a torch for CPUs

import peft  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402


class Examples(unittest.TestCase):
    """They assert the same bits, and half of the activations."""

    def run_example(self, name):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            runpy.run_path(str(ROOT / "examples" / "python" / name), run_name="__main__")

    def test_of_trainer_keeps_to_half(self):
        self.run_example("with_trainer.py")

    def test_of_accelerate_keeps_to_half(self):
        self.run_example("with_accelerate.py")

    def test_of_lightning_keeps_to_half(self):
        self.run_example("with_lightning.py")


def llama():
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4,
                                        max_position_embeddings=64, use_cache=False)).train()


TOKENS = (torch.arange(8)[:, None] * 7 + torch.arange(48)) % 128


def trained(model, steps=3):
    """Losses, and weights that were trained; and the most bytes that were alive in forward and backward."""
    torch.manual_seed(2)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses, peak = torch.optim.AdamW(parameters, lr=1e-2), [], 0
    for _ in range(steps):
        level = snug.live_bytes()
        with snug.MemoryMeter() as meter:
            loss = model(input_ids=TOKENS, labels=TOKENS).loss
            loss.backward()
        peak = max(peak, level + meter.report().peak_bytes)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(p.detach().clone() for p in parameters)], peak


class Models(unittest.TestCase):
    def test_with_a_frozen_base_and_adapters_keep_to_half(self):
        model = peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))
        level = snug.live_bytes()
        plain, peak = trained(copy.deepcopy(model))
        budget = (level + peak) // 2
        model = snug.auto_checkpoint(model, memory_budget=budget)
        planned, planned_peak = trained(model)
        self.assertTrue(all(torch.equal(a, b) for a, b in zip(plain, planned, strict=True)))
        self.assertLessEqual(planned_peak, budget)
        self.assertEqual(set(peft.get_peft_model_state_dict(model)), set(peft.get_peft_model_state_dict(copy.deepcopy(model))))

    def test_with_checkpoints_of_their_own_are_told_and_have_the_same_bits(self):
        model = llama()
        plain, _ = trained(copy.deepcopy(model))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        snug.auto_checkpoint(model, memory_budget="1GiB")
        with self.assertWarnsRegex(UserWarning, "gradient checkpointing of its own on.*gradient_checkpointing_disable"):
            planned, _ = trained(model)
        self.assertTrue(all(torch.equal(a, b) for a, b in zip(plain, planned, strict=True)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    unittest.main()
