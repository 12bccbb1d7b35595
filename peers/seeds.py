#!/usr/bin/env python3
"""Do all types learn equally well? Trains a small GPT-2 from several seeds in each type, by ./train
and by PyTorch's fp16 autocast. Compares the final validation losses, seed by seed for ./train.

    ./prepare_data --vocab data/vocab.bpe --out data --name study --val-tokens 262144 FILES...
    python3 peers/seeds.py 'data/study_train_*.bin' 'data/study_val_*.bin' [--seeds 6] [--steps 1000]
                           [--ways fp16,bf16,tf32] [--flags FLAGS] [--val-every N] [--no-torch] [--no-train]
                           [--out study.json]

A way is a type of ./train, optionally with flags after it: fp16+fp8=logits is --dtype fp16 --fp8=logits.
A seed sets the weights and the order of the data; the ways share both, so their losses are compared in
pairs. PyTorch has its own random numbers: only its mean and deviation are compared.
6 layers, 384 channels, 16 sequences of 512 tokens per step, AdamW with a peak of 1e-3, cosine to a tenth;
--flags, with --no-torch, gives ./train another model: --flags "--model gpt2 --batch 32".
"""
import argparse
import glob
import json
import math
import os
import statistics
import subprocess
import tempfile

LAYERS, HEADS, CHANNELS, SEQ, BATCH, LR, WARMUP = 6, 6, 384, 512, 16, 1e-3, 100


FLAGS = "--layers %d --heads %d --channels %d --context %d --batch %d --lr %g --warmup %d" % (
    LAYERS, HEADS, CHANNELS, SEQ, BATCH, LR, WARMUP)


def by_train(args, way, seed):
    dtype, *more = way.split("+")
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = os.path.join(scratch, "run")
        command = ["./train", "--train", args.train, "--val", args.val, "--steps", args.steps, "--seed", seed,
                   "--dtype", dtype, "--sample-tokens", 0, "--val-every", args.val_every or args.steps,
                   "--run-dir", run_dir,
                   *args.flags.split(), *("--" + flag for flag in more)]
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr[-2000:] or done.stdout[-2000:])
        losses = [json.loads(line).get("val_loss") for line in open(os.path.join(run_dir, "metrics.jsonl"))]
        return [loss for loss in losses if loss is not None]


def sequences(pattern):
    """[n, SEQ + 1] tokens from llm.c's shards: a header of 256 int32, then uint16."""
    import numpy
    parts = []
    for path in sorted(glob.glob(pattern)):
        tokens = numpy.fromfile(path, dtype=numpy.uint16, offset=1024)
        count = (len(tokens) - 1) // SEQ
        parts.append(numpy.lib.stride_tricks.sliding_window_view(tokens, SEQ + 1)[:count * SEQ:SEQ])
    return numpy.concatenate(parts).astype("int64")


def by_torch(args):
    import torch
    from torch_gpt2 import ADAMW, GPT2
    torch.set_float32_matmul_precision("high")
    train, val = (torch.from_numpy(sequences(pattern)) for pattern in (args.train, args.val))
    model = GPT2(LAYERS, HEADS, CHANNELS, 50304, SEQ).cuda()
    run = torch.compile(model)

    def loss_of(rows):
        with torch.autocast("cuda", torch.float16):
            return run(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())

    losses = []
    for seed in range(1, args.seeds + 1):
        torch.manual_seed(seed)
        model.load_state_dict(GPT2(LAYERS, HEADS, CHANNELS, 50304, SEQ).state_dict())
        groups = [{"params": [p for p in model.parameters() if p.dim() == 2], "weight_decay": 0.1},
                  {"params": [p for p in model.parameters() if p.dim() != 2], "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, fused=True, **ADAMW)
        scaler = torch.amp.GradScaler("cuda")
        order = torch.randperm(len(train))
        model.train()
        for step in range(args.steps):
            along = (step + 1 - WARMUP) / max(1, args.steps - WARMUP)
            rate = (step + 1) / WARMUP if along < 0 else 0.1 + 0.45 * (1 + math.cos(math.pi * along))
            for group in optimizer.param_groups:
                group["lr"] = LR * rate
            picks = order[torch.arange(step * BATCH, (step + 1) * BATCH) % len(order)]
            scaler.scale(loss_of(train[picks].cuda())).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            parts = [loss_of(val[i:i + BATCH].cuda()).item() for i in range(0, len(val) // BATCH * BATCH, BATCH)]
        losses.append(sum(parts) / len(parts))
    return losses


def spread(values):
    return statistics.stdev(values) if len(values) > 1 else float("nan")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", help="pattern of token shards to train on")
    parser.add_argument("val", help="pattern of token shards to validate on")
    parser.add_argument("--seeds", type=int, default=6, help="number of seeds")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--ways", default="fp16,bf16,tf32", help="types of ./train; the others are compared with the last")
    parser.add_argument("--flags", default=FLAGS, help="flags of ./train for model and batch")
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--no-train", action="store_true")
    parser.add_argument("--val-every", type=int, help="steps between ./train's validations [--steps]")
    parser.add_argument("--out", help="file for all losses as JSON, with every validation of ./train")
    args = parser.parse_args()
    losses, curves = {}, {}
    if args.flags != FLAGS and not args.no_torch:
        parser.error("PyTorch runs only the default model: with --flags add --no-torch")
    ways = [] if args.no_train else args.ways.split(",")
    for way in ways:
        curves[way] = [by_train(args, way, seed) for seed in range(1, args.seeds + 1)]
        losses["train " + way] = [curve[-1] for curve in curves[way]]
    if not args.no_torch:
        losses["PyTorch fp16 autocast"] = by_torch(args)
    print("| type | mean | deviation | losses |\n|---|---|---|---|")
    for name, values in losses.items():
        print("| %s | %.4f | %.4f | %s |" % (name, statistics.mean(values), spread(values),
                                             " ".join("%.4f" % value for value in values)))
    for way in ways[:-1]:
        pairs = [a - b for a, b in zip(losses["train " + way], losses["train " + ways[-1]])]
        print("%s - %s, in pairs: %+.4f, standard error %.4f"
              % (way, ways[-1], statistics.mean(pairs), spread(pairs) / math.sqrt(len(pairs))))
    if args.out:
        json.dump({"losses": losses, "curves": curves}, open(args.out, "w"), indent=1)


if __name__ == "__main__":
    main()
