//! Launches copies of rows within device memory, as they are, or to 8 bits and back.

use super::params::{CacheParams, Copy, CopyParams};
use super::{Launcher, per_frame, workgroups};
use crate::backend::gpu::{AddressedBlock, LaunchCopies, RowCopy, RowPitches, U8Copy, U8Rows};
use crate::backend::vulkan::driver::{DeviceBlock, Shader, VulkanQueue};
use crate::backend::vulkan::sizes::channel_stride;
use crate::error::{Error, Result};
use crate::ir::CacheFormat;

/// Bytes that a thread copies at a time. Rows are multiples of it.
const UNIT: u64 = 8;

impl LaunchCopies for Launcher {
    fn copy_rows(
        &self,
        queue: Option<&VulkanQueue>,
        block: &DeviceBlock,
        copies: &[RowCopy],
        pitches: Option<RowPitches>,
    ) -> Result<()> {
        let most = copies.iter().map(|copy| copy.bytes).max().unwrap_or(0);
        if most == 0 {
            return Ok(());
        }
        let RowPitches { row, from, to } = pitches.unwrap_or(RowPitches { row: most, from: most, to: most });
        let copy = |copy: &RowCopy| {
            let reach = |pitch: u64| copy.bytes.saturating_sub(1) / row * pitch + row.min(copy.bytes);
            Ok(Copy {
                from: block.at(copy.from, reach(from))?,
                to: block.at(copy.to, reach(to))?,
                units: copy.bytes / UNIT,
            })
        };
        let params = CopyParams {
            row_units: row / UNIT,
            from_pitch: from,
            to_pitch: to,
            copy: per_frame(copies.iter().map(copy))?,
        };
        let size = [workgroups(most / UNIT / 4), copies.len() as u32, 1];
        // SAFETY: the kernel's parameters. All regions were checked, and blocks wait for the queues.
        unsafe { queue.unwrap_or(&self.queue).launch(Shader::CopyRows, size, &[], |_| params) }
    }

    fn copy_u8(
        &self,
        queue: &VulkanQueue,
        block: &DeviceBlock,
        copy: U8Copy,
        of: U8Rows,
        frames: &[(u64, u64)],
    ) -> Result<()> {
        let U8Rows { part, rows, .. } = of;
        let channels = channel_stride(part.channels);
        let block_channels = CacheFormat::block(channels);
        let threads = rows * part.width * (channels / block_channels);
        if threads == 0 || frames.is_empty() {
            return Ok(());
        }
        if threads.div_ceil(256) > 65_535 {
            return Err(Error::Internal(format!("{threads} blocks of channels are rounded at once")));
        }
        let [read, written] = of.sides(self.sizes, copy);
        let params = CacheParams {
            copy: match copy {
                U8Copy::Store => 0,
                U8Copy::Restore => 1,
                U8Copy::Round => 2,
            },
            rows: rows as u32,
            columns: part.width as u32,
            channels: channels as u32,
            block: block_channels as u32,
            unused: 0,
            from_pitch: read.pitch,
            to_pitch: written.pitch,
            from: per_frame(frames.iter().map(|(from, _)| block.at(*from, read.reach())))?,
            to: per_frame(frames.iter().map(|(_, to)| block.at(*to, written.reach())))?,
        };
        let size = [workgroups(threads), frames.len() as u32, 1];
        // SAFETY: as in `copy_rows`.
        unsafe { queue.launch(Shader::CacheU8(self.sizes.precision), size, &[], |_| params) }
    }
}
