//! A checksum of a checkpoint's contents, the same on every machine and for every file name.

use super::header::TensorEntry;
use super::open::Checkpoint;
use super::source::PIECE;
use crate::checksum::Checksum;
use crate::error::Result;
use crate::thread_pool;

impl Checkpoint {
    /// Covers names, types, shapes and values, and the number of groups, which is in no tensor.
    pub fn fingerprint(&self) -> Result<u64> {
        const UNIT: u64 = 8 << 20;
        let mut all = Checksum::default();
        all.add(&self.model().encoder.norm_groups().unwrap_or(0).to_le_bytes());
        let mut units = Vec::new();
        for TensorEntry { name, dtype, shape, range, .. } in self.contents.tensors() {
            all.add(name.as_bytes());
            all.add(dtype.name().as_bytes());
            shape.iter().for_each(|n| all.add(&n.to_le_bytes()));
            units.extend(range.clone().step_by(UNIT as usize).map(|start| start..range.end.min(start + UNIT)));
        }
        let bytes: u64 = units.iter().map(|unit| unit.end - unit.start).sum();
        let sums = thread_pool::map_on(
            thread_pool::threads_for(bytes as usize / size_of::<u64>()),
            units,
            || Box::new([0; PIECE]),
            |buffer, unit| {
                let mut sum = Checksum::default();
                let read = self.source.pieces(buffer, unit, |_, piece| sum.add(piece));
                read.map(|()| sum.value())
            },
        );
        for sum in sums {
            all.add(&sum.map_err(|why| self.fail(why))?.to_le_bytes());
        }
        Ok(all.value())
    }
}
