"""Trains the demo checkpoint: the video autoencoder of this project with small channels.

    python train.py --seconds 540 --out demo.safetensors                 # procedural video alone
    python train.py --seconds 540 --out demo.safetensors --footage footage.npz --test heldout.npz

Needs torch, numpy and safetensors, and a CUDA card for a useful result (without one it runs, slowly: a check of
the code). `--seconds` is the whole run: rendering the material, choosing the quickest kernels, training, and the
evaluation at the end. The learning rate follows the clock, so any length gives a finished checkpoint, and every half
minute the weights so far are saved. TRAINING.md says how the shipped file was made and what it reaches;
footage.py makes the .npz files; model.py is the network, procedural.py the video, kernels.py the GPU kernels.

Written beside OUT: OUT.json (settings, losses, PSNR, latent statistics) and OUT-*.png (input, output, difference).
"""
import argparse
import json
import math
import os
import struct
import time
import zlib

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

import model as net
from procedural import bytes_of, held_out, render, texture_bank

STARTED = time.time()


def log(s):
    print(f"[{time.time() - STARTED:6.1f}] {s}", flush=True)


def scaled(u8, dtype=torch.float32):
    return (u8.float() / 127.5 - 1).to(dtype)


# --------------------------------------------------------------------------------------------------- the material

