"""The network, as training wants it, and a start that is already a good linear code.

Module names spell the tensor names of the checkpoint. Activations are [B, T, H, W, C], contiguous; weights have the
checkpoint's shapes.
"""
import math

import torch
import torch.nn.functional as F
from torch import nn

EPS = 1e-6  # of every GroupNorm
FUSED_NORM = None  # a quicker norm, where `train.py` found one


def stack_taps(x, taps, stride):
    """The last `taps` frames of each frame, as channels: [B, T, H, W, C] -> [B, ceil(T / stride), H, W, taps * C]."""
    x = torch.cat([x[:, :1]] * (taps - 1) + [x], dim=1)
    n = (x.shape[1] - taps) // stride + 1
    return torch.cat([x[:, k:k + stride * (n - 1) + 1:stride] for k in range(taps)], dim=4)


class CausalConv(nn.Module):
    """Convolution whose temporal window ends at the current frame; the first frame stands in for what was before."""

    def __init__(self, cin, cout, kernel, stride=(1, 1, 1), corner=False, gain=1.0):
        super().__init__()
        fan_in = cin * math.prod(kernel)
        self.weight = nn.Parameter(torch.randn(cout, cin, *kernel) * gain / math.sqrt(fan_in))
        self.bias = nn.Parameter(torch.zeros(cout))
        self.kernel, self.stride, self.corner = kernel, stride, corner  # corner: pad below and right only
        self.how = self.as_3d  # the quickest of the ways below on this machine; `train.py` sets it

    def as_3d(self, x):
        kt, kh, _ = self.kernel
        x = torch.cat([x[:, :1]] * (kt - 1) + [x], dim=1).permute(0, 4, 1, 2, 3)
        pad = 0 if self.corner else kh // 2
        w = self.weight.to(x.dtype).contiguous(memory_format=torch.channels_last_3d)
        return F.conv3d(x, w, self.bias.to(x.dtype), self.stride, (0, pad, pad)).permute(0, 2, 3, 4, 1)

    def as_2d(self, x):
        kt, kh, _ = self.kernel
        x = stack_taps(x, kt, self.stride[0]) if kt > 1 else x
        pad, y = 0 if self.corner else kh // 2, x.flatten(0, 1).permute(0, 3, 1, 2)
        w = self.weight.to(x.dtype).transpose(1, 2).flatten(1, 2).contiguous(memory_format=torch.channels_last)
        y = F.conv2d(y, w, self.bias.to(x.dtype), self.stride[1:], pad).permute(0, 2, 3, 1)
        return y.reshape(*x.shape[:2], *y.shape[1:])

    def as_triton(self, x):
        from kernels import CausalConv as Fast
        return Fast.apply(x, self.weight, self.bias)

    def forward(self, x):
        if self.kernel == (1, 1, 1):
            return F.linear(x, self.weight.flatten(1).to(x.dtype), self.bias.to(x.dtype))
        return self.how(F.pad(x, (0, 0, 0, 1, 0, 1)) if self.corner else x)


class FrameNorm(nn.Module):
    """GroupNorm with the statistics of one frame, then SiLU."""

    def __init__(self, channels, groups, silu=True):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.groups, self.silu = groups, silu

    def forward(self, x):
        if FUSED_NORM and x.dtype == torch.bfloat16:
            return FUSED_NORM(x, self.weight, self.bias, self.groups, self.silu)
        y = F.group_norm(x.flatten(0, 1).permute(0, 3, 1, 2), self.groups, self.weight.to(x.dtype), self.bias.to(x.dtype), EPS)
        return (F.silu(y) if self.silu else y).permute(0, 2, 3, 1).reshape(x.shape)


