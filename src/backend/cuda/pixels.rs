//! Moves frames between host tensors and activations. A tensor on the device is read and written in place; one in host
//! memory passes through pinned memory, which the copy engine reaches while the host goes on.

use std::sync::Arc;

use cudarc::driver::sys;

use super::context::Context;
use super::driver::check;
use super::params::{BlendParams, LoadParams, StoreParams, Strided};
use super::pinned::Pinned;
use super::stream::Event;
use super::{Cuda, On, geometry};
use crate::backend::{Blend, BlendOp, HostMemory, LoadOp, StoreOp};
use crate::error::{Error, Result};
use crate::tensor::{DType, FrameShape, Place, View};

/// Two places in pinned memory that take turns, each with the event after which it is free again.
pub struct Ring {
    pinned: Option<Pinned>,
    bytes: u64,
    events: [Event; 2],
    next: usize,
}

impl Ring {
    fn new(context: &Arc<Context>, bytes: u64) -> Result<Ring> {
        let pinned = if bytes > 0 { Some(Pinned::new(context, bytes)?) } else { None };
        Ok(Ring { pinned, bytes: bytes / 2, events: [Event::new(context)?, Event::new(context)?], next: 0 })
    }

    /// The next place, once it is free, and its event.
    fn take(&mut self, bytes: u64) -> Result<(*mut u8, &Event)> {
        let Some(pinned) = self.pinned.as_ref().filter(|_| bytes <= self.bytes) else {
            return Err(Error::Internal(format!("{bytes} bytes of staging were not planned")));
        };
        let place = pinned.at(self.next as u64 * self.bytes, self.bytes)?;
        let event = &self.events[self.next];
        self.next = 1 - self.next;
        event.wait()?;
        Ok((place, event))
    }
}

/// A frame on its way to the host.
struct Arrival {
    place: *mut u8,
    order: Order,
    into: View,
    batch: u64,
    frame: u64,
}

// SAFETY: an address in pinned memory that the same struct as this owns.
unsafe impl Send for Arrival {}

/// Pinned memory of a job, and what is under way in it.
pub struct Transfers {
    loads: Ring,
    stores: Ring,
    arrivals: [Option<Arrival>; 2],
}

impl Transfers {
    pub fn new(context: &Arc<Context>, staging: HostMemory) -> Result<Transfers> {
        let loads = Ring::new(context, staging.load)?;
        Ok(Transfers { loads, stores: Ring::new(context, staging.store)?, arrivals: [None, None] })
    }

    /// Waits for the frames that are under way and writes them into the host's tensors. Forgets them in any case: those
    /// tensors are the host's again.
    pub fn finish(&mut self) -> Result<()> {
        let [first, second] = [0, 1].map(|turn| self.arrive((self.stores.next + turn) % 2));
        first.and(second)
    }

    fn arrive(&mut self, place: usize) -> Result<()> {
        if let Some(arrival) = self.arrivals[place].take() {
            self.stores.events[place].wait()?;
            // SAFETY: the event says that the copy has ended; the view's maker vouches for its memory during the call.
            unsafe {
                copy(
                    &arrival.into,
                    arrival.batch,
                    arrival.frame,
                    whole(&arrival.into),
                    arrival.order,
                    arrival.place,
                    false,
                )
            };
        }
        Ok(())
    }
}

/// How a compact copy of a frame is laid out: as the tensor itself is, as far as that is compact.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    Planar,
    Interleaved,
}

impl Order {
    fn of(view: &View) -> Order {
        if view.strides()[1] == 1 && view.shape().channels > 1 { Order::Interleaved } else { Order::Planar }
    }

    /// Strides by channel, row and column of a compact copy.
    fn strides(self, channels: u64, area: Area) -> [i64; 3] {
        let (channels, rows, columns) = (channels as i64, area.rows as i64, area.columns as i64);
        match self {
            Order::Planar => [rows * columns, columns, 1],
            Order::Interleaved => [1, columns * channels, channels],
        }
    }
}

/// Rows and columns of a tensor.
#[derive(Clone, Copy)]
struct Area {
    top: u64,
    left: u64,
    rows: u64,
    columns: u64,
}

fn whole(view: &View) -> Area {
    Area { top: 0, left: 0, rows: view.shape().height, columns: view.shape().width }
}