class Material:
    """A pool of clips [N, 17, side, side, 3] on the device. Batches are random cuts of it, mirrored, turned, recoloured,
    played backwards."""

    def __init__(self, count, side, seed, device, footage, seconds):
        self.rng, self.device, stills, films = np.random.default_rng(seed), device, [], []
        if footage:
            with np.load(footage) as z:
                stills = [z[k] for k in z.files if k.startswith("image")]
                films = [z[k] for k in z.files if k.startswith("clip")]
            stills += [f[i] for f in films for i in (0, -1)]
        bank = texture_bank(self.rng, min(480, max(20, count)), device, stills)
        self.pool, chunk = torch.empty(count, 17, side, side, 3, dtype=torch.uint8, device=device), 16
        deadline = time.time() + seconds
        real = [self.cut(films[i % len(films)], side) for i in range(count // 8)] if films else []
        if real: self.pool[:len(real)] = torch.stack(real).to(device)
        for i in range(len(real), count, chunk):
            made = bytes_of(render(self.rng, min(chunk, count - i), bank, size=side, bare=0.3, fast=0.3))
            self.pool[i:i + chunk] = made
            if device.type == "cuda": torch.cuda.synchronize()
            if time.time() > deadline:  # a slow card trains on a smaller pool
                self.pool = self.pool[:i + len(made)]
                break
        log(f"rendered {len(self.pool) - len(real)} clips, cut {len(real)} from {len(films)} films, {len(stills)} stills")

    def cut(self, film, side):
        """A random part of a film [T, H, W, 3], in time and space, at a random size."""
        t, h, w, _ = film.shape
        t0, s = self.rng.integers(t - 16), int(min(h, w) * self.rng.uniform(0.6, 1))
        y, x = self.rng.integers(h - s + 1), self.rng.integers(w - s + 1)
        v = torch.from_numpy(film[t0:t0 + 17, y:y + s, x:x + s]).permute(0, 3, 1, 2).float()
        v = F.interpolate(v, (side, side), mode="bilinear", antialias=True, align_corners=False)
        return v.round().byte().permute(0, 2, 3, 1)

    def batch(self, b, t, size):
        """[b, t, size, size, 3], u8, in one gather."""
        rng, (n, frames, side) = self.rng, self.pool.shape[:3]
        put = lambda v, *shape: torch.from_numpy(np.array(v)).view(b, *shape).to(self.device, non_blocking=True)

        def span(k, whole, back):
            """k places in a row, some of them counted down."""
            i = np.arange(k)
            return rng.integers(whole - k + 1, size=(b, 1)) + np.where(rng.random((b, 1)) < back, i[::-1], i)

        clip, frame = put(rng.integers(n, size=b), 1, 1, 1, 1), put(span(t, frames, 0.5), t, 1, 1, 1)
        y, x, turn = span(size, side, 0.2), span(size, side, 0.5), put(rng.random(b) < 0.2, 1, 1, 1, 1)
        down, across = lambda v: put(v, 1, size, 1, 1), lambda v: put(v, 1, 1, size, 1)
        y, x = torch.where(turn, across(y), down(y)), torch.where(turn, down(x), across(x))
        colour = np.where(rng.random((b, 1)) < 0.3, rng.permuted(np.tile(np.arange(3), (b, 1)), axis=1), np.arange(3))
        return self.pool[clip, frame, y, x, put(colour, 1, 1, 1, 3)]


# ------------------------------------------------------------------------------------------------ quickest kernels

def timed(fn, repeat=5):
    """Milliseconds of one call, without the time Python takes: recorded as a graph and replayed."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2): fn()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): fn()
    graph.replay()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeat): graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / repeat * 1e3


def choose_norm():
    """Takes the norm of kernels.py if it works and is right."""
    try:
        import kernels
        x, g = torch.randn(2, 2, 3, 24, 40, 48, device="cuda").bfloat16()
        norm = net.FrameNorm(48, 4).cuda()
        x.requires_grad_()
        grads = []
        for net.FUSED_NORM in (None, kernels.FrameNorm.apply):
            y = norm(x)
            grads.append([y, *torch.autograd.grad(y, [x, norm.weight, norm.bias], g)])
        off = max(((p - q).float().norm() / q.float().norm()).item() for p, q in zip(*grads))
        log(f"fused norm: off by {off:.1e}")
        if not off < 0.02: net.FUSED_NORM = None
    except Exception as e:
        net.FUSED_NORM = None
        log(f"no fused norm: {type(e).__name__} {str(e)[:300]}")


def choose_convs(model, x, triton):
    """For every convolution the quickest way, at the sizes that the batch x gives."""
    seen = {}
    def note(m, inputs):
        if m.kernel != (1, 1, 1):
            seen.setdefault((tuple(m.weight.shape), m.stride, tuple(inputs[0].shape)), []).append(m)
    hooks = [m.register_forward_pre_hook(note) for m in model.modules() if isinstance(m, net.CausalConv)]
    with torch.no_grad(): model.decoder(model.encoder(x)[0].to(x.dtype))
    for h in hooks: h.remove()
    rows = []
    for (shape, stride, size), all_ in seen.items():
        m = net.CausalConv(shape[1], shape[0], shape[2:], stride, all_[0].corner).cuda()  # random weights: some start at 0
        v = torch.randn(size, device="cuda").to(x.dtype).requires_grad_()
        ways, took, right = ["as_3d", "as_2d"], {}, None
        if triton and stride == (1, 1, 1) and max(shape[:2]) <= 64: ways.append("as_triton")
        for way in ways:
            m.how = getattr(m, way)

            def step():
                y = m(v)
                return y, *torch.autograd.grad(y, [v, m.weight, m.bias], y.detach())

            try:
                got = [r.detach() for r in step()]
                right = right or got
                off = max(((p - q).float().norm() / q.float().norm()).item() for p, q in zip(got, right))
                if off < 0.02: took[way] = timed(step)
                else: log(f"{way} is wrong for {shape}: {off:.1e}")
            except Exception as e:
                log(f"no {way} for {shape}: {type(e).__name__} {str(e)[:300]}")
        if not took: continue
        best = min(took, key=took.get)
        for c in all_: c.how = getattr(c, best)
        rows.append([len(all_) * took[w] if w in took else math.nan for w in ("as_3d", "as_2d", "as_triton")] + [len(all_) * took[best]])
        log(f"  {len(all_)} x {shape} on {size}: " + ", ".join(f"{w} {t:.2f}" for w, t in took.items()) + " ms")
    all_3d, best = sum(r[0] for r in rows), sum(r[3] for r in rows)
    log(f"convolutions of a step: {all_3d:.1f} ms all 3D, {best:.1f} ms the quickest each")


# --------------------------------------------------------------------------------------------------- training

def loss_of(model, x, dtype, kl_weight):
    """x: u8 [B, T, H, W, 3]. The loss, and [loss, rms error, KL, deviation of the latent] to watch."""
    x = scaled(x)
    mean, logvar = model.encoder(x.to(dtype))
    z = mean + torch.exp(0.5 * logvar) * torch.randn_like(mean)
    e = model.decoder(z.to(dtype)).float() - x
    rms = (e.square().mean((1, 2, 3, 4)) + 1e-6).sqrt().mean()  # what PSNR measures, each clip on its own scale
    kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
    loss = rms + 0.25 * e.abs().mean() + kl_weight * kl
    return loss, torch.stack([loss, rms, kl, mean.std()]).detach()


class Steps:
    """Training steps for a few batch shapes; on a GPU each shape's step is captured once as a graph and replayed."""

    def __init__(self, a, model, device):
        self.a, self.model, self.gpu = a, model, device.type == "cuda"
        self.lr = torch.tensor(1e-6, device=device)
        self.opt = torch.optim.AdamW(model.parameters(), lr=self.lr, betas=(0.9, 0.99), weight_decay=1e-4,
                                     fused=self.gpu or None, capturable=self.gpu)
        self.ema = {k: v.detach().clone() for k, v in model.named_parameters()}
        self.graphs, self.count = {}, torch.zeros((), device=device)

    def eager(self, x):
        self.opt.zero_grad(set_to_none=True)
        loss, parts = loss_of(self.model, x, torch.bfloat16, self.a.kl)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for v in self.model.parameters(): v.grad.nan_to_num_(0, 0, 0)  # one bad batch must not end the run
        self.opt.step()
        with torch.no_grad():
            self.count += 1
            part = (1 - self.count / (self.count + 10)).clamp(min=1 - self.a.ema)  # short memory at first
            step = torch._foreach_sub(list(self.model.parameters()), list(self.ema.values()))
            torch._foreach_mul_(step, part)
            torch._foreach_add_(list(self.ema.values()), step)
        return parts

    def capture(self, x):
        """Two steps to settle kernels and optimizer state, then one recorded. The rate is still almost nothing."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2): self.eager(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        self.opt.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            parts = self.eager(x)
        self.graphs[x.shape] = graph, x, parts

    def __call__(self, x):
        if x.shape not in self.graphs: return self.eager(x)
        graph, buffer, parts = self.graphs[x.shape]
        buffer.copy_(x)
        graph.replay()
        return parts


def batch_shapes(pixels, gpu):
    """[(clips, frames, side, share of the steps early, late)]. Norms and attention cover a whole frame, so the sides
    vary; small cuts hold more different things a pixel. A still picture needs no turn of its own, since the first
    frame of every clip is coded as one."""
    kinds = [(9, 64, 0.55, 0.2), (17, 128, 0.45, 0.5), (9, 256, 0.0, 0.3)] if gpu else [(5, 32, 0.7, 0.5), (9, 64, 0.3, 0.5)]
    return [(max(1, round(pixels / (t * s * s))), t, s, early, late) for t, s, early, late in kinds]


def fit(a, model, material, seconds, watch=None):
    """Trains for so long; every half minute calls `watch` with the averaged weights. -> those weights, steps, curve."""
    device = material.device
    steps, shapes = Steps(a, model, device), batch_shapes(a.pixels, device.type == "cuda")
    if steps.gpu:
        torch.backends.cudnn.benchmark = True
        try:
            for s in shapes: steps.capture(material.batch(*s[:3]))
        except RuntimeError as e:
            log(f"no graphs on this machine, plain steps instead: {e}")
            steps.graphs.clear()
        torch.backends.cudnn.benchmark = False  # evaluation has other sizes, each too rare to be worth a search
    rng, step, begin, curve = np.random.default_rng(a.seed + 1), 0, time.time(), []
    said, late, seen = begin, 0.6, []
    while (done := (time.time() - begin) / seconds) < 1 and step < a.steps:
        steps.lr.fill_(a.lr * min(1, (step + 1) / 200) * (0.5 + 0.5 * math.cos(math.pi * done)) + 1e-7)
        b, t, size, *_ = shapes[rng.choice(len(shapes), p=[s[4 if done > late else 3] for s in shapes])]
        seen.append(steps(material.batch(b, t, size)).clone())
        step += 1
        if step % 8 == 0 and steps.gpu: torch.cuda.synchronize()  # or the clock would run ahead of the card
        if time.time() - said > a.every or step == 20:
            said = time.time()
            parts = torch.stack(seen)
            parts = parts[parts.isfinite().all(1)].mean(0).tolist()
            if not parts or not math.isfinite(parts[0]): raise SystemExit("the loss is not finite: try a lower --lr")
            spent = said - begin
            curve.append([step, round(spent, 1), *(round(v, 5) for v in parts)])
            log("step {}, {} s: loss {:.4f}, rms error {:.4f} ({:.2f} dB), KL {:.2f}, latent std {:.2f}, {:.1f} ms a step".format(
                step, round(spent), parts[0], parts[1], 20 * math.log10(2 / parts[1]), parts[2], parts[3], spent / step * 1e3))
            seen.clear()
            if watch and step > 20: watch(steps.ema, curve)
    if steps.gpu: torch.cuda.synchronize()
    return steps.ema, step, curve


@torch.no_grad()
def unit_latent(weights, judge, sample):
    """Rescales each latent channel to unit deviation, in the encoder's last and the decoder's first convolution.

    The reconstruction stays what it is: the two factors cancel."""
    judge.load_state_dict(weights)
    s = torch.cat([judge.encoder(scaled(c)[None])[0].flatten(0, 3) for c in sample]).std(0)
    w, n = {k: v.detach().clone() for k, v in weights.items()}, judge.latent
    w["encoder.conv_out.weight"][:n] /= s.view(-1, 1, 1, 1, 1)
    w["encoder.conv_out.bias"][:n] /= s
    w["encoder.conv_out.bias"][n:] -= 2 * s.log()
    w["decoder.conv_in.weight"] *= s.view(1, -1, 1, 1, 1)
    return w


def export(weights, groups, path):
    """f16, under the checkpoint's names, with the number of groups that the shapes do not tell."""
    half = {k: v.detach().to("cpu", torch.float16).contiguous() for k, v in weights.items()}
    save_file(half, path + ".part", metadata={"norm_num_groups": str(groups), "format": "pt"})
    os.replace(path + ".part", path)
    return half


# ------------------------------------------------------------------------------------------------- evaluation

def write_png(path, rgb):
    h, w, _ = rgb.shape
    raw = b"".join(b"\0" + rgb[y].tobytes() for y in range(h))
    part = lambda k, d: struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d))
    with open(path, "wb") as f:
        f.write(b"\x89PNG\r\n\x1a\n" + part(b"IHDR", struct.pack(">IIBBBBB", w, h, 8, 2, 0, 0, 0))
                + part(b"IDAT", zlib.compress(raw, 6)) + part(b"IEND", b""))


