#!/usr/bin/env python3
"""Times the work of `bench` in PyTorch: GPT-2 under torch.compile, flash attention, fused AdamW or
Muon. With --train it repeats a training of `train` instead, and prints the loss of each step.

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
    ./train ... --lr 0 --steps 1 --save-weights first       writes the first weights of both sides
    ./train ... --init-from first --run-dir run --schedule linear --min-lr 0 --warmup 20 ...
                                                            the kit's training
    python3 peers/torch_gpt2.py --train GLOB --init-from first --optimizer muon --dtype fp32 --batch 8
                                --seq 128 --steps 500 --lr 4e-3 --lr-warmup 20 [--seed 1337]
                                [--compare run/metrics.jsonl]
                                                            the same sequences and rates; without a GPU
                                                            on the CPU, with --eager

--optimizer muon takes torch.optim.Muon (PyTorch 2.9 or newer) for the matrices of the blocks, and AdamW
for the rest. q, k and v are three matrices. PyTorch's factor sqrt(max(1, outputs / inputs)) times
0.2 sqrt(channels) is the kit's factor; PyTorch multiplies in bf16, as the kit does on a GPU.

A step is forward and backward of each micro-batch, unscaling, clipping of the global norm to 1 and AdamW;
fp16 runs under autocast with GradScaler, bf16 under autocast, and both as weights in DeepSpeed, which
scales the loss itself. wte has 50,304 rows: PyTorch's products are then faster than with GPT-2's own
50,257, which Hugging Face's model has (--wte-rows 50257). Tokens follow Zipf's law. Rank 0 prints one
line of JSON at the end: median, minimum and maximum of its step time in ms, and the tokens/s of all
ranks at the median.
"""
import argparse
import contextlib
import glob
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
    def __init__(self, heads, channels, parts):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.qkv = nn.ModuleList(nn.Linear(channels, 3 * channels // parts) for _ in range(parts))
        self.proj = nn.Linear(channels, channels)
        self.fc, self.fcproj = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)

    def forward(self, x):
        b, t, c = x.shape
        weight, bias = self.qkv[0].weight, self.qkv[0].bias
        if len(self.qkv) > 1:
            weight, bias = (torch.cat([getattr(part, name) for part in self.qkv])
                            for name in ("weight", "bias"))
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2)
                   for y in F.linear(self.ln_1(x), weight, bias).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.fcproj(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, layers, heads, channels, rows, context, parts=1):
        """parts: 1, or 3 for q, k and v in weights of their own."""
        super().__init__()
        self.wte, self.wpe = nn.Embedding(rows, channels), nn.Embedding(context, channels)
        self.blocks = nn.ModuleList(Block(heads, channels, parts) for _ in range(layers))
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


def decay_groups(parameters, decay):
    """AdamW's groups: weight decay for matrices, none for biases and LayerNorms."""
    parameters = list(parameters)
    return [{"params": [p for p in parameters if p.dim() == 2], "weight_decay": decay},
            {"params": [p for p in parameters if p.dim() != 2], "weight_decay": 0.0}]


def optimizers_of(args, model):
    """AdamW, or Muon and AdamW. A group's `peak` is its highest learning rate."""
    settings = {**ADAMW, "lr": args.lr, "fused": next(model.parameters()).is_cuda}
    if args.optimizer == "adamw":
        made = [torch.optim.AdamW(decay_groups(model.parameters(), args.weight_decay), **settings)]
    else:
        matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
        known = set(map(id, matrices))
        rest = [p for p in model.parameters() if id(p) not in known]
        settings["lr"] = 0.6 * args.lr if args.adam_lr is None else args.adam_lr
        scale = 0.2 * math.sqrt(model.wte.weight.shape[1])
        made = [torch.optim.AdamW(decay_groups(rest, args.weight_decay), **settings),
                torch.optim.Muon(matrices, lr=args.lr * scale, momentum=args.momentum,
                                 weight_decay=args.weight_decay / scale)]
    for optimizer in made:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return made


