"""Eleven more kinds of models, of transformers, diffusers, peft, monai, torch_geometric and torch.compile, train in half of the plain
step's peak, or in the least that there is, with the bits of plain training.

usage: more_models_test.py [--table [MODEL...]]

  --table   prints bytes, times and the time of planning instead, for benchmarks/results
"""

import copy
import gc
import itertools
import statistics
import sys
import unittest
import warnings

import torch
from torch import nn
from torch.nn import functional as F

import snug
from zoo_test import backward, bits, seconds, trained

try:
    import diffusers
    import monai
    import peft
    import torch_geometric
    import transformers
except ModuleNotFoundError as missing:
    print(f"skipped: {missing}; script/setup --zoo installs it")
    sys.exit(77)

WORDS, TIME, STEPS, TURNS = 128, 64, 3, 9


def words(generator, items=4, time=TIME):
    return torch.randint(1, WORDS, (items, time), generator=generator)


class OfTransformers(nn.Module):
    """The loss that a model of transformers returns."""

    def __init__(self, model, *names):
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs):
        return self.model(**dict(zip(self.names, inputs))).loss


def mamba():
    config = transformers.MambaConfig(vocab_size=WORDS, hidden_size=64, state_size=8, num_hidden_layers=4)
    return OfTransformers(transformers.MambaForCausalLM(config), "input_ids", "labels"), lambda g: [words(g)] * 2