class ResnetBlock(nn.Module):
    def __init__(self, cin, cout, groups):
        super().__init__()
        self.norm1, self.conv1 = FrameNorm(cin, groups), CausalConv(cin, cout, (3, 3, 3))
        self.norm2, self.conv2 = FrameNorm(cout, groups), CausalConv(cout, cout, (3, 3, 3), gain=0.0)
        self.conv_shortcut = CausalConv(cin, cout, (1, 1, 1)) if cin != cout else None

    def forward(self, x):
        h = self.conv2(self.norm2(self.conv1(self.norm1(x))))
        return (x if self.conv_shortcut is None else self.conv_shortcut(x)) + h


class Attention(nn.Module):
    """Single head over the pixels of each frame, added to its input."""

    def __init__(self, c, groups):
        super().__init__()
        self.group_norm = FrameNorm(c, groups, silu=False)
        self.to_q, self.to_k, self.to_v = nn.Linear(c, c), nn.Linear(c, c), nn.Linear(c, c)
        self.to_out = nn.ModuleList([nn.Linear(c, c)])
        for m in (self.to_q, self.to_k, self.to_v, self.to_out[0]): nn.init.zeros_(m.bias)
        nn.init.zeros_(self.to_out[0].weight)

    def forward(self, x):
        b, t, h, w, c = x.shape
        y = self.group_norm(x).reshape(b * t, 1, h * w, c)
        lin = lambda m, v: F.linear(v, m.weight.to(v.dtype), m.bias.to(v.dtype))
        y = F.scaled_dot_product_attention(lin(self.to_q, y), lin(self.to_k, y), lin(self.to_v, y))
        return x + lin(self.to_out[0], y).reshape(x.shape)


class MidBlock(nn.Module):
    def __init__(self, c, groups):
        super().__init__()
        self.resnets = nn.ModuleList([ResnetBlock(c, c, groups), ResnetBlock(c, c, groups)])
        self.attentions = nn.ModuleList([Attention(c, groups)])

    def forward(self, x):
        return self.resnets[1](self.attentions[0](self.resnets[0](x)))


class Downsample(nn.Module):
    def __init__(self, c, temporal):
        super().__init__()
        self.conv = CausalConv(c, c, (3 if temporal else 1, 3, 3), (2 if temporal else 1, 2, 2), corner=True)

    def forward(self, x):
        return self.conv(x)


class Upsample(nn.Module):
    """Each pixel makes its own 2x2 (and, in time, 2) patch by a 1x1 convolution; a 3x3x3 convolution joins them up."""

    def __init__(self, c, temporal):
        super().__init__()
        self.z = 2 if temporal else 1
        self.upscale_conv, self.conv = CausalConv(c, c * 4 * self.z, (1, 1, 1)), CausalConv(c, c, (3, 3, 3))

    def forward(self, x):
        b, t, h, w, c = x.shape
        y = self.upscale_conv(x).view(b, t, h, w, 2, 2, self.z, c)
        y = y.permute(0, 1, 6, 2, 4, 3, 5, 7).reshape(b, t * self.z, h * 2, w * 2, c)
        if self.z == 2:  # the first latent frame stands for one frame, so its second copy goes
            y = torch.cat([y[:, :1], y[:, 2:]], dim=1)
        return self.conv(y)


class Level(nn.Module):
    def __init__(self, cin, cout, blocks, groups, down=None, up=None):
        super().__init__()
        self.resnets = nn.ModuleList([ResnetBlock(cin if j == 0 else cout, cout, groups) for j in range(blocks)])
        if down is not None: self.downsamplers = nn.ModuleList([Downsample(cout, down)])
        if up is not None: self.upsamplers = nn.ModuleList([Upsample(cout, up)])

    def forward(self, x):
        for part in self.children():
            for m in part:
                x = m(x)
        return x


