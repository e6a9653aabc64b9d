//! A tensor in the file: reads some of its values as f32 or f64, and finds values that are not finite.

use half::f16;
use half::slice::HalfFloatSliceExt;

use super::source::Source;
use crate::error::Result;
use crate::ir::DType;
use crate::reserve;

/// A tensor of an open checkpoint. Its values stay in the file until they are read.
#[derive(Debug, Clone, Copy)]
pub struct FileTensor<'a> {
    pub dtype: DType,
    pub shape: &'a [u64],
    pub(super) file: &'a Source,
    /// Where in the file it begins.
    pub(super) start: u64,
}

const AT_ONCE: usize = 512;

impl FileTensor<'_> {
    pub fn elements(&self) -> usize {
        self.shape.iter().product::<u64>() as usize
    }

    /// Reads the values from element `first` on. Exact for every type. `bytes` is a buffer, for values as the file has
    /// them, little-endian and unaligned.
    pub fn read(&self, first: usize, bytes: &mut Vec<u8>, into: &mut [f32]) -> Result<()> {
        let size = self.dtype.bytes();
        let bytes = reserve::grown("tensors as read", bytes, into.len() * size as usize)?;
        self.file.read(bytes, self.start + first as u64 * size).map_err(|why| self.file.fail(why))?;
        widen(self.dtype, bytes, into);
        Ok(())
    }

    /// The first values in f64. For small tensors.
    pub fn read_f64(&self, into: &mut [f64]) -> Result<()> {
        let mut single = reserve::filled("folding", 0.0, into.len())?;
        self.read(0, &mut Vec::new(), &mut single)?;
        into.iter_mut().zip(single).for_each(|(to, value)| *to = f64::from(value));
        Ok(())
    }

    #[cfg(test)]
    pub fn read_all(&self) -> Result<Vec<f64>> {
        let mut values = vec![0.0; self.elements()];
        self.read_f64(&mut values).map(|()| values)
    }
}

fn widen(dtype: DType, bytes: &[u8], into: &mut [f32]) {
    match dtype {
        DType::F32 => {
            for (value, bits) in into.iter_mut().zip(words(bytes)) {
                *value = f32::from_bits(bits);
            }
        }
        DType::BF16 => {
            for (value, bits) in into.iter_mut().zip(half_words(bytes)) {
                *value = f32::from_bits(u32::from(bits) << 16);
            }
        }
        DType::F16 => {
            // The processor converts aligned values only.
            let mut aligned = [f16::ZERO; AT_ONCE];
            for (values, bytes) in into.chunks_mut(AT_ONCE).zip(bytes.chunks(2 * AT_ONCE)) {
                for (value, bits) in aligned.iter_mut().zip(half_words(bytes)) {
                    *value = f16::from_bits(bits);
                }
                aligned[..values.len()].convert_to_f32_slice(values);
            }
        }
        DType::U8 | DType::U16 => unreachable!("the header admits floats only"),
    }
}

/// The first element that is infinite or NaN, and its value.
pub(super) fn first_non_finite(dtype: DType, bytes: &[u8]) -> Option<(usize, f32)> {
    // Adding one to the exponent carries into the sign exactly where the exponent is all ones.
    let suspicious = |bytes: &[u8]| match dtype {
        DType::F32 => words(bytes).fold(0, |all, bits| all | ((bits & 0x7fff_ffff) + 0x0080_0000)) >> 31 != 0,
        DType::BF16 => half_words(bytes).fold(0, |all, bits| all | ((bits & 0x7fff) + 0x0080)) >> 15 != 0,
        _ => half_words(bytes).fold(0, |all, bits| all | ((bits & 0x7fff) + 0x0400)) >> 15 != 0,
    };
    let size = dtype.bytes() as usize;
    let chunk = bytes.chunks(size * AT_ONCE).position(suspicious)?;
    let mut values = bytes.chunks_exact(size).enumerate().skip(chunk * AT_ONCE).map(|(element, bytes)| {
        let mut value = [0.0];
        widen(dtype, bytes, &mut value);
        (element, value[0])
    });
    values.find(|(_, value)| !value.is_finite())
}

fn words(bytes: &[u8]) -> impl Iterator<Item = u32> {
    bytes.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b))
}

fn half_words(bytes: &[u8]) -> impl Iterator<Item = u16> {
    bytes.as_chunks().0.iter().map(|b| u16::from_le_bytes(*b))
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    #[test]
    fn halves_are_widened_exactly_and_classified() {
        let all: Vec<u8> = std::iter::once(0).chain((0..=u16::MAX).flat_map(u16::to_le_bytes)).collect();
        type Widen = fn(u16) -> f32;
        let types: [(DType, Widen); 2] =
            [(DType::F16, |b| f16::from_bits(b).to_f32()), (DType::BF16, |b| bf16::from_bits(b).to_f32())];
        for (dtype, expected) in types {
            // One byte in, so that nothing is aligned.
            let bytes = &all[1..];
            let mut values = vec![0.0; 1 << 16];
            widen(dtype, bytes, &mut values);
            for (bits, value) in (0..=u16::MAX).zip(values) {
                let right = expected(bits);
                assert!(value.to_bits() == right.to_bits() || value.is_nan() && right.is_nan(), "{dtype:?} {bits:#x}");
                let alone = &bytes[2 * usize::from(bits)..][..2];
                assert_eq!(first_non_finite(dtype, alone).is_none(), right.is_finite(), "{dtype:?} {bits:#x}");
            }
        }
    }

    #[test]
    fn first_non_finite_finds_a_single_value() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in [0, 511, 512, 1299] {
                let mut values = vec![f32::MAX; 1300];
                values[at] = bad;
                let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
                assert_eq!(first_non_finite(DType::F32, &bytes).map(|(element, _)| element), Some(at));
            }
        }
    }
}
