//! The network as far as files and arithmetic are concerned: which layers there are, and what they cost.

use std::path::Path;

use crate::Result;
use crate::files::safetensors::Header;

/// The name of a fingerprint in a latent file's metadata.
pub const FINGERPRINT: &str = "checkpoint";

/// The library's own checksum of a checkpoint's contents: the same on every machine and for every file name.
pub fn fingerprint(path: &Path) -> Result<String> {
    let found = video_vae::model::checkpoint::Checkpoint::open(path).and_then(|checkpoint| checkpoint.fingerprint());
    found.map(|sum| format!("{sum:016x}")).map_err(|why| why.to_string())
}

/// What distinguishes one checkpoint's network from another's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Channels of each level, from full resolution down.
    pub channels: Vec<u64>,
    /// Residual blocks of an encoder level; a decoder level has one more.
    pub layers: u64,
    pub latent: u64,
    pub groups: u64,
    /// Changes of resolution that also change the frame rate: the innermost ones.
    pub temporal: u64,
}

impl Config {
    /// That of the published checkpoint.
    pub fn published() -> Config {
        Config { channels: vec![128, 256, 512, 512], layers: 2, latent: 16, groups: 32, temporal: 2 }
    }

    /// Read off a checkpoint's shapes.
    pub fn of(header: &Header) -> Option<Config> {
        let shape = |name: String| header.tensors.get(&name).map(|entry| entry.shape.as_slice());
        let first = |level: usize, block: u64| format!("encoder.down_blocks.{level}.resnets.{block}.conv1.weight");
        let channels: Vec<u64> = (0..).map_while(|level| shape(first(level, 0))?.first().copied()).collect();
        let layers = (0..).take_while(|block| shape(first(0, *block)).is_some()).count() as u64;
        let down = |level: usize| shape(format!("encoder.down_blocks.{level}.downsamplers.0.conv.weight"));
        let temporal = (0..channels.len()).filter(|level| down(*level).is_some_and(|s| s.get(2) == Some(&3))).count();
        let latent = *shape("decoder.conv_in.weight".into())?.get(1)?;
        let groups = header.metadata.get("norm_num_groups").map_or(Some(32), |text| text.parse().ok())?;
        (!channels.is_empty()).then_some(Config { channels, layers, latent, groups, temporal: temporal as u64 })
    }

    /// Checks what a checkpoint to be made must fulfil.
    pub fn check(&self) -> Result<()> {
        let levels = self.channels.len() as u64;
        if !(1..=8).contains(&levels) || self.channels.iter().any(|c| !(1..=1 << 14).contains(c)) {
            return Err("--channels: give 1 to 8 numbers from 1 to 16384, such as 128,256,512,512".into());
        }
        if self.groups == 0 || self.channels.iter().any(|c| !c.is_multiple_of(self.groups)) {
            let groups = self.groups;
            return Err(format!(
                "--groups: every number of channels must be a multiple of it, and {groups} is not such"
            ));
        }
        if self.temporal >= levels {
            return Err(format!("--temporal: {levels} levels have {} changes of resolution at most", levels - 1));
        }
        let ranges = [("layers", self.layers, 16), ("latent", self.latent, 4096)];
        match ranges.into_iter().find(|(_, value, most)| !(1..=*most).contains(value)) {
            Some((name, value, most)) => Err(format!("--{name}: {value} is not from 1 to {most}")),
            None => Ok(()),
        }
    }

    /// Every layer, in the order it runs, the encoder first.
    pub fn layers(&self) -> Vec<Layer> {
        let mut list = List { layers: Vec::new(), at: Scale { encoder: true, space: 0, time: 0 } };
        let last = self.channels.len() - 1;
        let mut width = self.channels[0];
        list.conv("encoder.conv_in", 3, width, [3, 3, 3]);
        for (level, channels) in self.channels.iter().copied().enumerate() {
            for block in 0..self.layers {
                list.residual(&format!("encoder.down_blocks.{level}.resnets.{block}"), width, channels);
                width = channels;
            }
            if level < last {
                let in_time = level as u64 + self.temporal >= last as u64;
                list.at.space += 1;
                list.at.time += u32::from(in_time);
                let name = format!("encoder.down_blocks.{level}.downsamplers.0.conv");
                list.conv(&name, width, width, [if in_time { 3 } else { 1 }, 3, 3]);
            }
        }
        list.middle("encoder.mid_block", width);
        list.norm("encoder.conv_norm_out", width);
        list.conv("encoder.conv_out", width, 2 * self.latent, [3, 3, 3]);

        list.at.encoder = false;
        list.conv("decoder.conv_in", self.latent, width, [3, 3, 3]);
        list.middle("decoder.mid_block", width);
        for (level, channels) in self.channels.iter().rev().copied().enumerate() {
            for block in 0..=self.layers {
                list.residual(&format!("decoder.up_blocks.{level}.resnets.{block}"), width, channels);
                width = channels;
            }
            if level < last {
                let in_time = (level as u64) < self.temporal;
                let name = format!("decoder.up_blocks.{level}.upsamplers.0");
                list.conv(&format!("{name}.upscale_conv"), width, width * if in_time { 8 } else { 4 }, [1, 1, 1]);
                list.at.space -= 1;
                list.at.time -= u32::from(in_time);
                list.conv(&format!("{name}.conv"), width, width, [3, 3, 3]);
            }
        }
        list.norm("decoder.conv_norm_out", width);
        list.conv("decoder.conv_out", width, 3, [3, 3, 3]);
        list.layers
    }