class Encoder(nn.Module):
    def __init__(self, ch, layers, groups, latent, temporal):
        super().__init__()
        last = len(ch) - 1
        self.conv_in = CausalConv(3, ch[0], (3, 3, 3))
        self.down_blocks = nn.ModuleList([
            Level(ch[max(i - 1, 0)], ch[i], layers, groups, down=i >= last - temporal if i < last else None)
            for i in range(last + 1)])
        self.mid_block = MidBlock(ch[-1], groups)
        self.conv_norm_out, self.conv_out = FrameNorm(ch[-1], groups), CausalConv(ch[-1], 2 * latent, (3, 3, 3))

    def forward(self, x):
        """-> mean and log-variance of the latent, in f32."""
        x = self.conv_in(x)
        for level in self.down_blocks: x = level(x)
        mean, logvar = self.conv_out(self.conv_norm_out(self.mid_block(x))).float().chunk(2, dim=4)
        return mean, logvar.clamp(-30, 20)


class Decoder(nn.Module):
    def __init__(self, ch, layers, groups, latent, temporal):
        super().__init__()
        last, ch = len(ch) - 1, ch[::-1]
        self.conv_in, self.mid_block = CausalConv(latent, ch[0], (3, 3, 3)), MidBlock(ch[0], groups)
        self.up_blocks = nn.ModuleList([
            Level(ch[max(i - 1, 0)], ch[i], layers + 1, groups, up=i < temporal if i < last else None)
            for i in range(last + 1)])
        self.conv_norm_out, self.conv_out = FrameNorm(ch[-1], groups), CausalConv(ch[-1], 3, (3, 3, 3))

    def forward(self, z):
        x = self.mid_block(self.conv_in(z))
        for level in self.up_blocks: x = level(x)
        return self.conv_out(self.conv_norm_out(x))


class VideoVae(nn.Module):
    def __init__(self, channels=(16, 32, 64, 80), layers=1, groups=4, latent=16, temporal=2):
        super().__init__()
        self.groups, self.latent = groups, latent
        self.encoder = Encoder(list(channels), layers, groups, latent, temporal)
        self.decoder = Decoder(list(channels), layers, groups, latent, temporal)


# ---------------------------------------------------------------------------------------------------- the start
#
# A random network of this kind passes on little but local brightness, and learns colour and motion late. So training
# starts from the best linear code instead: the path that skips the residual blocks is set to a tree of principal
# components, fitted to the material level by level, and the decoder's path to its transpose.

def blocks_of(x, z):
    """[B, T, H, W, C] -> [B, T', H', W', (z, 2, 2, C)]: the 2 x 2 (and, in time, 2) blocks that one step down joins."""
    b, t, h, w, c = x.shape
    if z == 2: x = torch.cat([x[:, :1], x], dim=1)  # frame 0 is coded alone, like a pair of equal frames
    return x.reshape(b, -1, z, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 5, 2, 4, 6, 7).flatten(4)


