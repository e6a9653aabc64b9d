//! Launches the operations of shortcuts around levels.

use super::params::{AddParams, AddedFrame, PoolParams, PooledFrame};
use super::{Launcher, per_frame, workgroups};
use crate::backend::gpu::{AddressedBlock, LaunchLevels, RowSizes};
use crate::backend::vulkan::driver::{DeviceBlock, Shader};
use crate::backend::vulkan::sizes::channel_stride;
use crate::error::Result;
use crate::ir::{AddOp, FrameShape, Offsets, PoolOp};

/// Threads for all elements of a frame in memory.
fn elements(shape: FrameShape) -> u64 {
    shape.pixels() * channel_stride(shape.channels)
}

impl LaunchLevels for Launcher {
    fn pool(&self, block: &DeviceBlock, op: &PoolOp<Offsets>) -> Result<()> {
        let (sizes, output) = (self.sizes, op.output());
        let frame = |frame: &crate::ir::PooledFrame<Offsets>| {
            Ok(PooledFrame {
                from: block.at(frame.from.0, sizes.data_bytes(op.input))?,
                into: block.at(frame.into.0, sizes.data_bytes(output))?,
                part: frame.part as u32,
                clear: u32::from(frame.clear),
            })
        };
        let params = PoolParams {
            height: output.height as i32,
            width: output.width as i32,
            input_width: op.input.width as i32,
            input_channels: channel_stride(op.input.channels) as i32,
            out_channels: channel_stride(output.channels) as i32,
            channels: op.input.channels as i32,
            parts: op.parts as i32,
            unused: 0,
            frame: per_frame(op.frames.iter().map(frame))?,
        };
        let size = [workgroups(elements(output)), op.frames.len() as u32, 1];
        // SAFETY: the kernel's parameters. All regions were checked, and blocks wait for the queues.
        unsafe { self.queue.launch(Shader::Pool(sizes.precision), size, &[], |_| params) }
    }

    fn add(&self, block: &DeviceBlock, op: &AddOp<Offsets>) -> Result<()> {
        let (sizes, addend) = (self.sizes, op.addend());
        let frame = |frame: &crate::ir::AddedFrame<Offsets>| {
            Ok(AddedFrame {
                x: block.at(frame.x.0, sizes.data_bytes(op.shape))?,
                addend: block.at(frame.addend.0, sizes.data_bytes(addend))?,
                target: block.at(frame.out.0, sizes.data_bytes(op.shape))?,
                part: frame.part as u32,
                unused: 0,
            })
        };
        let params = AddParams {
            height: op.shape.height as i32,
            width: op.shape.width as i32,
            channels: op.shape.channels as i32,
            out_channels: channel_stride(op.shape.channels) as i32,
            addend_width: addend.width as i32,
            addend_channels: channel_stride(addend.channels) as i32,
            side: op.repeat.side as i32,
            parts: op.repeat.parts as i32,
            repeats: op.repeats() as i32,
            unused: 0,
            frame: per_frame(op.frames.iter().map(frame))?,
        };
        let size = [workgroups(elements(op.shape)), op.frames.len() as u32, 1];
        // SAFETY: as in `pool`.
        unsafe { self.queue.launch(Shader::Add(sizes.precision), size, &[], |_| params) }
    }
}