    /// Multiplications and additions of one direction on a video of this size, on the network as published: nothing
    /// folded, first frames like any other.
    pub fn flops(&self, encoder: bool, size: [u64; 3]) -> f64 {
        self.count(encoder, size, |kernel, frames, _| frames * kernel.iter().product::<u64>())
    }

    /// Those that are left once what can be multiplied out beforehand is: taps over a first frame that is repeated are
    /// one tap, and an upsampler is one convolution of 2 x 2 taps.
    pub fn folded_flops(&self, encoder: bool, size: [u64; 3]) -> f64 {
        self.count(encoder, size, |[time, rows, columns], frames, name| {
            let later = frames - 1;
            match (time, name) {
                (_, name) if name.ends_with("upscale_conv") => 0,
                // Of the frames that an upsampler in time makes, each sees two of its input.
                (_, name) if name.contains("upsamplers.") => {
                    4 * if self.doubles_time(name) { 1 + 2 * later } else { causal(frames) }
                }
                (3, name) if name.contains("downsamplers.") => (1 + 3 * later) * rows * columns,
                (3, _) => causal(frames) * rows * columns,
                _ => frames * time * rows * columns,
            }
        })
    }

    fn doubles_time(&self, name: &str) -> bool {
        (0..self.temporal).any(|level| name.starts_with(&format!("decoder.up_blocks.{level}.")))
    }

    /// `taps` of a kernel over so many output frames, by the name of its layer.
    fn count(
        &self,
        encoder: bool,
        [frames, height, width]: [u64; 3],
        taps: impl Fn([u64; 3], u64, &str) -> u64,
    ) -> f64 {
        let step = 1 << (self.channels.len() - 1);
        let (height, width) = (height.next_multiple_of(step), width.next_multiple_of(step));
        let intervals = (frames - 1).next_multiple_of(1 << self.temporal);
        let here = self.layers().into_iter().filter(|layer| layer.at.encoder == encoder);
        let cost = |layer: Layer| {
            let pixels = ((height >> layer.at.space) * (width >> layer.at.space)) as f64;
            let frames = (intervals >> layer.at.time) + 1;
            match layer.kind {
                Kind::Norm { .. } => 0.0,
                Kind::Conv { inputs, outputs, kernel } => {
                    pixels * 2.0 * (inputs * outputs * taps(kernel, frames, &layer.name)) as f64
                }
                // Four projections, and every pixel with every pixel, twice.
                Kind::Attention { channels } => {
                    let channels = channels as f64;
                    frames as f64 * pixels * (8.0 * channels * channels + 4.0 * pixels * channels)
                }
            }
        };
        here.map(cost).sum()
    }
}

/// Temporal taps of so many frames, of which each sees the two before it: the first one, the second two, all others
/// three.
fn causal(frames: u64) -> u64 {
    if frames == 1 { 1 } else { 3 * frames - 3 }
}

/// Where a layer's output lives: halvings of the video's size and rate.
#[derive(Debug, Clone, Copy)]
pub struct Scale {
    encoder: bool,
    space: u32,
    time: u32,
}

#[derive(Debug, Clone, Copy)]
enum Kind {
    Norm { channels: u64 },
    Conv { inputs: u64, outputs: u64, kernel: [u64; 3] },
    Attention { channels: u64 },
}

#[derive(Debug)]
pub struct Layer {
    name: String,
    kind: Kind,
    at: Scale,
}

impl Layer {
    /// Its tensors with their shapes.
    pub fn tensors(&self) -> Vec<(String, Vec<u64>)> {
        let pair = |name: &str, shape: Vec<u64>| {
            let bias = vec![shape[0]];
            [(format!("{name}.weight"), shape), (format!("{name}.bias"), bias)]
        };
        match self.kind {
            Kind::Norm { channels } => pair(&self.name, vec![channels]).into(),
            Kind::Conv { inputs, outputs, kernel: [t, h, w] } => {
                pair(&self.name, vec![outputs, inputs, t, h, w]).into()
            }
            Kind::Attention { channels } => ["to_q", "to_k", "to_v", "to_out.0"]
                .iter()
                .flat_map(|part| pair(&format!("{}.{part}", self.name), vec![channels, channels]))
                .collect(),
        }
    }
}

struct List {
    layers: Vec<Layer>,
    at: Scale,
}

impl List {
    fn add(&mut self, name: &str, kind: Kind) {
        self.layers.push(Layer { name: name.to_owned(), kind, at: self.at });
    }

    fn norm(&mut self, name: &str, channels: u64) {
        self.add(name, Kind::Norm { channels });
    }

    fn conv(&mut self, name: &str, inputs: u64, outputs: u64, kernel: [u64; 3]) {
        self.add(name, Kind::Conv { inputs, outputs, kernel });
    }

    fn residual(&mut self, name: &str, inputs: u64, outputs: u64) {
        self.norm(&format!("{name}.norm1"), inputs);
        self.conv(&format!("{name}.conv1"), inputs, outputs, [3, 3, 3]);
        self.norm(&format!("{name}.norm2"), outputs);
        self.conv(&format!("{name}.conv2"), outputs, outputs, [3, 3, 3]);
        if inputs != outputs {
            self.conv(&format!("{name}.conv_shortcut"), inputs, outputs, [1, 1, 1]);
        }
    }

    fn middle(&mut self, name: &str, channels: u64) {
        self.residual(&format!("{name}.resnets.0"), channels, channels);
        self.norm(&format!("{name}.attentions.0.group_norm"), channels);
        self.add(&format!("{name}.attentions.0"), Kind::Attention { channels });
        self.residual(&format!("{name}.resnets.1"), channels, channels);
    }
}
