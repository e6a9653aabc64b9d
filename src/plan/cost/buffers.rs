//! Buffers that operations need beside their frames: scratch and band buffers.

use super::sizes::Target;
use crate::ir::{BandPart, BandShape, BandedConvOp, ConvLayout, FrameShape, LayerId, Location, Op};

/// The largest buffers that the recorded operations need. Most operations repeat, so each kind is sized once.
pub struct BufferBytes<'a> {
    target: Target<'a>,
    pub scratch: u64,
    /// Of each layer, shapes and numbers of frames whose scratch is known. Few, so they are not hashed.
    scratched: Vec<Vec<(FrameShape, u64)>>,
    /// Of each layer.
    bands: Vec<Vec<LayerBands>>,
    /// The least offset of the band buffers.
    pub least_band_offset: u64,
}

/// The bands of a layer for one shape.
#[derive(Clone)]
struct LayerBands {
    shape: BandShape,
    /// Of the operations, the most.
    outputs: u64,
    parts: Vec<Vec<BandPart>>,
}

impl<'a> BufferBytes<'a> {
    pub fn new(target: Target<'a>, layers: usize) -> BufferBytes<'a> {
        let (scratched, bands) = (vec![Vec::new(); layers], vec![Vec::new(); layers]);
        BufferBytes { target, scratch: 0, scratched, bands, least_band_offset: 0 }
    }

    pub fn record<L: Location>(&mut self, op: &Op<L>) {
        let sizes = self.target.sizes;
        match op {
            Op::Conv(conv) => {
                self.record_conv(conv.layer, &conv.layout, conv.input, conv.frames.len() as u64);
            }
            Op::Attention(attention) => {
                let bytes = sizes.attention_scratch(attention.shape, attention.frames.len() as u64);
                self.scratch = self.scratch.max(bytes);
            }
            Op::BandedConv(conv) => {
                let layout = conv.layout;
                self.record_conv(conv.layer, &layout, conv.input, conv.frames.len() as u64);
                self.record_bands(conv);
                let for_statistics = conv.frames.iter().any(|frame| frame.out.is_rematerialised());
                let rematerialised = conv.rematerialise.as_ref().map(|by| (by.layout, by.input));
                for (layout, input) in rematerialised.into_iter().chain(for_statistics.then_some((layout, conv.input)))
                {
                    let least = sizes.least_band_offset(layout.window.output(input, layout.cout));
                    self.least_band_offset = self.least_band_offset.max(least);
                }
            }
            Op::Load(_) | Op::Fetch(_) | Op::Normalise(_) | Op::Pool(_) | Op::Add(_) | Op::Blend(_) | Op::Store(_) => {}
        }
    }

    fn record_conv(&mut self, layer: LayerId, layout: &ConvLayout, input: FrameShape, frames: u64) {
        let known = &mut self.scratched[layer];
        if !known.contains(&(input, frames)) {
            known.push((input, frames));
            self.scratch = self.scratch.max(self.target.sizes.conv_scratch(layout, input, frames));
        }
    }

    fn record_bands<L: Location>(&mut self, conv: &BandedConvOp<L>) {
        let (of_layer, shape, outputs) = (&mut self.bands[conv.layer], conv.band_shape(), conv.frames.len() as u64);
        let Some(bands) = of_layer.iter_mut().find(|bands| bands.shape == shape) else {
            of_layer.push(LayerBands { shape, outputs, parts: vec![conv.band_parts().collect()] });
            return;
        };
        bands.outputs = bands.outputs.max(outputs);
        if !bands.parts.iter().any(|parts| parts.iter().copied().eq(conv.band_parts())) {
            bands.parts.push(conv.band_parts().collect());
        }
    }

    /// All band buffers. Bands of few frames could have more rows; they are sized for the most frames of their layer.
    pub fn bands(&self) -> u64 {
        let of_layer = |bands: &LayerBands| {
            let sized = |parts: &Vec<BandPart>| {
                let bytes = self.target.sizes.band_bytes(&bands.shape, parts, bands.outputs);
                bytes.expect("only layouts that can run in bands are planned in bands")
            };
            bands.parts.iter().map(sized).max()
        };
        self.bands.iter().flatten().filter_map(of_layer).max().unwrap_or(0)
    }
}
