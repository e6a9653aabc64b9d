//! What tests of several modules share.

use std::path::{Path, PathBuf};

use half::f16;

use crate::backend::Backend;
use crate::error::Result;
use crate::ir::{ConvLayout, ConvSource, EachSlab, WeightBlock, Window};
use crate::model::checkpoint::testing::TemporaryFile;
use crate::model::families::seedvr2::Sizes;
use crate::model::graph::{FirstFrame, TimeAxis};
use crate::model::lower::{Pairs, TimeRule};
use crate::model::{Direction, Network, Recipes};

/// A linear congruential generator: the same numbers in every run.
pub struct Lcg(pub u64);

impl Lcg {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    /// Between -1 and 1.
    pub fn next(&mut self) -> f32 {
        (self.bits() >> 7) as f32 / (1 << 23) as f32 - 1.0
    }

    pub fn fill(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.next()).collect()
    }
}

/// A checkpoint of `tests/golden`.
pub fn golden(model: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/golden/{model}.safetensors"))
}

/// A golden checkpoint with one tensor times 2^18: what its layer gives is too large for fp16, its weights are not.
pub fn overflowing(model: &str, tensor: &str) -> TemporaryFile {
    const FACTOR: f32 = 262_144.0;
    let mut bytes = std::fs::read(golden(model)).unwrap();
    let (length, rest) = bytes.split_first_chunk_mut().unwrap();
    let (header, data) = rest.split_at_mut(u64::from_le_bytes(*length) as usize);
    let entry = &serde_json::from_slice::<serde_json::Value>(header).unwrap()[tensor];
    let [start, end] = [0, 1].map(|i| entry["data_offsets"][i].as_u64().unwrap() as usize);
    match entry["dtype"].as_str().unwrap() {
        "F16" => data[start..end].as_chunks_mut().0.iter_mut().for_each(|value| {
            *value = f16::from_f32(FACTOR * f16::from_le_bytes(*value).to_f32()).to_le_bytes();
        }),
        "F32" => data[start..end].as_chunks_mut().0.iter_mut().for_each(|value| {
            *value = (FACTOR * f32::from_le_bytes(*value)).to_le_bytes();
        }),
        other => panic!("a tensor of {other}"),
    }
    TemporaryFile::new(&bytes)
}

/// One direction of a model with these sizes.
pub fn network(sizes: &Sizes, direction: Direction) -> Network {
    Network::new(&sizes.model(), direction).unwrap()
}

/// The recipes of frames that share products by pairs.
pub fn paired(window: Window) -> Recipes {
    let pairs = if window == Window::Up { Pairs::Halved } else { Pairs::Plain };
    Recipes::new(TimeRule { pairs, ..TimeRule::of(TimeAxis::causal(FirstFrame::Repeated)) })
}

impl ConvLayout {
    pub const fn slab_elements(&self, slab: u64) -> u64 {
        match self.shortcut {
            Some(cin) if slab == self.slabs => cin * self.cout,
            _ => self.window.taps() * self.cin * self.cout,
        }
    }

    pub const fn slab_count(&self) -> u64 {
        self.slabs + self.shortcut.is_some() as u64
    }
}

/// Weights slab by slab.
pub trait SlabSource {
    fn slab(&mut self, slab: u64, into: &mut [f32]);
    fn bias(&mut self, bias: u64, into: &mut [f32]);
    fn norm(&mut self, gamma: &mut [f32], beta: &mut [f32]);
}

/// Cuts blocks out of slabs.
pub struct CutSlabs<'a> {
    pub layout: &'a ConvLayout,
    pub source: &'a mut dyn SlabSource,
}

impl ConvSource for CutSlabs<'_> {
    fn block(&mut self, block: &WeightBlock, each: &mut EachSlab) -> Result<()> {
        let cout = self.layout.cout as usize;
        for slab in block.slabs(self.layout) {
            let mut whole = vec![0.0; self.layout.slab_elements(slab) as usize];
            self.source.slab(slab, &mut whole);
            let mut cut = Vec::new();
            for tap in whole.chunks(whole.len() / block.taps(self.layout) as usize) {
                for row in tap.chunks(cout).take(block.inputs.end as usize).skip(block.inputs.start as usize) {
                    cut.extend_from_slice(&row[block.outputs.start as usize..block.outputs.end as usize]);
                }
            }
            each(slab, &cut)?;
        }
        Ok(())
    }

    fn biases(&mut self, into: &mut [f32]) -> Result<()> {
        let vectors = into.chunks_mut(self.layout.bias_elements() as usize).enumerate();
        vectors.for_each(|(bias, into)| self.source.bias(bias as u64, into));
        Ok(())
    }

    fn norm(&mut self, gamma: &mut [f32], beta: &mut [f32]) -> Result<()> {
        self.source.norm(gamma, beta);
        Ok(())
    }
}

/// All parts of a convolution's weights.
pub fn prepare<B: Backend>(
    backend: &B,
    (store, offset): (&B::Store, u64),
    layout: &ConvLayout,
    source: &mut dyn SlabSource,
) -> Result<B::Conv> {
    let conv = backend.allocate_conv(store, offset, layout)?;
    let mut source = CutSlabs { layout, source };
    for part in backend.weight_parts(layout) {
        backend.write_part(&conv, &part, &mut source, &mut Default::default())?;
    }
    Ok(conv)
}