def in_turns(args, model, world):
    """A step in PyTorch alone; DistributedDataParallel reduces gradients in the last micro-step."""
    device = next(model.parameters()).device.type
    run = model if args.eager else torch.compile(model)
    if world > 1:
        from torch.distributed.optim import ZeroRedundancyOptimizer
        run = nn.parallel.DistributedDataParallel(run, gradient_as_bucket_view=True)
        optimizers = [ZeroRedundancyOptimizer(decay_groups(model.parameters(), 0.1),
                                              optimizer_class=torch.optim.AdamW,
                                              parameters_as_bucket_view=True, fused=True, **ADAMW)]
    else:
        optimizers = optimizers_of(args, model)
    scaler = torch.amp.GradScaler(device, enabled=args.dtype == "fp16")
    half = HALF.get(args.dtype)
    autocast = (lambda: torch.autocast(device, half)) if half else contextlib.nullcontext

    def step(tokens, rate=1.0):
        """rate: the schedule's part of each group's peak. Returns the mean loss."""
        mean = 0
        for micro in range(args.accum):
            alone = world > 1 and micro < args.accum - 1
            with run.no_sync() if alone else contextlib.nullcontext():
                with autocast():
                    loss = run(tokens[micro, :, :-1].contiguous(), tokens[micro, :, 1:].contiguous())
                scaler.scale(loss / args.accum).backward()
            mean = mean + loss.detach() / args.accum
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group.get("peak", group["lr"])
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        return mean
    return step


def by_deepspeed(args, model, world):
    """A step in DeepSpeed: half-precision weights, its own loss scaler, its overlap switched on."""
    import deepspeed
    optimizer = torch.optim.AdamW(decay_groups(model.parameters(), 0.1), fused=True, **ADAMW)
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