@torch.no_grad()
def evaluate(judge, clips, png=None):
    """PSNR of each clip [T, H, W, 3] (u8) through the mean of the latent, and the latent's statistics. The picture has
    input, output and four times the difference of the first, middle and last frame of up to four clips."""
    rows, stats, pics = [], [], []
    for clip in clips:
        x = scaled(clip)[None]
        mean, logvar = judge.encoder(x)
        y = judge.decoder(mean).clamp(-1, 1)
        rows.append(round(-10 * math.log10(max(((y - x) / 2).square().mean().item(), 1e-10)), 2))
        stats.append([mean.mean().item(), mean.std().item(), (0.5 * logvar).exp().mean().item()])
        if png and len(pics) < 4:
            pick = [0, x.shape[1] // 2, x.shape[1] - 1]
            tri = torch.stack([x, y, (y - x) * 4])[:, 0, pick]  # [3 pictures, frames, H, W, 3]
            pics.append(((tri * 0.5 + 0.5).clamp(0, 1) * 255).round().byte().permute(1, 2, 0, 3, 4).flatten(0, 1).flatten(1, 2))
    if png: write_png(png, torch.cat(pics, dim=1).cpu().numpy())
    mean = lambda i: round(float(np.mean([s[i] for s in stats])), 4)
    return {"psnr": rows, "mean_psnr": round(float(np.mean(rows)), 2), "latent_mean": mean(0), "latent_std": mean(1),
            "posterior_std": mean(2)}


def probe(a, model, material, tests, judge):
    """A table of rates and sizes: what a step takes, and the PSNR after the same short time from the same start."""
    start = {k: v.clone() for k, v in model.state_dict().items()}
    rows = []
    for setting in a.probe.split():
        lr, pixels = (float(v) for v in setting.split(","))
        b = argparse.Namespace(**{**vars(a), "lr": lr, "pixels": pixels, "every": 1e9})
        model.load_state_dict(start)
        ema, steps, _ = fit(b, model, material, a.probe_seconds)
        judge.load_state_dict(ema)
        rows.append((lr, pixels, a.probe_seconds / steps * 1e3, *(evaluate(judge, c)["mean_psnr"] for c in tests.values())))
        log("lr {:g}, {:.2g} pixels: {:.1f} ms a step, PSNR {}".format(*rows[-1][:3], rows[-1][3:]))
    print(f"\n| lr | pixels | ms a step | Mpixel/s | PSNR after {a.probe_seconds:g} s: {' | '.join(tests)} |")
    for lr, pixels, ms, *db in rows:
        print(f"| {lr:g} | {pixels:.2g} | {ms:.1f} | {pixels / ms / 1e3:.1f} | " + " | ".join(f"{v:.2f}" for v in db) + " |")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", default="demo.safetensors")
    p.add_argument("--seconds", type=float, default=540, help="length of the whole run")
    p.add_argument("--reserve", type=float, default=20, help="of these, kept for the evaluation")
    p.add_argument("--steps", type=int, default=10 ** 9, help="stop after so many steps")
    p.add_argument("--start", help="checkpoint of the same shape to go on from, instead of the linear code")
    p.add_argument("--footage", help="npz with arrays image* [H, W, 3] and clip* [T, H, W, 3], u8, to train on too")
    p.add_argument("--test", nargs="*", default=[], help="npz with arrays [T, H, W, 3], u8, that are only evaluated")
    p.add_argument("--channels", default="16,32,64,80")
    p.add_argument("--layers", type=int, default=1)
    p.add_argument("--groups", type=int, default=4)
    p.add_argument("--pool", type=int, default=3000, help="clips of material")
    p.add_argument("--side", type=int, default=256, help="their width and height")
    p.add_argument("--pixels", type=float, default=9e5, help="pixels a step, about")
    p.add_argument("--lr", type=float, default=3e-4)
    p.add_argument("--ema", type=float, default=0.998, help="decay of the averaged weights, which are what is saved")
    p.add_argument("--kl", type=float, default=5e-5, help="weight of the KL term, per latent number")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--every", type=float, default=30, help="seconds between lines of the log")
    p.add_argument("--plain", action="store_true", help="do without kernels.py")
    p.add_argument("--pictures", type=int, default=4, help="of the first so many tests")
    p.add_argument("--probe", help="'lr,pixels lr,pixels ...': compare these settings shortly instead of training")
    p.add_argument("--probe-seconds", type=float, default=6)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    a = p.parse_args()

    device = torch.device(a.device)
    gpu = device.type == "cuda"
    torch.manual_seed(a.seed)
    channels = tuple(int(c) for c in a.channels.split(","))
    model, judge = (net.VideoVae(channels, a.layers, a.groups).to(device) for _ in range(2))  # judge: the average, in f32
    count = sum(v.numel() for v in model.parameters())
    card = torch.cuda.get_device_name() if gpu else "CPU"
    log(f"{card}, torch {torch.__version__}, channels {channels}, {count:,} parameters, {2 * count / 1e6:.2f} MB in f16")
    material = Material(a.pool, a.side, a.seed, device, a.footage, a.seconds * 0.08)
    tests = {"procedural": list(held_out(8 if gpu else 1, device))}
    for path in a.test:
        with np.load(path) as z: tests.update({k: [torch.from_numpy(z[k]).to(device)] for k in z.files})
    if not gpu: tests = {k: [c[:9, :64, :64] for c in v] for k, v in tests.items()}  # a check of the code, no more
    if a.start:
        model.load_state_dict({k: v.float() for k, v in load_file(a.start).items()})
    else:
        side = min(128, a.side)
        net.linear_start(model, scaled(torch.cat([material.batch(4, 17, side) for _ in range(24 if gpu else 2)])))
    sample = [material.batch(1, 17, a.side)[0] for _ in range(24 if gpu else 2)]  # for the latent's deviation
    judge.load_state_dict(model.state_dict())
    log("the start: " + ", ".join(f"{k} {evaluate(judge, v)['mean_psnr']}" for k, v in tests.items()))
    if gpu:
        if not a.plain: choose_norm()
        torch.backends.cudnn.benchmark = True
        choose_convs(model, scaled(material.batch(*batch_shapes(a.pixels, gpu)[1][:3]), torch.bfloat16), not a.plain)
    else:
        for m in model.modules():
            if isinstance(m, net.CausalConv): m.how = m.as_2d  # by far the quicker way on a CPU with bf16
    if a.probe: return probe(a, model, material, tests, judge)

    history = []

    def watch(ema, curve):
        """Saves the averaged weights and measures them, on a part of the tests so that it takes little time."""
        w = unit_latent(ema, judge, sample)
        export(w, a.groups, a.out)
        judge.load_state_dict(w)
        db = {k: evaluate(judge, [c[:9] for c in v[:4]])["mean_psnr"] for k, v in tests.items()}
        history.append([curve[-1][1], db])
        log("  held out, first 9 frames: " + ", ".join(f"{k} {v}" for k, v in db.items()))

    span = max(1.0, STARTED + a.seconds - a.reserve - time.time())
    log(f"training for {span:.0f} s, batches {[s[:3] for s in batch_shapes(a.pixels, gpu)]}")
    began = time.time()
    ema, steps, curve = fit(a, model, material, span, watch)
    trained = time.time() - began
    log(f"{steps} steps in {trained:.0f} s")

    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    half = export(unit_latent(ema, judge, sample), a.groups, a.out)
    judge.load_state_dict({k: v.float() for k, v in half.items()})
    stem, result = a.out.removesuffix(".safetensors"), {}
    for k, clips in tests.items():
        result[k] = evaluate(judge, clips, f"{stem}-{k}.png" if len(result) < a.pictures else None)
        log(f"{k} {tuple(clips[0].shape)}: {result[k]}")
    with open(stem + ".json", "w") as f:
        json.dump({"card": card, "torch": torch.__version__, "args": vars(a), "parameters": count, "steps": steps,
                   "train_seconds": round(trained, 1), "total_seconds": round(time.time() - STARTED, 1),
                   "results": result, "held_out": history, "curve": curve}, f, indent=1)
    log(f"wrote {a.out}, {os.path.getsize(a.out):,} bytes")


if __name__ == "__main__":
    main()
