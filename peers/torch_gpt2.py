#!/usr/bin/env python3
"""The same work as `bench`, by PyTorch: GPT-2 under torch.compile, flash attention, fused AdamW.

    pip install torch numpy
    python3 peers/torch_gpt2.py [--model gpt2] [--dtype fp16|bf16|fp32] [--batch 32] [--seq 1024]
                                [--accum 1] [--steps 30] [--warmup 10] [--eager]

A step is forward and backward of each micro-batch, unscaling, clipping of the global norm to 1 and AdamW;
fp16 runs under autocast with GradScaler, bf16 under autocast. Tokens follow Zipf's law. One line of JSON
at the end: median, minimum and maximum of the step time in ms, and tokens/s of the median.
"""
import argparse
import contextlib
import json
import math
import statistics

import torch
import torch.nn as nn
import torch.nn.functional as F

MODELS = {"gpt2": (12, 12, 768), "gpt2-medium": (24, 16, 1024), "gpt2-large": (36, 20, 1280),
          "gpt2-xl": (48, 25, 1600)}
VOCAB, VOCAB_PADDED = 50257, 50304


class Block(nn.Module):
    def __init__(self, heads, channels):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.qkv, self.proj = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.fc, self.fcproj = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2)
                   for y in self.qkv(self.ln_1(x)).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.fcproj(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, layers, heads, channels, context):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB_PADDED, channels), nn.Embedding(context, channels)
        self.blocks = nn.ModuleList(Block(heads, channels) for _ in range(layers))
        self.ln_f = nn.LayerNorm(channels)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                std = 0.02 / math.sqrt(2 * layers) if "proj" in name else 0.02
                nn.init.normal_(p, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, x, y):
        h = self.wte(x) + self.wpe.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        logits = F.linear(self.ln_f(h), self.wte.weight)
        return F.cross_entropy(logits.view(-1, VOCAB_PADDED).float(), y.view(-1))


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="gpt2")
    parser.add_argument("--dtype", choices=["fp16", "bf16", "fp32"], default="fp16")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--accum", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    args = parser.parse_args()

    torch.manual_seed(1)
    torch.set_float32_matmul_precision("highest" if args.dtype == "fp32" else "high")
    model = GPT2(*MODELS[args.model], args.seq).cuda()
    decayed = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1},
                                   {"params": others, "weight_decay": 0.0}],
                                  lr=6e-4, betas=(0.9, 0.95), eps=1e-8, fused=True)
    run = model if args.eager else torch.compile(model)
    scaler = torch.amp.GradScaler("cuda", enabled=args.dtype == "fp16")
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(args.dtype)
    autocast = (lambda: torch.autocast("cuda", half)) if half else contextlib.nullcontext
    zipf = 1.0 / torch.arange(1, VOCAB + 1, dtype=torch.float64)
    tokens = torch.multinomial(zipf, args.accum * args.batch * (args.seq + 1), replacement=True)
    tokens = tokens.view(args.accum, args.batch, args.seq + 1).cuda()

    def step():
        for micro in range(args.accum):
            with autocast():
                loss = run(tokens[micro, :, :-1].contiguous(), tokens[micro, :, 1:].contiguous())
            scaler.scale(loss / args.accum).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss

    for _ in range(args.warmup):
        step()
    times = []
    for _ in range(args.steps):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        loss = step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    median = statistics.median(times)
    print(json.dumps({
        "peer": "torch " + torch.__version__ + (" eager" if args.eager else " compile"),
        "gpu": torch.cuda.get_device_name(), "model": args.model, "dtype": args.dtype,
        "batch": args.batch, "seq": args.seq, "accum": args.accum, "step_ms_median": round(median, 3),
        "step_ms_min": round(min(times), 3), "step_ms_max": round(max(times), 3),
        "tokens_per_second": round(args.accum * args.batch * args.seq / median * 1e3),
        "loss": float(loss)}))


if __name__ == "__main__":
    main()
