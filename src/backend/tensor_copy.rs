//! Copies tensors, element for element: between layouts, and between host memory and a device. Knows no activations.

use crate::error::{Error, Result};
use crate::ir::{TensorDevice, View, each_rows};

/// Copies every element of `from` to its place in `to`, which has the same shape and type. Waits until it is done.
pub fn copy(from: &View, to: &View) -> Result<()> {
    if from.shape() != to.shape() || from.dtype() != to.dtype() {
        return Err(Error::Internal(format!("a copy from a tensor {} to one of {}", from.shape(), to.shape())));
    }
    match (from.device(), to.device()) {
        (TensorDevice::Cpu, TensorDevice::Cpu) => {
            each_rows(from, to, |rows| {
                for row in 0..rows.height as isize {
                    let from =
                        std::ptr::with_exposed_provenance::<u8>(rows.from).wrapping_offset(row * rows.from_pitch);
                    let to = std::ptr::with_exposed_provenance_mut::<u8>(rows.to).wrapping_offset(row * rows.to_pitch);
                    // SAFETY: whole elements of both views, which share no byte.
                    unsafe { from.copy_to_nonoverlapping(to, rows.width) };
                }
                Ok(())
            })
        }
        #[cfg(feature = "cuda")]
        (TensorDevice::Cuda(index), TensorDevice::Cpu) => {
            let copies = super::cuda::HostCopies::new(index)?;
            let copied = each_rows(from, to, |rows| copies.to_host(rows));
            // Also after a failure: nothing may touch the tensors any more.
            copies.finish().and(copied)
        }
        #[cfg(feature = "cuda")]
        (TensorDevice::Cpu, TensorDevice::Cuda(index)) => {
            let copies = super::cuda::HostCopies::new(index)?;
            let copied = each_rows(from, to, |rows| copies.from_host(rows));
            copies.finish().and(copied)
        }
        (from, to) => Err(Error::Internal(format!("a copy from {from} to {to}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::DType;

    const SHAPE: [u64; 5] = [2, 3, 4, 5, 6];
    const COMPACT: [i64; 5] = [360, 120, 30, 6, 1];
    const INTERLEAVED: [i64; 5] = [360, 1, 90, 18, 3];

    fn view(data: &mut [u16], start: usize, strides: [i64; 5]) -> View {
        let data = data[start..].as_mut_ptr().cast();
        View::checked("t", data, DType::U16, TensorDevice::Cpu, SHAPE.into(), Some(strides), false).unwrap()
    }

    fn at(index: usize, start: usize, strides: [i64; 5]) -> usize {
        let [_, c, t, h, w] = SHAPE.map(|length| length as usize);
        let index = [index / (c * t * h * w), index / (t * h * w) % c, index / (h * w) % t, index / w % h, index % w];
        let offset: i64 = index.iter().zip(strides).map(|(i, stride)| *i as i64 * stride).sum();
        start.wrapping_add_signed(offset as isize)
    }

    #[test]
    fn every_element_finds_its_place_in_any_layout() {
        let padded = [1000, 240, 50, 8, 1];
        let upwards = [360, 120, 30, -6, 1];
        let backwards = [-360, 120, -30, 6, -1];
        let apart = [3000, 1000, 200, 30, 4];
        let layouts = [(COMPACT, 0), (INTERLEAVED, 0), (padded, 3), (upwards, 24), (backwards, 455), (apart, 1)];
        let repeated = ([0, 1, 0, 18, 3], 0);
        for (from_strides, from_start) in layouts.into_iter().chain([repeated]) {
            for (to_strides, to_start) in layouts {
                let mut source: Vec<u16> = (0..8000).collect();
                let mut target = vec![u16::MAX; 8000];
                let from = view(&mut source, from_start, from_strides);
                copy(&from, &view(&mut target, to_start, to_strides)).unwrap();
                let mut expected = vec![u16::MAX; 8000];
                for i in 0..720 {
                    expected[at(i, to_start, to_strides)] = source[at(i, from_start, from_strides)];
                }
                assert!(target == expected, "{from_strides:?} to {to_strides:?}");
            }
        }
    }
}
