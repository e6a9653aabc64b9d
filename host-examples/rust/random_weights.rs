//! Checkpoints of the real layout with made-up contents.

use std::io::{BufWriter, Write};
use std::path::Path;

use half::{bf16, f16};
use video_vae::internals::model::Model;
use video_vae::internals::model::graph::TensorShape;

use crate::draft::Draft;
use crate::files::safetensors;
use crate::tensor::Dtype;
use crate::{Result, interrupt};

/// A generator of 64 random bits (splitmix64).
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    /// Mean 0, variance 1, nearly normal: the sum of four uniform numbers of 16 bits, each of variance 1/12.
    pub fn normal(&mut self) -> f32 {
        let bits = self.bits();
        let sum: u64 = (0..4).map(|i| bits >> (16 * i) & 0xffff).sum();
        (sum as f32 / 65535.0 - 2.0) * 3f32.sqrt()
    }
}

/// Writes a checkpoint whose activations stay near unit size. The number of parameters.
pub fn write(path: &Path, model: &Model, dtype: Dtype, seed: u64) -> Result<u64> {
    let (tensors, header) = layout(model, dtype);
    let draft = Draft::new(path)?;
    let failed = |why: std::io::Error| format!("{} cannot be written: {why}; make room", path.display());
    let mut file = BufWriter::with_capacity(1 << 20, draft.create()?);
    file.write_all(&header).map_err(failed)?;
    let mut bytes = Vec::new();
    for (index, TensorShape { name, shape }) in tensors.iter().enumerate() {
        interrupt::check()?;
        // Each tensor has numbers of its own, so that a change to one leaves the others.
        let mut random = Random(Random(seed ^ (index as u64) << 32).bits());
        let (middle, spread) = match shape[..] {
            [_] if name.contains("norm") && name.ends_with("weight") || name.ends_with("_var") => (1.0, 0.1),
            [_] => (0.0, 0.1),
            // Sums over this many inputs keep their size.
            _ => (0.0, (shape[1..].iter().product::<u64>() as f32).sqrt().recip()),
        };
        bytes.clear();
        for _ in 0..shape.iter().product() {
            let value = middle + spread * random.normal();
            match dtype {
                Dtype::F16 => bytes.extend(f16::from_f32(value).to_le_bytes()),
                Dtype::Bf16 => bytes.extend(bf16::from_f32(value).to_le_bytes()),
                _ => bytes.extend(value.to_le_bytes()),
            }
        }
        file.write_all(&bytes).map_err(failed)?;
    }
    file.flush().map_err(failed)?;
    draft.finish()?;
    Ok(tensors.iter().map(|tensor| tensor.shape.iter().product::<u64>()).sum())
}

/// A checkpoint of zeros under a temporary name, for plans, which depend on shapes alone. It takes no room on disk, and
/// is gone when dropped.
pub fn blank(model: &Model, dtype: Dtype) -> Result<Draft> {
    let draft = Draft::temporary("vvae-blank.safetensors")?;
    let (tensors, header) = layout(model, dtype);
    let elements: u64 = tensors.iter().map(|tensor| tensor.shape.iter().product::<u64>()).sum();
    let mut file = draft.create()?;
    safetensors::write_at(&mut file, 0, &header)?;
    file.set_len(header.len() as u64 + elements * dtype.bytes() as u64)
        .map_err(|why| format!("{} cannot be made: {why}; make room", draft.path.display()))?;
    Ok(draft)
}

/// Every tensor, and the file's header.
fn layout(model: &Model, dtype: Dtype) -> (Vec<TensorShape>, Vec<u8>) {
    let tensors = model.tensors();
    let bytes = |shape: &[u64]| shape.iter().product::<u64>() * dtype.bytes() as u64;
    let entry = |TensorShape { name, shape }: &TensorShape| (name.clone(), dtype.name(), shape.clone(), bytes(shape));
    let entries: Vec<_> = tensors.iter().map(entry).collect();
    let groups = model.encoder.norm().map_or(1, |norm| norm.groups());
    let header = safetensors::header(&entries, &[("norm_num_groups", groups.to_string())], 0);
    (tensors, header)
}
