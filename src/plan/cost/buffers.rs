//! Buffers that operations need beside their frames: scratch, band buffers, tensor-map headroom.

use std::collections::{HashMap, HashSet};

use super::sizes::Target;
use crate::ir::{BandContents, ConvLayout, FrameShape, LayerId, Location, Op};

/// The largest buffers that the recorded operations need. Most operations repeat, so each kind is sized once.
pub struct BufferBytes<'a> {
    target: Target<'a>,
    scratch: HashMap<(Option<LayerId>, FrameShape, u64), u64>,
    bands: HashMap<(LayerId, FrameShape), (ConvLayout, HashSet<BandContents>)>,
    headroom: u64,
}

impl<'a> BufferBytes<'a> {
    pub fn new(target: Target<'a>) -> BufferBytes<'a> {
        BufferBytes { target, scratch: HashMap::new(), bands: HashMap::new(), headroom: 0 }
    }

    pub fn record<L: Location>(&mut self, op: &Op<L>) {
        let sizes = self.target.sizes;
        match op {
            Op::Conv(conv) => {
                self.record_conv(conv.layer, &conv.layout, conv.input, conv.frames.len() as u64);
            }
            Op::Attention(attention) => {
                let (shape, frames) = (attention.shape, attention.frames.len() as u64);
                self.scratch.entry((None, shape, frames)).or_insert_with(|| sizes.attention_scratch(shape, frames));
            }
            Op::BandedConv(conv) => {
                let layout = conv.layout;
                self.record_conv(conv.layer, &layout, conv.input, conv.frames.len() as u64);
                let bands = self.bands.entry((conv.layer, conv.input)).or_insert_with(|| (layout, HashSet::new()));
                bands.1.insert(conv.band_contents());
                let for_statistics = conv.frames.iter().any(|frame| frame.out.is_rematerialised());
                let rematerialised = match &conv.rematerialise {
                    Some(by) => Some((by.layout, by.input)),
                    None => for_statistics.then_some((layout, conv.input)),
                };
                if let Some((layout, input)) = rematerialised {
                    let whole = sizes.tensor_map_headroom(layout.window.output(input, layout.cout));
                    self.headroom = self.headroom.max(whole);
                }
            }
            Op::Load(_) | Op::Fetch(_) | Op::Normalise(_) | Op::Blend(_) | Op::Store(_) => {}
        }
    }

    fn record_conv(&mut self, layer: LayerId, layout: &ConvLayout, input: FrameShape, frames: u64) {
        let bytes = || self.target.sizes.conv_scratch(layout, input, frames);
        self.scratch.entry((Some(layer), input, frames)).or_insert_with(bytes);
    }

    pub fn scratch(&self) -> u64 {
        self.scratch.values().copied().max().unwrap_or(0)
    }

    /// All band buffers. Bands of few frames could have more rows; they are sized for the most frames of their layer.
    pub fn bands(&self) -> u64 {
        let of_layer =
            |((_, input), (layout, bands)): (&(LayerId, FrameShape), &(ConvLayout, HashSet<BandContents>))| {
                let outputs = bands.iter().map(|band| band.outputs).max()?;
                let sized = |band: &BandContents| {
                    let bytes = self.target.sizes.band_bytes(layout, *input, BandContents { outputs, ..*band });
                    bytes.expect("only layouts that can run in bands are planned in bands")
                };
                bands.iter().map(sized).max()
            };
        self.bands.iter().filter_map(of_layer).max().unwrap_or(0)
    }

    /// Bytes that must precede the band buffers.
    pub fn headroom(&self) -> u64 {
        self.headroom
    }
}
