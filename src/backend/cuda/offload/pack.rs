//! Packs weights in the order in which the kernels read them, in the element type of the precision.

use half::{bf16, f16};

use crate::backend::cuda::launch::tiling::{
    PAIR_ROW_BYTES, ROW_BYTES, TILE_CHANNELS, UNIT_BYTES, channel_tiles, tap_order,
};
use crate::error::Result;
use crate::ir::{ConvLayout, ConvSource, Window};
use crate::{reserve, workers};

const UNIT: usize = UNIT_BYTES as usize;

/// A weight in one precision.
pub trait PackedElement: Copy + Send + Sync {
    const ZERO: Self;
    fn round(weight: f32) -> Self;
}

impl PackedElement for f16 {
    const ZERO: f16 = f16::ZERO;
    fn round(weight: f32) -> f16 {
        f16::from_f32(weight)
    }
}

impl PackedElement for bf16 {
    const ZERO: bf16 = bf16::ZERO;
    fn round(weight: f32) -> bf16 {
        bf16::from_f32(weight)
    }
}

impl PackedElement for f32 {
    const ZERO: f32 = 0.0;
    fn round(weight: f32) -> f32 {
        weight
    }
}

/// [phase][channel tile][K block][tap][128 output channels][K block of input channels]. A K block is a row of 128
/// bytes; its 16-byte units are swizzled by the output channel.
pub fn main<E: PackedElement>(window: Window, cin: u64, cout: u64, plain: &[f32]) -> Result<Vec<E>> {
    let (cin, cout) = (cin as usize, cout as usize);
    let (k_block, columns, unit) = (ROW_BYTES as usize / size_of::<E>(), TILE_CHANNELS as usize, UNIT / size_of::<E>());
    let (k_blocks, tiles, phases) = (cin.div_ceil(k_block), cout.div_ceil(columns), window.phases() as usize);
    let taps = tap_order(window);
    let tile_elements = k_block * columns;
    let elements = phases * tiles * k_blocks * taps.len() * tile_elements;
    let mut packed = reserve::filled("packed weights", E::ZERO, elements)?;
    let work: Vec<(usize, &mut [E])> = packed.chunks_mut(taps.len() * tile_elements).enumerate().collect();
    let pack = |(index, into): (usize, &mut [E])| {
        let (phase, tile, first) = (index / k_blocks / tiles, index / k_blocks % tiles, index % k_blocks * k_block);
        for (tap, into) in taps.iter().zip(into.chunks_exact_mut(tile_elements)) {
            let from = &plain[(phase * taps.len() + *tap as usize) * cin * cout..][..cin * cout];
            for k in 0..k_block.min(cin - first) {
                let row = &from[(first + k) * cout + tile * columns..][..columns.min(cout - tile * columns)];
                for (n, value) in row.iter().enumerate() {
                    into[n * k_block + ((k / unit) ^ (n & 7)) * unit + k % unit] = E::round(*value);
                }
            }
        }
    };
    workers::for_each(workers::threads_for(plain.len()), work, || (), |(), tile| pack(tile));
    Ok(packed)
}

/// For pairs of frames: two slabs of 3 x 3 taps side by side, of which this is the first or the second. [channel
/// tile][half of a K block][tap][slab][128 output channels][half of a K block of input channels]. Rows have 64 bytes;
/// their 16-byte units are swizzled by half the output channel.
pub fn pair_slab<E: PackedElement>((cin, cout): (u64, u64), second: bool, plain: &[f32], packed: &mut [E]) {
    let (cin, cout, columns) = (cin as usize, cout as usize, TILE_CHANNELS as usize);
    let (row, unit) = (PAIR_ROW_BYTES as usize / size_of::<E>(), UNIT / size_of::<E>());
    let (steps, taps, slab_elements) = (2 * cin.div_ceil(2 * row), Window::Same.taps() as usize, row * columns);
    let work: Vec<(usize, &mut [E])> = packed.chunks_mut(2 * taps * slab_elements).enumerate().collect();
    let pack = |(index, into): (usize, &mut [E])| {
        let (tile, first) = (index / steps, index % steps * row);
        for (tap, into) in into.chunks_exact_mut(2 * slab_elements).enumerate() {
            let into = &mut into[usize::from(second) * slab_elements..][..slab_elements];
            for k in 0..row.min(cin.saturating_sub(first)) {
                let from =
                    &plain[(tap * cin + first + k) * cout + tile * columns..][..columns.min(cout - tile * columns)];
                for (n, value) in from.iter().enumerate() {
                    into[n * row + ((k / unit) ^ ((n / 2) & 3)) * unit + k % unit] = E::round(*value);
                }
            }
        }
    };
    workers::for_each(workers::threads_for(plain.len()), work, || (), |(), tile| pack(tile));
}

/// For the convolution from pixels: [padded output channel][tap][4].
pub fn conv_in<E: PackedElement>(layout: &ConvLayout, plain: &[f32]) -> Vec<E> {
    let (cin, cout) = (layout.cin as usize, layout.cout as usize);
    let mut packed = vec![E::ZERO; (channel_tiles(layout) * TILE_CHANNELS) as usize * 9 * 4];
    for (at, value) in plain.iter().enumerate() {
        let (tap, c, n) = (at / cout / cin, at / cout % cin, at % cout);
        packed[(n * 9 + tap) * 4 + c] = E::round(*value);
    }
    packed
}

