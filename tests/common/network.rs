//! The reference model in f64: the whole clip at once, nothing folded, cached or fused.

use super::Random;
pub use super::oracle::Clip;
use super::safetensors::{Tensor, Tensors};

pub struct Config {
    pub channels: Vec<usize>,
    pub layers: usize,
    pub groups: usize,
    pub latent: usize,
    pub temporal_levels: usize,
}

impl Config {
    pub fn scale(&self) -> usize {
        1 << (self.channels.len() - 1)
    }

    fn halves_time(&self, level: usize) -> bool {
        level + self.temporal_levels >= self.channels.len() - 1
    }
}

/// Every tensor of a checkpoint, with random values that keep activations near 1.
pub fn random_weights(config: &Config, seed: u64) -> Tensors {
    let mut random = Random(seed);
    let mut tensors = Tensors::new();
    let mut uniform = move || random.below(1 << 24) as f64 / (1 << 23) as f64 - 1.0;
    let mut add = |name: String, shape: &[usize]| {
        let fan_in: usize = shape[1..].iter().product();
        let (base, scale) = match shape.len() {
            1 if name.contains("norm") && name.ends_with("weight") => (1.0, 0.17),
            1 => (0.0, 0.17),
            _ => (0.0, (3.0 / fan_in as f64).sqrt()),
        };
        let values = (0..shape.iter().product()).map(|_| (base + scale * uniform()) as f32).collect();
        tensors.insert(name, Tensor { shape: shape.to_vec(), values });
    };
    let mut conv = |name: &str, cout: usize, cin: usize, kernel: &[usize]| {
        add(format!("{name}.weight"), &[&[cout, cin], kernel].concat());
        add(format!("{name}.bias"), &[cout]);
    };
    // A norm has the tensors of a convolution without kernel and input.
    type Conv<'a> = dyn FnMut(&str, usize, usize, &[usize]) + 'a;
    fn resnet(conv: &mut Conv, name: &str, cin: usize, cout: usize, norms: &mut Vec<(String, usize)>) {
        norms.extend([(format!("{name}.norm1"), cin), (format!("{name}.norm2"), cout)]);
        conv(&format!("{name}.conv1"), cout, cin, &[3, 3, 3]);
        conv(&format!("{name}.conv2"), cout, cout, &[3, 3, 3]);
        if cin != cout {
            conv(&format!("{name}.conv_shortcut"), cout, cin, &[1, 1, 1]);
        }
    }
    fn middle(conv: &mut Conv, name: &str, c: usize, norms: &mut Vec<(String, usize)>) {
        resnet(conv, &format!("{name}.resnets.0"), c, c, norms);
        norms.push((format!("{name}.attentions.0.group_norm"), c));
        for part in ["to_q", "to_k", "to_v", "to_out.0"] {
            conv(&format!("{name}.attentions.0.{part}"), c, c, &[]);
        }
        resnet(conv, &format!("{name}.resnets.1"), c, c, norms);
    }
    let mut norms = Vec::new();
    let (channels, last) = (&config.channels, config.channels.len() - 1);
    let (first, deepest) = (channels[0], channels[last]);

    conv("encoder.conv_in", first, 3, &[3, 3, 3]);
    let mut c = first;
    for (level, &cout) in channels.iter().enumerate() {
        for j in 0..config.layers {
            resnet(&mut conv, &format!("encoder.down_blocks.{level}.resnets.{j}"), c, cout, &mut norms);
            c = cout;
        }
        if level < last {
            let depth = if config.halves_time(level) { 3 } else { 1 };
            conv(&format!("encoder.down_blocks.{level}.downsamplers.0.conv"), c, c, &[depth, 3, 3]);
        }
    }
    middle(&mut conv, "encoder.mid_block", c, &mut norms);
    norms.push(("encoder.conv_norm_out".into(), c));
    conv("encoder.conv_out", 2 * config.latent, c, &[3, 3, 3]);

    conv("decoder.conv_in", deepest, config.latent, &[3, 3, 3]);
    middle(&mut conv, "decoder.mid_block", deepest, &mut norms);
    c = deepest;
    for (level, &cout) in channels.iter().rev().enumerate() {
        for j in 0..=config.layers {
            resnet(&mut conv, &format!("decoder.up_blocks.{level}.resnets.{j}"), c, cout, &mut norms);
            c = cout;
        }
        if level < last {
            let name = format!("decoder.up_blocks.{level}.upsamplers.0");
            let factor = if level < config.temporal_levels { 8 } else { 4 };
            conv(&format!("{name}.upscale_conv"), c * factor, c, &[1, 1, 1]);
            conv(&format!("{name}.conv"), c, c, &[3, 3, 3]);
        }
    }
    norms.push(("decoder.conv_norm_out".into(), c));
    conv("decoder.conv_out", 3, c, &[3, 3, 3]);
    for (name, channels) in norms {
        add(format!("{name}.weight"), &[channels]);
        add(format!("{name}.bias"), &[channels]);
    }
    tensors
}

