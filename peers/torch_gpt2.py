#!/usr/bin/env python3
"""Times the work of `bench` in PyTorch: GPT-2 under torch.compile, flash attention, fused AdamW.

    pip install torch numpy
    python3 peers/torch_gpt2.py [--model gpt2] [--dtype fp16|bf16|tf32|fp32] [--batch 32] [--seq 1024]
                                [--accum 1] [--steps 30] [--warmup 10] [--wte-rows 50304] [--eager]
    torchrun --nproc-per-node 8 peers/torch_gpt2.py ...     DistributedDataParallel with
                                                            ZeroRedundancyOptimizer: ZeRO stage 1
    pip install torchao; python3 peers/torch_gpt2.py --float8 tensorwise|rowwise ...
                                                            torchao's 8-bit products in the blocks' Linear
                                                            layers; the head's stay in 16 bits
    pip install deepspeed; torchrun --nproc-per-node 8 peers/torch_gpt2.py --deepspeed 1 ...
                                                            DeepSpeed, ZeRO stage 1

A step is forward and backward of each micro-batch, unscaling, clipping of the global norm to 1 and AdamW;
fp16 runs under autocast with GradScaler, bf16 under autocast, and both as weights in DeepSpeed, which
scales the loss itself. wte has 50,304 rows: PyTorch's products are then faster than with GPT-2's own
50,257, which Hugging Face's model has (--wte-rows 50257). Tokens follow Zipf's law. Rank 0 prints one
line of JSON at the end: median, minimum and maximum of its step time in ms, and the tokens/s of all
ranks at the median.
"""
import argparse
import contextlib
import json
import math
import os
import statistics

import torch
import torch.nn as nn
import torch.nn.functional as F

MODELS = {"gpt2": (12, 12, 768), "gpt2-medium": (24, 16, 1024), "gpt2-large": (36, 20, 1280),
          "gpt2-xl": (48, 25, 1600)}
VOCAB = 50257
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
ADAMW = {"lr": 6e-4, "betas": (0.9, 0.95), "eps": 1e-8}


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
    def __init__(self, layers, heads, channels, rows, context):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(rows, channels), nn.Embedding(context, channels)
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
        return F.cross_entropy(logits.flatten(0, 1).float(), y.view(-1))


def in_turns(args, model, groups, world):
    """A step in PyTorch alone; DistributedDataParallel reduces gradients in the last micro-step."""
    run = model if args.eager else torch.compile(model)
    if world > 1:
        from torch.distributed.optim import ZeroRedundancyOptimizer
        run = nn.parallel.DistributedDataParallel(run, gradient_as_bucket_view=True)
        optimizer = ZeroRedundancyOptimizer(groups, optimizer_class=torch.optim.AdamW,
                                            parameters_as_bucket_view=True, fused=True, **ADAMW)
    else:
        optimizer = torch.optim.AdamW(groups, fused=True, **ADAMW)
    scaler = torch.amp.GradScaler("cuda", enabled=args.dtype == "fp16")
    half = HALF.get(args.dtype)
    autocast = (lambda: torch.autocast("cuda", half)) if half else contextlib.nullcontext

    def step(tokens):
        for micro in range(args.accum):
            alone = world > 1 and micro < args.accum - 1
            with run.no_sync() if alone else contextlib.nullcontext():
                with autocast():
                    loss = run(tokens[micro, :, :-1].contiguous(), tokens[micro, :, 1:].contiguous())
                scaler.scale(loss / args.accum).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss
    return step


def by_deepspeed(args, model, groups, world):
    """A step in DeepSpeed: half-precision weights, its own loss scaler, its overlap switched on."""
    import deepspeed
    optimizer = torch.optim.AdamW(groups, fused=True, **ADAMW)
    config = {"train_micro_batch_size_per_gpu": args.batch, "gradient_accumulation_steps": args.accum,
              "gradient_clipping": 1.0, "zero_allow_untested_optimizer": True,
              "zero_optimization": {"stage": args.deepspeed, "overlap_comm": True,
                                    "contiguous_gradients": True},
              "fp16": {"enabled": args.dtype == "fp16", "initial_scale_power": 16},
              "bf16": {"enabled": args.dtype == "bf16"}}
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if not args.eager:
        engine.module.forward = torch.compile(engine.module.forward)

    def step(tokens):
        for micro in range(args.accum):
            loss = engine(tokens[micro, :, :-1].contiguous(), tokens[micro, :, 1:].contiguous())
            engine.backward(loss)
            engine.step()
        return loss
    return step


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="gpt2")
    parser.add_argument("--dtype", choices=["fp16", "bf16", "tf32", "fp32"], default="fp16")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--accum", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--wte-rows", type=int, default=50304, metavar="N",
                        help="rows of the embedding, at least %d [50304]" % VOCAB)
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--float8", choices=["tensorwise", "rowwise"],
                        help="torchao: 8-bit products in the blocks, with a scale per tensor or row")
    parser.add_argument("--deepspeed", type=int, metavar="STAGE", help="DeepSpeed's engine, ZeRO STAGE")
    args = parser.parse_args()
    if args.wte_rows < VOCAB:
        parser.error("--wte-rows %d: GPT-2 has %d tokens" % (args.wte_rows, VOCAB))

    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if world > 1:
        torch.distributed.init_process_group("nccl")
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("highest" if args.dtype == "fp32" else "high")
    model = GPT2(*MODELS[args.model], args.wte_rows, args.seq).cuda()
    if args.float8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(args.float8))
    groups = [{"params": [p for p in model.parameters() if p.dim() == 2], "weight_decay": 0.1},
              {"params": [p for p in model.parameters() if p.dim() != 2], "weight_decay": 0.0}]
    make = in_turns if args.deepspeed is None else by_deepspeed
    step = make(args, model, groups, world)

    torch.manual_seed(2 + rank)
    zipf = 1.0 / torch.arange(1, VOCAB + 1, dtype=torch.float64)
    tokens = torch.multinomial(zipf, args.accum * args.batch * (args.seq + 1), replacement=True)
    tokens = tokens.view(args.accum, args.batch, args.seq + 1).cuda()
    for _ in range(args.warmup):
        step(tokens)
    times = []
    for _ in range(args.steps):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        loss = step(tokens)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    median = statistics.median(times)
    how = "" if args.deepspeed is None else ", DeepSpeed ZeRO stage %d" % args.deepspeed
    if world > 1 and args.deepspeed is None:
        how = ", DistributedDataParallel with ZeroRedundancyOptimizer"
    if args.float8:
        how += ", torchao float8 " + args.float8
    if rank == 0:
        print(json.dumps({
            "peer": "torch " + torch.__version__ + (" eager" if args.eager else " compile") + how,
            "gpu": torch.cuda.get_device_name(), "world_size": world, "model": args.model,
            "dtype": args.dtype, "batch": args.batch, "seq": args.seq, "accum": args.accum,
            "wte_rows": args.wte_rows,
            "step_ms_median": round(median, 3), "step_ms_min": round(min(times), 3),
            "step_ms_max": round(max(times), 3),
            "tokens_per_second": round(world * args.accum * args.batch * args.seq / median * 1e3),
            "loss": float(loss)}))
    if world > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