/// For the convolution to pixels: fragments of a matrix product with tap x output as columns, [group of 64 bytes of
/// channels][product][lane] [block of 8 columns][half][4 bytes of channels]. Lane 4 n + t holds, of column n of a
/// block, the t-th 16 bytes of a group's channels, 8 of them a product.
pub fn conv_out<E: PackedElement>(layout: &ConvLayout, plain: &[f32]) -> Vec<E> {
    let (cin, cout) = (layout.cin as usize, layout.cout as usize);
    let (unit, word) = (UNIT / size_of::<E>(), 4 / size_of::<E>());
    let group = 4 * unit;
    let mut packed = vec![E::ZERO; cin.div_ceil(group) * group * 32];
    for (at, value) in plain.iter().enumerate() {
        let (tap, c, o) = (at / cout / cin, at / cout % cin, at % cout);
        let (column, t, within) = (tap * 3 + o, c % group / unit, c % unit);
        let (product, half, e) = (within / word / 2, within / word % 2, within % word);
        let (block, n) = (column / 8, column % 8);
        packed[((((c / group * 2 + product) * 32 + 4 * n + t) * 4 + block) * 2 + half) * word + e] = E::round(*value);
    }
    packed
}

/// [bias][phase][edge][padded output channel].
pub fn biases(layout: &ConvLayout, source: &mut dyn ConvSource) -> Vec<f32> {
    let (cout, padded) = (layout.cout as usize, (channel_tiles(layout) * TILE_CHANNELS) as usize);
    let mut plain = vec![0.0; layout.bias_elements() as usize];
    let mut packed = Vec::new();
    for bias in 0..layout.biases {
        source.bias(bias, &mut plain);
        for vector in plain.chunks_exact(cout) {
            packed.extend_from_slice(vector);
            packed.resize(packed.len() + padded - cout, 0.0);
        }
    }
    packed
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::Prologue;

    /// Weights that are their own index, counted from 1.
    fn numbered(count: usize) -> Vec<f32> {
        (1..=count).map(|i| i as f32).collect()
    }

    fn layout(cin: u64, cout: u64, window: Window) -> ConvLayout {
        ConvLayout {
            cin,
            cout,
            window,
            prologue: Prologue::None,
            slabs: 1,
            shortcut: None,
            biases: 1,
            groups: 1,
            pairs: false,
        }
    }

    fn assert_each_once(packed: &[f32], count: usize) {
        let mut found: Vec<f32> = packed.iter().copied().filter(|w| *w != 0.0).collect();
        found.sort_by(f32::total_cmp);
        assert_eq!(found, numbered(count));
    }

    #[test]
    fn packing_keeps_every_weight_once() {
        for window in [Window::Point, Window::Same, Window::Down, Window::Up] {
            let (cin, cout) = (40, 136);
            let count = (window.taps() * cin * cout) as usize;
            let packed = main::<f32>(window, cin, cout, &numbered(count)).unwrap();
            assert_eq!(packed.len() as u64, window.taps() * 2 * 2 * TILE_CHANNELS * 32);
            assert_each_once(&packed, count);
        }
        let (cin, cout, count) = (40, 136, 9 * 40 * 136);
        let mut pair = vec![0.0f32; 2 * 4 * 9 * 2 * 16 * 128];
        pair_slab((cin, cout), false, &numbered(count), &mut pair);
        let later: Vec<f32> = numbered(2 * count)[count..].to_vec();
        pair_slab((cin, cout), true, &later, &mut pair[..]);
        assert_each_once(&pair, 2 * count);
        let pixels = layout(3, 20, Window::Same);
        assert_each_once(&conv_in::<f32>(&pixels, &numbered(9 * 3 * 20)), 9 * 3 * 20);
        let pixels = layout(40, 3, Window::Same);
        assert_each_once(&conv_out::<f32>(&pixels, &numbered(9 * 40 * 3)), 9 * 40 * 3);
    }

    /// As ldmatrix reads them, for every element type.
    #[test]
    fn packing_swizzles_rows_by_units() {
        fn unit_of<E: PackedElement + PartialEq>(k: usize, n: usize) -> usize {
            let mut plain = vec![0.0; 64 * 128];
            plain[k * 128 + n] = 1.0;
            let packed = main::<E>(Window::Point, 64, 128, &plain).unwrap();
            packed.iter().position(|w| *w == E::round(1.0)).unwrap() * size_of::<E>() / UNIT
        }
        // 8 units an output channel.
        assert_eq!(unit_of::<f16>(17, 5), 5 * 8 + (2 ^ 5));
        assert_eq!(unit_of::<bf16>(17, 5), 5 * 8 + (2 ^ 5));
        assert_eq!(unit_of::<f32>(17, 5), 5 * 8 + (4 ^ 5));
        assert_eq!(unit_of::<f32>(32 + 17, 5), 128 * 8 + 5 * 8 + (4 ^ 5), "the second K block");
    }
}