def first_model(directory, parts):
    """The model of config.json and model.safetensors, as ./train --save-weights writes them."""
    import numpy
    config = json.load(open(os.path.join(directory, "config.json")))
    file = os.path.join(directory, "model.safetensors")
    length = int(numpy.fromfile(file, numpy.uint64, 1)[0])
    header = json.loads(numpy.fromfile(file, numpy.uint8, length, offset=8).tobytes())
    model = GPT2(config["n_layer"], config["n_head"], config["n_embd"], config["vocab_size"],
                 config["n_positions"], parts)

    def read(name):
        entry = header.get(name) or header["transformer." + name]
        if entry["dtype"] != "F32":
            raise SystemExit("%s: %s is %s, not F32" % (file, name, entry["dtype"]))
        begin, end = entry["data_offsets"]
        values = numpy.fromfile(file, numpy.float32, (end - begin) // 4, offset=8 + length + begin)
        return torch.from_numpy(values.reshape(entry["shape"]))

    named = [("wte", model.wte), ("wpe", model.wpe), ("ln_f", model.ln_f)]
    for i, block in enumerate(model.blocks):
        for name, module in (("ln_1", block.ln_1), ("attn.c_proj", block.proj), ("ln_2", block.ln_2),
                             ("mlp.c_fc", block.fc), ("mlp.c_proj", block.fcproj)):
            named.append(("h.%d.%s" % (i, name), module))
        weight, bias = (read("h.%d.attn.c_attn.%s" % (i, name)) for name in ("weight", "bias"))
        for part, w, b in zip(block.qkv, weight.t().chunk(parts), bias.chunk(parts)):
            part.weight.data.copy_(w)
            part.bias.data.copy_(b)
    for name, module in named:
        for key, p in module.named_parameters():
            values = read(name + "." + key)      # Linear weights are transposed: [outputs, inputs]
            p.data.copy_(values.t() if isinstance(module, nn.Linear) and key == "weight" else values)
    return model


def philox(seed, stream, counter):
    """g2z_philox's first word; counter is four arrays or numbers."""
    import numpy
    word = numpy.uint64(0xffffffff)
    c = [numpy.asarray(x, numpy.uint64) for x in counter]
    k0, k1 = seed & 0xffffffff, (seed >> 32) ^ (stream * 0x85ebca6b & 0xffffffff)
    for _ in range(10):
        p0, p1 = c[0] * numpy.uint64(0xd2511f53), c[2] * numpy.uint64(0xcd9e8d57)
        high = numpy.uint64(32)
        c = [(p1 >> high) ^ c[1] ^ numpy.uint64(k0), p1 & word,
             (p0 >> high) ^ c[3] ^ numpy.uint64(k1), p0 & word]
        k0, k1 = (k0 + 0x9e3779b9) & 0xffffffff, (k1 + 0xbb67ae85) & 0xffffffff
    return c[0]


def shuffled(seed, count, positions):
    """g2z__shuffle in epoch 0: which of `count` sequences stand at the positions."""
    import numpy
    shuffle = 3                                  # G2Z_RANDOM_SHUFFLE
    side = math.isqrt(count - 1) + 1
    at = numpy.array(positions, numpy.uint64)
    outside = numpy.ones(len(at), bool)
    while outside.any():
        left, right = at[outside] // numpy.uint64(side), at[outside] % numpy.uint64(side)
        for turn in range(8):
            random = philox(seed, shuffle, (right, turn, 0, 0))
            moved = left + (random * numpy.uint64(side) >> numpy.uint64(32))
            left, right = right, moved % numpy.uint64(side)
        at[outside] = left * numpy.uint64(side) + right
        outside = at >= count
    return at.astype(numpy.int64)


def repeat_training(args, step, device):
    """The sequences of ./train with the same seed on one rank, within the first epoch."""
    import numpy
    parts = []
    for path in sorted(glob.glob(args.train)):   # a header of 256 int32, then uint16
        tokens = numpy.fromfile(path, dtype=numpy.uint16, offset=1024)
        view = numpy.lib.stride_tricks.sliding_window_view(tokens, args.seq + 1)
        parts.append(view[:(len(tokens) - 1) // args.seq * args.seq:args.seq])
    rows = numpy.concatenate(parts)
    size = args.accum * args.batch
    if args.steps * size > len(rows):
        raise SystemExit("--train has %d sequences: %d steps" % (len(rows), len(rows) // size))
    order = shuffled(args.seed, len(rows), range(args.steps * size))
    losses = []
    for i in range(args.steps):
        rate = (i + 1) / max(1, args.lr_warmup)
        if i >= args.lr_warmup:                  # --schedule linear --min-lr 0
            rate = 1 - (i - args.lr_warmup) / (args.steps - args.lr_warmup)
        tokens = torch.from_numpy(rows[order[i * size:(i + 1) * size]].astype("int64")).to(device)
        losses.append(float(step(tokens.view(args.accum, args.batch, args.seq + 1), rate)))
        print(json.dumps({"step": i + 1, "loss": round(losses[-1], 6)}), flush=True)
    if not args.compare:
        return
    lines = [json.loads(line) for line in open(args.compare)]
    kit = [line["loss"] for line in lines if line.get("loss") is not None]
    apart = [abs(a - b) for a, b in zip(losses, kit)]
    print(json.dumps({"compared_steps": len(apart),
                      "apart_first_10_max": max(apart[:10]), "apart_max": max(apart),
                      "apart_mean": statistics.mean(apart),
                      "last_50_mean": statistics.mean(losses[-50:]),
                      "last_50_mean_kit": statistics.mean(kit[-50:])}))


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
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw")
    parser.add_argument("--lr", type=float, default=ADAMW["lr"])
    parser.add_argument("--adam-lr", type=float, help="with muon: rate of AdamW's weights [0.6 x --lr]")
    parser.add_argument("--momentum", type=float, default=0.9, help="Muon's")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--train", metavar="GLOB", help="shards: repeat a training of --steps steps")
    parser.add_argument("--init-from", metavar="DIR", help="first weights of that training")
    parser.add_argument("--lr-warmup", type=int, default=20, help="its warm-up; then linear to zero")
    parser.add_argument("--seed", type=int, default=1337, help="its order of the sequences")
    parser.add_argument("--compare", metavar="FILE", help="metrics.jsonl of ./train")
    args = parser.parse_args()
    if bool(args.train) != bool(args.init_from):
        parser.error("--train and --init-from go together")
    if args.optimizer == "muon" and args.deepspeed is not None:
        parser.error("--optimizer muon: not with --deepspeed")
    if args.wte_rows < VOCAB:
        parser.error("--wte-rows %d: GPT-2 has %d tokens" % (args.wte_rows, VOCAB))

    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1 and (args.train or args.optimizer == "muon"):
        parser.error("--train and --optimizer muon run on one rank")
    device = "cuda" if torch.cuda.is_available() or not args.train else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if world > 1:
        torch.distributed.init_process_group("nccl")
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("highest" if args.dtype == "fp32" else "high")
    parts = 3 if args.optimizer == "muon" else 1
    if args.train:
        model = first_model(args.init_from, parts).to(device)
    else:
        model = GPT2(*MODELS[args.model], args.wte_rows, args.seq, parts).cuda()
    if args.float8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(args.float8))
    make = in_turns if args.deepspeed is None else by_deepspeed
    step = make(args, model, world)
    if args.train:
        repeat_training(args, step, device)
        return

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
    if args.optimizer == "muon":
        how += ", Muon"
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