/// Copies an area of a frame to (`gather`) or from a compact copy.
///
/// # Safety
/// `compact` has room for the area, and the view is of host memory.
unsafe fn copy(view: &View, batch: u64, frame: u64, area: Area, order: Order, compact: *mut u8, gather: bool) {
    let element = view.dtype().bytes() as usize;
    let [_, by_channel, _, by_row, by_column] = view.strides().map(|stride| stride as isize);
    let channels = view.shape().channels as usize;
    let (rows, columns) = (area.rows as usize, area.columns as usize);
    let start = view.frame(batch, frame);
    // A run is what lies side by side in both: `steps` runs make a line, `step` elements of the tensor apart.
    let (lines, run, steps, step) = match order {
        Order::Interleaved if by_column == channels as isize => (1, columns * channels, 1, 0),
        Order::Interleaved => (1, channels, columns, by_column),
        Order::Planar if by_column == 1 => (channels, columns, 1, 0),
        Order::Planar => (channels, 1, columns, by_column),
    };
    let bytes = run * element;
    let mut compact = compact;
    for line in 0..lines {
        for y in 0..rows {
            let at =
                line as isize * by_channel + (area.top as isize + y as isize) * by_row + area.left as isize * by_column;
            for s in 0..steps {
                let place = start.wrapping_offset((at + s as isize * step) * element as isize);
                // SAFETY: the view's maker vouches for every element of the frame; the caller for the copy.
                unsafe {
                    if gather {
                        std::ptr::copy_nonoverlapping(place, compact, bytes);
                    } else {
                        std::ptr::copy_nonoverlapping(compact, place, bytes);
                    }
                    compact = compact.add(bytes);
                }
            }
        }
    }
}

fn strided(data: u64, dtype: DType, channels: u64, area: Area, [by_channel, by_row, by_column]: [i64; 3]) -> Strided {
    Strided {
        data,
        by_channel,
        by_row,
        by_column,
        dtype: dtype as u32,
        channels: channels as i32,
        height: area.rows as i32,
        width: area.columns as i32,
    }
}

/// A tensor on the device, from `area` on.
fn in_place(view: &View, batch: u64, frame: u64, area: Area) -> Strided {
    let [_, by_channel, _, by_row, by_column] = view.strides();
    let offset = (area.top as i64 * by_row + area.left as i64 * by_column) * view.dtype().bytes() as i64;
    let data = (view.frame(batch, frame).addr() as u64).wrapping_add_signed(offset);
    strided(data, view.dtype(), view.shape().channels, area, [by_channel, by_row, by_column])
}

/// Whoever made the view vouches for the frames it has, and for no other.
fn check_frame(view: &View, batch: u64, frame: u64) -> Result<()> {
    let shape = view.shape();
    if batch < shape.batch && frame < shape.frames {
        return Ok(());
    }
    Err(Error::Internal(format!("frame {frame} of clip {batch} is not in a tensor {shape}")))
}

fn blocks(pixels: u64) -> [u32; 2] {
    [pixels.div_ceil(256) as u32, 1]
}

impl Cuda {
    pub(super) fn launch_load(&self, on: &On, transfers: &mut Transfers, op: &LoadOp) -> Result<()> {
        check_frame(op.from, op.batch, op.frame)?;
        let host = op.from.shape();
        let (top, left) = (op.top.min(host.height - 1), op.left.min(host.width - 1));
        let rows = (host.height - top).min(op.shape.height);
        let area = Area { top, left, rows, columns: (host.width - left).min(op.shape.width) };
        let from = if op.from.place() == Place::Cpu {
            let order = Order::of(op.from);
            let bytes = area.rows * area.columns * host.channels * op.from.dtype().bytes();
            let staged = on.block.at(op.scratch, bytes)?;
            let (place, free) = transfers.loads.take(bytes)?;
            // SAFETY: the place is as long as asked for, and the tensor is in host memory.
            unsafe { copy(op.from, op.batch, op.frame, area, order, place, true) };
            // SAFETY: both regions are that long; the place is not touched before the event recorded next.
            let answer = unsafe { sys::cuMemcpyHtoDAsync_v2(staged, place.cast(), bytes as usize, on.stream.handle()) };
            check("copying a frame to the GPU", answer)?;
            free.record(on.stream)?;
            strided(staged, op.from.dtype(), host.channels, area, order.strides(host.channels, area))
        } else {
            in_place(op.from, op.batch, op.frame, area)
        };
        let params = LoadParams {
            from,
            into: on.block.at(op.into.0, self.precision.data_bytes(op.shape))?,
            height: op.shape.height as i32,
            width: op.shape.width as i32,
            stride: geometry::input_stride(op.shape.channels) as i32,
            mul: op.map.mul,
            add: op.map.add,
        };
        // SAFETY: the parameters have the kernel's layout; what they point at outlives the stream's work.
        unsafe { self.kernels.load.launch(on.stream, blocks(op.shape.pixels()), 256, &params) }
    }

