//! Launches copies of rows within device memory.

use super::launcher::Launcher;
use super::params::CopyParams;
use super::tiling::{CO_RESIDENT_THREADS, MAX_FRAMES, UNIT_BYTES};
use crate::backend::cuda::driver::{CudaStream, DeviceBlock};
use crate::backend::gpu::{RowCopy, RowPitches};
use crate::error::{Error, Result};

impl Launcher {
    /// Whole units are copied. Without pitches there are no gaps between rows.
    pub fn launch_copies(
        &self,
        stream: &CudaStream,
        block: &DeviceBlock,
        copies: &[RowCopy],
        pitches: Option<RowPitches>,
    ) -> Result<()> {
        let units = |bytes: u64| bytes.div_ceil(UNIT_BYTES);
        let most = copies.iter().map(|copy| units(copy.bytes)).max().unwrap_or(0);
        let row = most * UNIT_BYTES;
        let pitches = pitches.unwrap_or(RowPitches { row, from: row, to: row });
        if most == 0 {
            return Ok(());
        }
        if i32::try_from(most).is_err() || copies.len() > MAX_FRAMES {
            return Err(Error::Internal(format!("{most} units of {} frames are copied at once", copies.len())));
        }
        let mut params = CopyParams {
            from_pitch: pitches.from as i64,
            to_pitch: pitches.to as i64,
            row_units: units(pitches.row) as u32,
            ..CopyParams::default()
        };
        for (i, RowCopy { from, to, bytes }) in copies.iter().enumerate() {
            let reach = |pitch: u64| bytes.saturating_sub(1) / pitches.row * pitch + pitches.row.min(*bytes);
            params.from[i] = block.at(*from, reach(pitches.from))?;
            params.to[i] = block.at(*to, reach(pitches.to))?;
            params.units[i] = units(*bytes) as u32;
        }
        let blocks = most.div_ceil(u64::from(CO_RESIDENT_THREADS) * 4) as u32;
        let grid = [blocks.min(self.context.gpu.multiprocessors * 8), copies.len() as u32];
        // SAFETY: all regions are in the block, and everything else that uses them is in the same stream, or waits for
        // it.
        unsafe { self.kernels.copy_rows.launch(stream, grid, CO_RESIDENT_THREADS, &params) }
    }
}
