//! Frames that a fleet keeps in host memory: those of a stream, and parts of tensors that a member's device cannot
//! reach.

use std::ops::Range;

use crate::backend::copy_tensor;
use crate::error::{Error, Result};
use crate::exec::Call;
use crate::ir::{DType, Shape, TensorDevice, View};

/// Frames in host memory, one after the other.
pub struct Frames {
    /// Wide elements, so that the memory is aligned for every type.
    memory: Vec<u64>,
    view: Option<View>,
    dtype: DType,
    /// Without frames.
    shape: Shape,
    strides: [i64; 5],
}

impl Frames {
    /// No frames, of the type, size and order of axes of `like`: copies from it and to it have long rows.
    pub fn like(like: &View) -> Frames {
        let (shape, mut strides) = (like.shape(), [0; 5]);
        let mut axes = [0, 1, 3, 4];
        axes.sort_by_key(|axis| like.strides()[*axis].unsigned_abs());
        // The time axis is outermost.
        let mut step = 1;
        for axis in axes.into_iter().chain([2]) {
            strides[axis] = step as i64;
            step *= shape.dims()[axis];
        }
        Frames { memory: Vec::new(), view: None, dtype: like.dtype(), shape: Shape { frames: 0, ..shape }, strides }
    }

    /// So many frames like those of `like`.
    pub fn of(count: u64, like: &View) -> Result<Frames> {
        let mut frames = Frames::like(like);
        frames.grow(count)?;
        Ok(frames)
    }

    pub fn count(&self) -> u64 {
        self.shape.frames
    }

    pub fn bytes(&self) -> u64 {
        8 * self.memory.capacity() as u64
    }

    /// Takes memory for `count` frames in all.
    pub fn reserve(&mut self, count: u64) -> Result<()> {
        let words = (count * self.frame_bytes()).div_ceil(8) as usize;
        let refused = |_| Error::Memory(format!("{} bytes of host memory for frames are not there", 8 * words));
        self.memory.try_reserve_exact(words.saturating_sub(self.memory.len())).map_err(refused)
    }

    /// Has `count` frames from now on. Those that are there stay.
    pub fn grow(&mut self, count: u64) -> Result<()> {
        self.reserve(count)?;
        let words = (count * self.frame_bytes()).div_ceil(8) as usize;
        self.memory.resize(words.max(self.memory.len()), 0);
        self.shape.frames = count;
        let (data, shape) = (self.memory.as_mut_ptr().cast(), self.shape);
        self.view = match count {
            0 => None,
            _ => Some(View::checked("frames", data, self.dtype, TensorDevice::Cpu, shape, Some(self.strides), true)?),
        };
        Ok(())
    }

    /// Has these frames too from now on. A failure changes nothing.
    pub fn append(&mut self, view: &View) -> Result<()> {
        let first = self.count();
        self.grow(first + view.shape().frames)?;
        let copied = self.view(first..self.count()).and_then(|own| copy_tensor(view, &own));
        copied.or_else(|why| self.grow(first).and(Err(why)))
    }

    fn frame_bytes(&self) -> u64 {
        self.strides[2].unsigned_abs() * self.dtype.bytes()
    }

    pub fn all(&self) -> Result<View> {
        self.view(0..self.count())
    }

    pub fn view(&self, frames: Range<u64>) -> Result<View> {
        let all = self.view.filter(|view| frames.start < frames.end && frames.end <= view.shape().frames);
        all.map(|view| view.frames(frames)).ok_or_else(|| Error::Internal("frames that are not kept".into()))
    }

    /// Drops frames from the front.
    pub fn drop_front(&mut self, count: u64) -> Result<()> {
        let left = self.count() - count;
        if let (1.., 1..) = (count, left) {
            let (from, bytes) = ((count * self.frame_bytes()) as usize, (left * self.frame_bytes()) as usize);
            let memory = self.memory.as_mut_ptr().cast::<u8>();
            // SAFETY: both are within the memory of all frames.
            unsafe { memory.add(from).copy_to(memory, bytes) };
        }
        self.grow(left)
    }

    /// Whether it can hold frames of `view`.
    pub fn is_like(&self, view: &View) -> bool {
        (self.dtype, self.shape) == (view.dtype(), Shape { frames: self.shape.frames, ..view.shape() })
    }

    pub fn describe(&self) -> String {
        let Shape { height, width, .. } = self.shape;
        format!("{} of {width} x {height}", self.dtype.name())
    }
}

/// A call whose tensors a device can reach. What lies on another device is copied through host memory.
pub struct NearCall {
    pub call: Call,
    /// Copies of outputs, with where they go.
    outputs: Vec<(Frames, View)>,
    _input: Option<Frames>,
}

impl NearCall {
    pub fn new(call: Call, place: TensorDevice) -> Result<NearCall> {
        let mut near = NearCall { call, outputs: Vec::new(), _input: None };
        let is_far = |view: &View| view.device() != TensorDevice::Cpu && view.device() != place;
        if is_far(&call.input) {
            let mut frames = Frames::like(&call.input);
            frames.append(&call.input)?;
            (near.call.input, near._input) = (frames.all()?, Some(frames));
        }
        for view in [Some(&mut near.call.into.output), near.call.into.logvar.as_mut()].into_iter().flatten() {
            if is_far(view) {
                let frames = Frames::of(view.shape().frames, view)?;
                let own = frames.all()?;
                near.outputs.push((frames, std::mem::replace(view, own)));
            }
        }
        Ok(near)
    }

    /// Copies outputs to where they belong.
    pub fn write_back(&self) -> Result<()> {
        self.outputs.iter().try_for_each(|(frames, to)| copy_tensor(&frames.all()?, to))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_keep_their_values_when_others_are_dropped() {
        let mut source: Vec<u16> = (0..2 * 3 * 5 * 4).collect();
        // Interleaved: channels innermost.
        let (shape, strides) = (Shape::new(1, 3, 10, 2, 2), [120, 1, 12, 6, 3]);
        let data = source.as_mut_ptr().cast();
        let view = View::checked("t", data, DType::U16, TensorDevice::Cpu, shape, Some(strides), true).unwrap();
        let mut frames = Frames::like(&view);
        assert!(frames.is_like(&view.frames(2..5)) && frames.view(0..1).is_err());
        frames.grow(6).unwrap();
        copy_tensor(&view.frames(0..6), &frames.view(0..6).unwrap()).unwrap();
        frames.drop_front(4).unwrap();
        frames.grow(5).unwrap();
        copy_tensor(&view.frames(6..9), &frames.view(2..5).unwrap()).unwrap();
        let mut found = vec![0u16; 120];
        let data = found.as_mut_ptr().cast();
        let copy = View::checked("t", data, DType::U16, TensorDevice::Cpu, shape, Some(strides), true).unwrap();
        copy_tensor(&frames.view(0..5).unwrap(), &copy.frames(4..9)).unwrap();
        assert_eq!(found[48..108], source[48..108]);
        frames.drop_front(5).unwrap();
        assert_eq!((frames.count(), frames.view(0..1).is_err()), (0, true));
    }
}
