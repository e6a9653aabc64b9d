//! A checked, strided view of memory that somebody else owns.

use std::fmt;
use std::ops::Range;

use super::{AXES, DType, Shape};
use crate::error::{Error, Result};

/// Where a tensor's memory lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TensorDevice {
    Cpu,
    Cuda(u32),
    /// By its place in the loader's list. No tensor of a host lies there.
    Vulkan(u32),
}

impl fmt::Display for TensorDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TensorDevice::Cpu => write!(f, "cpu"),
            TensorDevice::Cuda(index) => write!(f, "cuda:{index}"),
            TensorDevice::Vulkan(index) => write!(f, "vulkan:{index}"),
        }
    }
}

/// Element (b, c, t, h, w) lies at `data + sum(index * stride)` elements. Whoever makes a view vouches that all of
/// them do, for as long as the view is used.
#[derive(Debug, Clone, Copy)]
pub struct View {
    data: *mut u8,
    dtype: DType,
    device: TensorDevice,
    shape: Shape,
    strides: [i64; 5],
}

// SAFETY: a view is an address with a shape; the threads that dereference it are those of the one call it was made for,
// and the maker vouches for the memory during that call.
unsafe impl Send for View {}
// SAFETY: as above; concurrent writers write disjoint elements, which `checked` makes sure exist (no zero strides).
unsafe impl Sync for View {}

impl View {
    /// Checks everything that can be checked about a view without touching its memory. `name` is what error messages
    /// call it; `writable` refuses layouts in which two elements share an address.
    pub fn checked(
        name: &str,
        data: *mut u8,
        dtype: DType,
        device: TensorDevice,
        shape: Shape,
        strides: Option<[i64; 5]>,
        writable: bool,
    ) -> Result<View> {
        let fail = |why: String| Err(Error::Tensor(format!("{name}: {why}")));
        if data.is_null() {
            return fail("data is null; it must point to the tensor's memory".into());
        }
        if !(data.addr() as u64).is_multiple_of(dtype.bytes()) {
            return fail(format!("data is not aligned to its element type {} ({} bytes)", dtype.name(), dtype.bytes()));
        }
        let dims = shape.dims();
        if let Some(axis) = dims.iter().position(|d| *d == 0) {
            return fail(format!("shape {shape} is empty: {} is 0", AXES[axis]));
        }
        let compact = compact_strides(dims).filter(|_| dims.iter().all(|d| *d <= i64::MAX as u64));
        let Some(compact) = compact else {
            return fail(format!("shape {shape} has more elements than can be addressed"));
        };
        let strides = strides.unwrap_or(compact);
        if !span_fits(dims, strides, dtype.bytes()) {
            return fail(format!("strides {strides:?} with shape {shape} reach further than can be addressed"));
        }
        if writable && overlaps(dims, strides) {
            return fail(format!(
                "strides {strides:?} with shape {shape} make elements overlap, so it cannot be written"
            ));
        }
        Ok(View { data, dtype, device, shape, strides })
    }

    pub fn dtype(&self) -> DType {
        self.dtype
    }

    pub fn device(&self) -> TensorDevice {
        self.device
    }

    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Strides in elements, in the order of [`AXES`].
    pub fn strides(&self) -> [i64; 5] {
        self.strides
    }

    /// The address of frame `frame` of clip `batch`, channel 0, row 0, column 0.
    pub fn frame(&self, batch: u64, frame: u64) -> *mut u8 {
        debug_assert!(batch < self.shape.batch && frame < self.shape.frames);
        let elements = batch as i64 * self.strides[0] + frame as i64 * self.strides[2];
        self.data.wrapping_offset(elements as isize * self.dtype.bytes() as isize)
    }

    /// Some of its frames.
    pub fn frames(&self, of: Range<u64>) -> View {
        let shape = Shape { frames: of.end - of.start, ..self.shape };
        View { data: self.frame(0, of.start), shape, ..*self }
    }

    /// Some of its clips.
    pub fn clips(&self, of: Range<u64>) -> View {
        let shape = Shape { batch: of.end - of.start, ..self.shape };
        View { data: self.frame(of.start, 0), shape, ..*self }
    }
}

fn compact_strides(dims: [u64; 5]) -> Option<[i64; 5]> {
    let mut strides = [0i64; 5];
    let mut step: u64 = 1;
    for axis in (0..5).rev() {
        strides[axis] = i64::try_from(step).ok()?;
        step = step.checked_mul(dims[axis])?;
    }
    i64::try_from(step.checked_mul(8)?).ok()?;
    Some(strides)
}

/// Whether the furthest elements, in both directions, lie within the address space.
fn span_fits(dims: [u64; 5], strides: [i64; 5], element: u64) -> bool {
    let reach = dims.iter().zip(strides).try_fold(0i64, |sum, (dim, stride)| {
        let last = i64::try_from(dim - 1).ok()?;
        sum.checked_add(stride.checked_abs()?.checked_mul(last)?)
    });
    reach.and_then(|r| r.checked_mul(element as i64)).is_some()
}

/// Sorted by stride, each axis must step past everything the smaller ones cover. Exact for every layout that comes
/// from permuting, slicing or padding a compact one.
fn overlaps(dims: [u64; 5], strides: [i64; 5]) -> bool {
    let mut axes: Vec<(u64, u64)> =
        dims.iter().zip(strides).filter(|(d, _)| **d > 1).map(|(d, s)| (s.unsigned_abs(), *d)).collect();
    axes.sort_unstable();
    let mut covered: u64 = 1;
    for (stride, dim) in axes {
        if stride < covered {
            return true;
        }
        covered = covered.saturating_add(stride.saturating_mul(dim - 1));
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_begin_at_their_first_frame() {
        let (data, shape) = (std::ptr::without_provenance_mut(64), Shape::new(4, 3, 5, 8, 6));
        let v = View::checked("video", data, DType::F32, TensorDevice::Cpu, shape, None, true).unwrap();
        let part = v.clips(1..3).frames(2..5);
        assert_eq!((part.shape(), part.strides()), (Shape::new(2, 3, 3, 8, 6), v.strides()));
        assert_eq!(part.frame(1, 2), v.frame(2, 4));
    }
}
