//! Two tensors of one shape as rows of bytes that lie alike in both. Touches no memory.

use super::View;
use crate::error::Result;

/// Rows of `width` bytes, `height` of them, each a pitch after the one before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rows {
    pub from: usize,
    pub to: usize,
    pub width: usize,
    pub height: usize,
    pub from_pitch: isize,
    pub to_pitch: isize,
}

/// One axis of both tensors, in bytes.
#[derive(Clone, Copy)]
struct CopyAxis {
    length: u64,
    from: i64,
    to: i64,
}

/// Calls `copy` for all rows of two tensors: few long ones where their layouts agree.
pub fn each_rows(from: &View, to: &View, mut copy: impl FnMut(&Rows) -> Result<()>) -> Result<()> {
    let element = from.dtype().bytes() as i64;
    // The host vouches for both memories.
    let (mut from_start, mut to_start) = (from.frame(0, 0).expose_provenance(), to.frame(0, 0).expose_provenance());
    let mut axes: Vec<CopyAxis> = Vec::new();
    for (length, (a, b)) in from.shape().dims().into_iter().zip(from.strides().into_iter().zip(to.strides())) {
        let (mut axis, last) = (CopyAxis { length, from: a * element, to: b * element }, length as i64 - 1);
        if axis.to < 0 {
            // Backwards in both, so that rows of the output run upwards.
            from_start = from_start.wrapping_add_signed((axis.from * last) as isize);
            to_start = to_start.wrapping_add_signed((axis.to * last) as isize);
            (axis.from, axis.to) = (-axis.from, -axis.to);
        }
        if length > 1 {
            axes.push(axis);
        }
    }
    axes.sort_by_key(|axis| axis.to);
    let (mut width, mut outer): (i64, Vec<CopyAxis>) = (element, Vec::new());
    for axis in axes {
        match outer.last_mut() {
            None if axis.from == width && axis.to == width => width *= axis.length as i64,
            Some(last) if follows(last, &axis) => last.length *= axis.length,
            _ => outer.push(axis),
        }
    }
    let rows = if outer.is_empty() { CopyAxis { length: 1, from: 0, to: 0 } } else { outer.remove(0) };
    let count: u64 = outer.iter().map(|axis| axis.length).product();
    for number in 0..count {
        let (mut left, mut from, mut to) = (number, from_start, to_start);
        for axis in &outer {
            let at = (left % axis.length) as i64;
            left /= axis.length;
            from = from.wrapping_add_signed((at * axis.from) as isize);
            to = to.wrapping_add_signed((at * axis.to) as isize);
        }
        let (from_pitch, to_pitch) = (rows.from as isize, rows.to as isize);
        copy(&Rows { from, to, width: width as usize, height: rows.length as usize, from_pitch, to_pitch })?;
    }
    Ok(())
}

/// Whether an axis goes on where another one ends, in both tensors.
fn follows(inner: &CopyAxis, outer: &CopyAxis) -> bool {
    let length = inner.length as i64;
    outer.from == inner.from * length && outer.to == inner.to * length
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::{DType, TensorDevice};

    #[test]
    fn equal_layouts_have_few_rows() {
        let count = |strides| {
            let data = std::ptr::without_provenance_mut(64);
            let (shape, mut calls) = ([2, 3, 4, 5, 6].into(), 0);
            let view = View::checked("t", data, DType::U16, TensorDevice::Cpu, shape, Some(strides), false).unwrap();
            let counted = each_rows(&view, &view, |_| {
                calls += 1;
                Ok(())
            });
            counted.map(|()| calls)
        };
        assert_eq!(count([360, 120, 30, 6, 1]), Ok(1), "compact");
        assert_eq!(count([360, 1, 90, 18, 3]), Ok(1), "interleaved");
        assert_eq!(count([1000, 240, 30, 6, 1]), Ok(2), "padded clips");
    }
}