@torch.no_grad()
def linear_start(model, video):
    """Sets the weights; video: clips to fit to, f32. In every layer the first `n` channels carry the code, the others
    start as random features of it.

    SiLU stands at the end of both paths, and silu(u) - silu(-u) = u: there, the code goes through as pairs +u, -u.
    The norm before it would take away a frame's contrast: a pair of large constants in each group keeps the scale."""
    enc, dec, groups, latent, device = model.encoder, model.decoder, model.groups, model.latent, video.device

    def copy(conv, rows, n_in, keep=0.3):
        """Output channels < len(rows) become the given mix of input channels < n_in at the same place and time."""
        w = conv.weight
        w *= keep
        w[:len(rows)] = 0
        w[:len(rows), :n_in, -1, w.shape[3] // 2, w.shape[4] // 2] = rows

    def settle(conv, got, want):
        """Corrects a layer's gain and bias, channel by channel, to what the norm before it really divides by."""
        got, want = (v.flatten(0, 3) for v in (got, want))
        g0, w0 = got.mean(0), want.mean(0)
        gain = ((got - g0) * (want - w0)).mean(0) / (got - g0).square().mean(0)
        n = len(gain)
        conv.weight[:n] *= gain.view(-1, 1, 1, 1, 1)
        conv.bias[:n] = (conv.bias[:n] - g0) * gain + w0

    def split(short, rows, bias, constant):
        """Lets a shortcut give each row as a pair, after a pair of constants in each group; returns the pairs' places."""
        size = short.weight.shape[0] // groups
        firsts = [c for c in range(0, short.weight.shape[0], 2) if c % size > 0][:len(rows)]
        used = range(firsts[-1] + 2)
        short.weight *= 0.3
        short.weight[used] = 0
        for c, row, b in zip(firsts, rows, bias):
            short.weight[c, :len(row), 0, 0, 0], short.weight[c + 1, :len(row), 0, 0, 0] = row, -row
            short.bias[c], short.bias[c + 1] = b, -b
        for c in used[::size]: short.bias[c], short.bias[c + 1] = constant, -constant
        return firsts

    def join(conv, firsts, keep):
        """Lets a layer take the pairs together again."""
        conv.weight *= keep
        conv.weight[:len(firsts)] = 0
        for i, c in enumerate(firsts):
            conv.weight[i, c, -1, 1, 1], conv.weight[i, c + 1, -1, 1, 1] = 1, -1

    eye = lambda n: torch.eye(n, device=device)

    copy(enc.conv_in, 2 * eye(3), 3)
    h, n, tree = video, 3, []
    size = torch.full((3,), 0.5, device=device)  # what one unit of each code channel stands for: all are kept near 1
    for i, level in enumerate(enc.down_blocks):
        res = level.resnets[0]
        if i < len(enc.down_blocks) - 1:
            if res.conv_shortcut: copy(res.conv_shortcut, eye(n), n)
            conv = level.downsamplers[0].conv
            z = conv.stride[0]
            p = blocks_of(h, z)
            flat = p.flatten(0, 3)
            keep = min(conv.weight.shape[0], flat.shape[1])
            e = torch.linalg.eigh((flat.T @ flat).double().cpu())[1].flip(1)[:, :keep].T.float().to(device)
            root = math.sqrt(4 * z)
            conv.weight *= 0.3
            conv.weight[:keep] = 0
            h, below = p @ (e.T / root), size
            size = h.square().mean((0, 1, 2, 3)).sqrt() + 1e-3
            taps = (e / root / size[:, None]).view(keep, z, 2, 2, n) * below
            conv.weight[:keep, :n, -z:, :2, :2] = taps.permute(0, 4, 1, 2, 3)
            tree.append(((e * root * size[:, None]).view(keep, z, 2, 2, n) / below, z, n, keep))
            n = keep
        else:
            e = torch.linalg.eigh(torch.cov(h.flatten(0, 3).T.double().cpu()))
            e, power = e[1].flip(1)[:, :latent].T.float().to(device), e[0].flip(0)[:latent].float().to(device)
            mean = e @ h.mean((0, 1, 2, 3))
            scale = power.sqrt()
            firsts = split(res.conv_shortcut, e * size / scale[:, None], -mean / scale, 10)
    join(enc.conv_out, firsts, 0.1)
    enc.conv_out.bias[latent:] = -7  # little noise at first
    code = (h @ e.T - mean) / scale
    settle(enc.conv_out, enc(video)[0], code)

    copy(dec.conv_in, (e * scale[:, None] / size).T, latent)
    dec.conv_in.bias[:n] = e.T @ mean / size
    for i, level in enumerate(dec.up_blocks):
        short = level.resnets[0].conv_shortcut
        if i < len(dec.up_blocks) - 1:
            if short: copy(short, eye(n), n)
            e, z, below, keep = tree.pop()
            up = level.upsamplers[0]
            w = up.upscale_conv.weight.view(2, 2, z, -1, up.upscale_conv.weight.shape[1])
            w *= 0.3
            w[:, :, :, :below] = 0
            w[:, :, :, :below, :keep] = e.permute(2, 3, 1, 4, 0)
            n = below
            copy(up.conv, eye(n), n)
        else:
            join(dec.conv_out, split(short, eye(3), [0, 0, 0], 8), 0)
    settle(dec.conv_out, dec(code), video)
