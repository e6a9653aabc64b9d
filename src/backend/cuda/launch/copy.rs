//! Launches copies of rows within device memory, as they are, or to 8 bits and back.

use super::launcher::Launcher;
use super::params::{CacheParams, CopyParams};
use super::queue::JobBlock;
use super::tiling::{self, CO_RESIDENT_THREADS, MAX_FRAMES, UNIT_BYTES};
use crate::backend::cuda::driver::CudaStream;
use crate::backend::gpu::{AddressedBlock, LaunchCopies, RowCopy, RowPitches, RowSizes, U8Copy, U8Rows};
use crate::error::{Error, Result};
use crate::ir::CacheFormat;

impl LaunchCopies for Launcher {
    /// Whole units are copied.
    fn copy_rows(
        &self,
        stream: Option<&CudaStream>,
        block: &JobBlock,
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
        let stream = stream.unwrap_or_else(|| self.queue.stream());
        // SAFETY: all regions are in the block, and everything else that uses them is in the same stream, or waits for
        // it.
        unsafe { self.kernels.copy_rows.launch(stream, grid, CO_RESIDENT_THREADS, &params) }
    }

    fn copy_u8(
        &self,
        stream: &CudaStream,
        block: &JobBlock,
        copy: U8Copy,
        of: U8Rows,
        frames: &[(u64, u64)],
    ) -> Result<()> {
        let U8Rows { part, rows, .. } = of;
        let (channels, unit_channels) = (tiling::channel_stride(part.channels), UNIT_BYTES / self.sizes.element());
        let row_units = part.width * channels / unit_channels;
        let units = row_units * rows;
        if units == 0 || frames.is_empty() {
            return Ok(());
        }
        if i32::try_from(units).is_err() || frames.len() > MAX_FRAMES {
            return Err(Error::Internal(format!("{units} units of {} frames are rounded at once", frames.len())));
        }
        let [read, written] = of.sides(self.sizes, copy);
        let mut params = CacheParams {
            from_pitch: read.pitch as i64,
            to_pitch: written.pitch as i64,
            row_units: row_units as u32,
            units: units as u32,
            pixel_bytes: (part.width * channels) as u32,
            block_units: (CacheFormat::block(channels) / unit_channels) as i32,
            ..CacheParams::default()
        };
        for (i, (from, to)) in frames.iter().enumerate() {
            params.from[i] = block.at(*from, read.reach())?;
            params.to[i] = block.at(*to, written.reach())?;
        }
        let kernel = match copy {
            U8Copy::Store => &self.kernels.cache_store,
            U8Copy::Restore => &self.kernels.cache_restore,
            U8Copy::Round => &self.kernels.cache_round,
        };
        let blocks = units.div_ceil(u64::from(CO_RESIDENT_THREADS) * 4) as u32;
        let grid = [blocks.min(self.context.gpu.multiprocessors * 8), frames.len() as u32];
        // SAFETY: all regions are in the block, and everything else that uses them is in the same stream, or waits for
        // it.
        unsafe { kernel.launch(stream, grid, CO_RESIDENT_THREADS, &params) }
    }
}
