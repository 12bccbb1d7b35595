#!/usr/bin/env python3
"""Golden values for the tests, from Hugging Face's GPT-2 on a tiny random model.

    pip install torch transformers safetensors
    python3 golden/make_golden.py            writes beside itself

tiny/model.safetensors, tiny/config.json   what GPT2LMHeadModel.save_pretrained writes
values.safetensors                         computed in float64, stored as float32:
    x, y           [B, T]       tokens and targets, as floats
    logits         [B, T, V]
    loss           [1]          mean cross-entropy
    grad.NAME      as NAME      gradient of the loss for each parameter of the model
    step_x, step_y [10, B, T]   batches of ten AdamW steps (lr 1e-3, betas 0.9 and 0.95, eps 1e-8,
                                weight decay 0.1 on matrices, gradient norm clipped to 1)
    step_loss      [10]         loss of each step, before it is taken
masked.safetensors                         the same of targets of which most are left out:
    tokens, counts [B * T + 1]  a stream of tokens, and 1 where one counts as a target, else 0
    loss, grad.NAME             of the mean over the targets that count (ignore_index -100)
"""
import pathlib

import torch
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

HERE = pathlib.Path(__file__).resolve().parent
LAYERS, HEADS, CHANNELS, CONTEXT, VOCAB, B, T, STEPS = 3, 2, 48, 24, 131, 3, 20, 10

torch.manual_seed(20261121)
config = GPT2Config(n_layer=LAYERS, n_head=HEADS, n_embd=CHANNELS, n_positions=CONTEXT,
                    vocab_size=VOCAB, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                    bos_token_id=VOCAB - 1, eos_token_id=VOCAB - 1)
model = GPT2LMHeadModel(config)
with torch.no_grad():  # a different value for every parameter, also biases and LayerNorm
    for name, parameter in model.named_parameters():
        base = 1.0 if ".ln_" in name and name.endswith("weight") else 0.0
        parameter.copy_(base + 0.1 * torch.randn_like(parameter))
model.save_pretrained(HERE / "tiny")
for extra in (HERE / "tiny").glob("generation_config*"):
    extra.unlink()
model = model.double().eval()


def loss_of(x, y):
    logits = model(input_ids=x, use_cache=False).logits
    return logits, torch.nn.functional.cross_entropy(logits.view(-1, VOCAB), y.view(-1))


values = {}
x, y = (torch.randint(0, VOCAB, (B, T)) for _ in range(2))
logits, loss = loss_of(x, y)
loss.backward()
values.update(x=x, y=y, logits=logits, loss=loss.reshape(1))
for name, parameter in model.named_parameters():
    values["grad." + name] = parameter.grad

decayed = [p for p in model.parameters() if p.dim() >= 2]
others = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1},
                               {"params": others, "weight_decay": 0.0}],
                              lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
values["step_x"] = torch.randint(0, VOCAB, (STEPS, B, T))
values["step_y"] = torch.randint(0, VOCAB, (STEPS, B, T))
losses = []
for x, y in zip(values["step_x"], values["step_y"]):
    optimizer.zero_grad()
    _, loss = loss_of(x, y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.detach())
values["step_loss"] = torch.stack(losses)

save_file({name: value.detach().float().contiguous() for name, value in values.items()},
          str(HERE / "values.safetensors"), metadata={"format": "pt"})

# Fine-tuning: three documents in one stream of tokens. PyTorch ignores targets of -100.
# Sequences of T + 1 tokens overlap by one; none of the second one's targets counts.
model = GPT2LMHeadModel.from_pretrained(HERE / "tiny").double().eval()
tokens = torch.randint(0, VOCAB, (B * T + 1,))
counts = torch.zeros(B * T + 1)
counts[16:21] = counts[44:] = 1
targets = torch.where(counts[1:] > 0, tokens[1:], -100)
_, loss = loss_of(tokens[:-1].view(B, T), targets.view(B, T))
loss.backward()
values = {"tokens": tokens, "counts": counts, "loss": loss.reshape(1)}
for name, parameter in model.named_parameters():
    values["grad." + name] = parameter.grad
save_file({name: value.detach().float().contiguous() for name, value in values.items()},
          str(HERE / "masked.safetensors"), metadata={"format": "pt"})