pub struct Network<'a> {
    pub config: &'a Config,
    pub tensors: &'a Tensors,
}

impl Network<'_> {
    fn values(&self, name: &str) -> &[f32] {
        &self.tensors[name].values
    }

    /// A causal convolution, padded with its first frame. `pad`: zeros before and after rows and columns.
    fn conv(&self, name: &str, x: &Clip, stride: [usize; 2], pad: [usize; 2]) -> Clip {
        let (weight, bias) = (self.values(&format!("{name}.weight")), self.values(&format!("{name}.bias")));
        let shape = &self.tensors[&format!("{name}.weight")].shape;
        let (cout, cin) = (shape[0], shape[1]);
        let [kt, kh, kw] = if shape.len() == 5 { [shape[2], shape[3], shape[4]] } else { [1, 1, 1] };
        let [_, frames, height, width] = x.dims;
        let rows = (height + pad[0] + pad[1] - kh) / stride[1] + 1;
        let columns = (width + pad[0] + pad[1] - kw) / stride[1] + 1;
        let mut out = Clip::new([cout, (frames - 1) / stride[0] + 1, rows, columns]);
        for (o, bias) in bias.iter().enumerate() {
            for t in 0..out.dims[1] {
                for y in 0..rows {
                    for column in 0..columns {
                        let mut sum = f64::from(*bias);
                        for (dt, dy, dx) in
                            (0..kt).flat_map(|a| (0..kh).flat_map(move |b| (0..kw).map(move |c| (a, b, c))))
                        {
                            let source = (t * stride[0] + dt).saturating_sub(kt - 1);
                            let (Some(row), Some(col)) = (
                                (y * stride[1] + dy).checked_sub(pad[0]),
                                (column * stride[1] + dx).checked_sub(pad[0]),
                            ) else {
                                continue;
                            };
                            if row >= height || col >= width {
                                continue;
                            }
                            for i in 0..cin {
                                let tap = ((o * cin + i) * kt + dt) * kh * kw + dy * kw + dx;
                                sum += f64::from(weight[tap]) * x.at(i, source, row, col);
                            }
                        }
                        let index = out.index(o, t, y, column);
                        out.values[index] = sum;
                    }
                }
            }
        }
        out
    }

    fn same(&self, name: &str, x: &Clip) -> Clip {
        self.conv(name, x, [1, 1], [1, 1])
    }

    fn point(&self, name: &str, x: &Clip) -> Clip {
        self.conv(name, x, [1, 1], [0, 0])
    }

    /// With statistics per frame.
    fn norm(&self, name: &str, x: &Clip) -> Clip {
        let (gamma, beta) = (self.values(&format!("{name}.weight")), self.values(&format!("{name}.bias")));
        let [channels, frames, height, width] = x.dims;
        let size = channels / self.config.groups;
        let mut out = x.clone();
        for t in 0..frames {
            for group in 0..self.config.groups {
                let members = || {
                    (group * size..(group + 1) * size)
                        .flat_map(|c| (0..height).flat_map(move |y| (0..width).map(move |x| (c, y, x))))
                };
                let count = (size * height * width) as f64;
                let mean = members().map(|(c, y, col)| x.at(c, t, y, col)).sum::<f64>() / count;
                let variance = members().map(|(c, y, col)| (x.at(c, t, y, col) - mean).powi(2)).sum::<f64>() / count;
                for (c, y, col) in members() {
                    let index = x.index(c, t, y, col);
                    let unit = (x.values[index] - mean) / (variance + 1e-6).sqrt();
                    out.values[index] = unit * f64::from(gamma[c]) + f64::from(beta[c]);
                }
            }
        }
        out
    }

    fn norm_silu(&self, name: &str, x: &Clip) -> Clip {
        self.norm(name, x).map(|v| v / (1.0 + (-v).exp()))
    }

    fn resnet(&self, name: &str, x: Clip) -> Clip {
        let h = self.same(&format!("{name}.conv1"), &self.norm_silu(&format!("{name}.norm1"), &x));
        let h = self.same(&format!("{name}.conv2"), &self.norm_silu(&format!("{name}.norm2"), &h));
        let shortcut = format!("{name}.conv_shortcut");
        if self.tensors.contains_key(&format!("{shortcut}.weight")) {
            self.point(&shortcut, &x).add(&h)
        } else {
            x.add(&h)
        }
    }

    fn attention(&self, name: &str, x: Clip) -> Clip {
        let y = self.norm(&format!("{name}.group_norm"), &x);
        let [q, k, v] = ["to_q", "to_k", "to_v"].map(|part| self.point(&format!("{name}.{part}"), &y));
        let [channels, frames, height, width] = x.dims;
        let pixels = height * width;
        let mut mixed = Clip::new(x.dims);
        let value = |clip: &Clip, c: usize, t: usize, p: usize| clip.values[(c * frames + t) * pixels + p];
        for t in 0..frames {
            for p in 0..pixels {
                let score = |other: usize| {
                    let dot: f64 = (0..channels).map(|c| value(&q, c, t, p) * value(&k, c, t, other)).sum();
                    dot / (channels as f64).sqrt()
                };
                let scores: Vec<f64> = (0..pixels).map(score).collect();
                let most = scores.iter().copied().fold(f64::MIN, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - most).exp()).collect();
                let total: f64 = weights.iter().sum();
                for c in 0..channels {
                    let sum: f64 = (0..pixels).map(|other| weights[other] * value(&v, c, t, other)).sum();
                    mixed.values[(c * frames + t) * pixels + p] = sum / total;
                }
            }
        }
        self.point(&format!("{name}.to_out.0"), &mixed).add(&x)
    }

    fn middle(&self, name: &str, x: Clip) -> Clip {
        let x = self.resnet(&format!("{name}.resnets.0"), x);
        let x = self.attention(&format!("{name}.attentions.0"), x);
        self.resnet(&format!("{name}.resnets.1"), x)
    }

    /// Unfolded channels, outermost first: row offset, column offset, frame offset, channel. The first frame of a clip
    /// becomes one frame, not two.
    fn upsample(&self, name: &str, x: &Clip, temporal: bool) -> Clip {
        let wide = self.point(&format!("{name}.upscale_conv"), x);
        let [channels, frames, height, width] = x.dims;
        let depth = if temporal { 2 } else { 1 };
        let mut y = Clip::new([channels, frames * depth - (depth - 1), height * 2, width * 2]);
        for (r, s, z) in (0..2).flat_map(|r| (0..2).flat_map(move |s| (0..depth).map(move |z| (r, s, z)))) {
            for c in 0..channels {
                let from = ((r * 2 + s) * depth + z) * channels + c;
                for t in 0..frames {
                    if temporal && t == 0 && z == 1 {
                        continue;
                    }
                    let frame = if temporal { (2 * t + z).saturating_sub(1) } else { t };
                    for row in 0..height {
                        for column in 0..width {
                            let index = y.index(c, frame, 2 * row + r, 2 * column + s);
                            y.values[index] = wide.at(from, t, row, column);
                        }
                    }
                }
            }
        }
        self.same(&format!("{name}.conv"), &y)
    }

    /// Mean and log-variance, concatenated in the channels.
    pub fn encode(&self, video: &Clip) -> Clip {
        let last = self.config.channels.len() - 1;
        let mut x = self.same("encoder.conv_in", video);
        for level in 0..=last {
            for j in 0..self.config.layers {
                x = self.resnet(&format!("encoder.down_blocks.{level}.resnets.{j}"), x);
            }
            if level < last {
                let time = if self.config.halves_time(level) { 2 } else { 1 };
                x = self.conv(&format!("encoder.down_blocks.{level}.downsamplers.0.conv"), &x, [time, 2], [0, 1]);
            }
        }
        x = self.middle("encoder.mid_block", x);
        self.same("encoder.conv_out", &self.norm_silu("encoder.conv_norm_out", &x))
    }

    pub fn decode(&self, latent: &Clip) -> Clip {
        let last = self.config.channels.len() - 1;
        let mut x = self.middle("decoder.mid_block", self.same("decoder.conv_in", latent));
        for level in 0..=last {
            for j in 0..=self.config.layers {
                x = self.resnet(&format!("decoder.up_blocks.{level}.resnets.{j}"), x);
            }
            if level < last {
                let temporal = level < self.config.temporal_levels;
                x = self.upsample(&format!("decoder.up_blocks.{level}.upsamplers.0"), &x, temporal);
            }
        }
        self.same("decoder.conv_out", &self.norm_silu("decoder.conv_norm_out", &x))
    }
}