def mixture_of_experts():
    config = transformers.MixtralConfig(vocab_size=WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
                                        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
    return OfTransformers(transformers.MixtralForCausalLM(config), "input_ids", "labels"), lambda g: [words(g)] * 2


class Diffusion(nn.Module):
    """Tells the noise in a picture."""

    def __init__(self):
        super().__init__()
        self.unet = diffusers.UNet2DModel(32, 3, 3, block_out_channels=(32, 64), norm_num_groups=8, layers_per_block=1,
                                          down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"))
        self.noises = diffusers.DDPMScheduler()

    def forward(self, pictures, times):
        noise = torch.randn_like(pictures)
        return F.mse_loss(self.unet(self.noises.add_noise(pictures, noise, times), times).sample, noise)


def diffusion():
    return Diffusion(), lambda g: [torch.randn(4, 3, 32, 32, generator=g), torch.randint(0, 1000, (4,), generator=g)]


class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.coder = diffusers.AutoencoderKL(block_out_channels=(16, 32), down_block_types=("DownEncoderBlock2D",) * 2,
                                             up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=8)

    def forward(self, pictures):
        latent = self.coder.encode(pictures).latent_dist
        return F.mse_loss(self.coder.decode(latent.sample()).sample, pictures) + 1e-4 * latent.kl().mean()


def vae():
    return Vae(), lambda g: [torch.randn(4, 3, 32, 32, generator=g)]


def speech():
    config = transformers.WhisperConfig(vocab_size=WORDS, num_mel_bins=16, encoder_layers=3, decoder_layers=3, encoder_attention_heads=4,
                                        decoder_attention_heads=4, d_model=64, encoder_ffn_dim=128, decoder_ffn_dim=128, dropout=0.1,
                                        max_source_positions=64, max_target_positions=32, pad_token_id=0, bos_token_id=1,
                                        eos_token_id=2, decoder_start_token_id=1)
    model = OfTransformers(transformers.WhisperForConditionalGeneration(config), "input_features", "labels")
    return model, lambda g: [torch.randn(4, 16, 128, generator=g), words(g, time=16)]


class Graphs(nn.Module):
    """Edges with attention, in batches of graphs."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([torch_geometric.nn.GATv2Conv(32, 8, heads=4, dropout=0.1) for _ in range(4)])
        self.head = nn.Linear(32, 4)

    def forward(self, nodes, edges, graph, kinds):
        for layer in self.layers:
            nodes = nodes + F.elu(layer(nodes, edges))
        return F.cross_entropy(self.head(torch_geometric.nn.global_add_pool(nodes, graph, 16)), kinds)


def batch_of_graphs(generator):
    edges = torch.randint(0, 32, (2, 16 * 96), generator=generator) + torch.arange(16).repeat_interleave(96) * 32
    kinds = torch.randint(0, 4, (16,), generator=generator)
    return [torch.randn(512, 32, generator=generator), edges, torch.arange(16).repeat_interleave(32), kinds]


def graphs():
    return Graphs(), batch_of_graphs


class Gin(nn.Module):
    """A graph isomorphism network, with BatchNorm and dropout."""

    def __init__(self):
        super().__init__()
        self.net = torch_geometric.nn.GIN(32, 64, 4, dropout=0.1, norm="batch_norm")
        self.head = nn.Linear(64, 4)

    def forward(self, nodes, edges, graph, kinds):
        return F.cross_entropy(self.head(torch_geometric.nn.global_add_pool(self.net(nodes, edges), graph, 16)), kinds)


def gin():
    return Gin(), batch_of_graphs


class Volumes(nn.Module):
    """16 kinds of tissue. With AVX-512 the workspace of a convolution pads channels to 16: with 3 kinds no plan takes less than 0.54 of the
    plain peak, and with AVX2 (ONEDNN_MAX_CPU_ISA=AVX2) plans take half."""

    def __init__(self):
        super().__init__()
        self.unet = monai.networks.nets.UNet(3, 1, 16, channels=(16, 32, 64), strides=(2, 2), num_res_units=2, dropout=0.1)
        self.loss = monai.losses.DiceCELoss(to_onehot_y=True, softmax=True)

    def forward(self, volumes, labels):
        return self.loss(self.unet(volumes), labels)


def volumes():
    return Volumes(), lambda g: [torch.randn(2, 1, 16, 16, 16, generator=g), torch.randint(0, 16, (2, 1, 16, 16, 16), generator=g)]


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        of_both = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
        text = {**of_both, "vocab_size": WORDS, "max_position_embeddings": 16, "eos_token_id": 2}
        pictures = {**of_both, "image_size": 32, "patch_size": 8}
        self.model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=pictures, projection_dim=32))

    def forward(self, texts, pictures):
        return self.model(input_ids=texts, pixel_values=pictures, return_loss=True).loss


def clip():
    return Clip(), lambda g: [words(g, 8, 16), torch.randn(8, 3, 32, 32, generator=g)]


def lora():
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=WORDS, hidden_size=96, intermediate_size=256, num_hidden_layers=4,
                                                                  num_attention_heads=4, num_key_value_heads=2))
    adapters = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    return OfTransformers(peft.get_peft_model(base, adapters), "input_ids", "labels"), lambda g: [words(g)] * 2


class CompiledBlocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 64), nn.Linear(64, WORDS)
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True) for _ in range(6)])
        self.compiled = [torch.compile(block, backend="aot_eager") for block in self.blocks]

    def __deepcopy__(self, memo):
        copied = CompiledBlocks()
        copied.load_state_dict(self.state_dict())
        return copied.train(self.training)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.compiled:
            x = block(x)
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def compiled_blocks():
    return CompiledBlocks(), lambda g: [words(g)]


MODELS = {make.__name__: make for make in (mamba, mixture_of_experts, diffusion, vae, speech, graphs, gin, volumes, clip, lora, compiled_blocks)}


class Comparison:
    """A model's plain training, and the same under a plan for half of the plain peak, or for the least that there is."""

    def __init__(self, name):
        torch.manual_seed(1)
        torch._dynamo.reset()
        self.model, batch = MODELS[name]()
        self.model.train()
        generator = torch.Generator().manual_seed(5)
        self.batches = [batch(generator) for _ in range(STEPS)]
        trained(copy.deepcopy(self.model), self.batches[:1])  # which compiles what is to be compiled
        self.plain, peaks = trained(copy.deepcopy(self.model), self.batches)
        self.plain_peak = peaks[0]
        loss_of = lambda: self.model(*self.batches[0])
        planning = []

        def planned(budget):
            made = []
            try:
                planning[:] = [seconds(lambda: made.append(snug.plan(loss_of, budget)))]
            except snug.BudgetExceeded as error:
                return planned(error.smallest_feasible)
            return made[0]

        self.plan = planned(self.plain_peak // 2)
        self.planning, self.is_floor = planning[0], self.plan.peak_bytes > self.plain_peak // 2
        self.planned, self.peaks = trained(copy.deepcopy(self.model), self.batches, self.plan)

    def same_bits(self):
        return all(bits(plain).equal(bits(planned)) for plain, planned in zip(self.plain, self.planned, strict=True))


class MoreModels(unittest.TestCase):
    def test_train_in_half_of_the_peak_with_the_same_bits(self):
        for name in MODELS:
            with self.subTest(name):
                compared = Comparison(name)
                self.assertTrue(compared.same_bits())
                self.assertEqual(compared.peaks[0], compared.plan.peak_bytes)
                self.assertFalse(compared.is_floor)
                self.assertEqual(compared.plan.deviation, "")
                self.assertLessEqual(max(compared.peaks), compared.plan.peak_bytes)


def row(name):
    compared = Comparison(name)
    model, batch, plan = compared.model, compared.batches[0], compared.plan
    backward(model, batch, None)
    turns = [(seconds(lambda: backward(model, batch, None)), seconds(lambda: backward(model, batch, plan))) for _ in range(TURNS)]
    plain, planned = map(min, zip(*turns))
    mib = [f"{count / 2**20:.2f}" for count in (compared.plain_peak, plan.peak_bytes, max(compared.peaks))]
    share = f"{plan.peak_bytes / compared.plain_peak:.2f}{' (least)' if compared.is_floor else ''}"
    return [name, mib[0], share, *mib[1:], "equal" if compared.same_bits() else "DIFFER", f"{1e3 * plain:.1f}",
            f"{statistics.median(b / a for a, b in turns):.2f}", f"{planned / plain / (plan.seconds / plan.plain_seconds):.2f}",
            f"{planned / plan.seconds:.2f}", f"{compared.planning / plain:.0f}", plan.deviation or "-"]


def print_table(names):
    gc.disable()  # its pauses are longer than a step
    columns = ["model", "plain peak, MiB", "share of the plain peak", "predicted, MiB", "measured, MiB", "bits", "plain step, ms",
               "time of the plan", "measured / predicted slowdown", "measured / predicted seconds", "planning, plain steps", "other operators"]
    for cells in itertools.chain((columns, ["---"] * len(columns)), map(row, names)):
        print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if sys.argv[1:2] == ["--table"]:
        print_table(sys.argv[2:] or MODELS)
    else:
        unittest.main()