    pub(super) fn launch_store(&self, on: &On, transfers: &mut Transfers, op: &StoreOp) -> Result<()> {
        check_frame(op.into, op.batch, op.frame)?;
        let (view, area) = (op.into, whole(op.into));
        let shape = view.shape();
        let on_host = view.place() == Place::Cpu;
        let bytes = area.rows * area.columns * shape.channels * view.dtype().bytes();
        let staged = on.block.at(op.scratch, bytes)?;
        let order = Order::of(view);
        let into = if on_host {
            strided(staged, view.dtype(), shape.channels, area, order.strides(shape.channels, area))
        } else {
            in_place(view, op.batch, op.frame, area)
        };
        let [rows, columns] = self.fades(on, op.scratch, op.shape, op.divide)?;
        let (clamp_low, clamp_high) = op.clamp.unwrap_or((f32::NEG_INFINITY, f32::INFINITY));
        let params = StoreParams {
            into,
            from: on.block.at(op.from.0, self.precision.data_bytes(op.shape))?,
            rows,
            columns,
            width: op.shape.width as i32,
            stride: geometry::output_stride(op.shape.channels) as i32,
            channel: op.channel as i32,
            logvar: op.sample.map_or(-1, |sample| sample.logvar_channel as i32),
            clamp_low,
            clamp_high,
            mul: op.map.mul,
            add: op.map.add,
            seed: op.sample.map_or(0, |sample| sample.seed),
            batch: op.batch as u32,
            frame: op.clip_frame as u32,
        };
        // SAFETY: as in `launch_load`.
        unsafe { self.kernels.store.launch(on.stream, blocks(area.rows * area.columns), 256, &params)? };
        if on_host {
            transfers.arrive(transfers.stores.next)?;
            let turn = transfers.stores.next;
            let (place, arrived) = transfers.stores.take(bytes)?;
            // SAFETY: as in `launch_load`; the place is read after the event alone.
            let answer = unsafe { sys::cuMemcpyDtoHAsync_v2(place.cast(), staged, bytes as usize, on.stream.handle()) };
            check("copying a frame to the host", answer)?;
            arrived.record(on.stream)?;
            transfers.arrivals[turn] = Some(Arrival { place, order, into: *view, batch: op.batch, frame: op.frame });
        }
        Ok(())
    }

    pub(super) fn launch_blend(&self, on: &On, op: &BlendOp) -> Result<()> {
        let [rows, columns] = self.fades(on, op.scratch, op.into_shape, Some(op.fade))?;
        let params = BlendParams {
            from: on.block.at(op.from.0, self.precision.data_bytes(op.from_shape))?,
            into: on.block.at(op.into.0, self.precision.data_bytes(op.into_shape))?,
            rows,
            columns,
            height: op.from_shape.height as i32,
            width: op.from_shape.width as i32,
            into_width: op.into_shape.width as i32,
            top: op.top as i32,
            left: op.left as i32,
            stride: geometry::output_stride(op.into_shape.channels) as i32,
            clear: if op.clear { op.into_shape.height as i32 } else { 0 },
        };
        let pixels = if op.clear { op.into_shape.pixels() } else { op.from_shape.pixels() };
        // SAFETY: as in `launch_load`.
        unsafe { self.kernels.blend.launch(on.stream, blocks(pixels), 256, &params) }
    }

    /// Brings fades to the device, behind the staged frame. Null where there are none.
    fn fades(&self, on: &On, scratch: u64, shape: FrameShape, fades: Option<Blend>) -> Result<[u64; 2]> {
        let Some(Blend { rows, columns }) = fades else { return Ok([0, 0]) };
        let first = scratch + geometry::staged_frame_bytes(shape);
        let mut places = [0; 2];
        for (place, (offset, fade)) in places.iter_mut().zip([(0, rows), (shape.height * 4, columns)]) {
            let bytes = size_of_val(fade);
            *place = on.block.at(first + offset, bytes as u64)?;
            // SAFETY: the region is that long. From pageable memory, the driver has taken its copy when it returns.
            let answer = unsafe { sys::cuMemcpyHtoDAsync_v2(*place, fade.as_ptr().cast(), bytes, on.stream.handle()) };
            check("copying fades to the GPU", answer)?;
        }
        Ok(places)
    }
}
