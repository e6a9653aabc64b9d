//! Packs weights in the order in which the kernels read them, in the element type of the precision.

use std::ops::Range;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::backend::cuda::launch::tiling::{
    COLUMN_PAIR_ROWS, COLUMN_PAIR_TAPS, ConvKernel, PAIR_ROW_BYTES, TILE_CHANNELS, TileWidths, UNIT_BYTES, WeightOrder,
    channel_tiles, padded_outputs, tap_order,
};
use crate::error::Result;
use crate::ir::{ConvLayout, WeightBlock, WeightPart, Window};

const UNIT: usize = UNIT_BYTES as usize;
/// Output channels of a tile at most.
const MOST_COLUMNS: usize = TILE_CHANNELS as usize;
/// Input channels of a part: whole K blocks in every precision, few enough to stay in cache.
const PART_INPUTS: u64 = 64;

/// A weight in one precision.
pub trait PackedElement: Copy + Default + Send + Sync {
    fn round(weight: f32) -> Self;
    fn round_all(weights: &[f32], into: &mut [Self]) {
        into.iter_mut().zip(weights).for_each(|(to, weight)| *to = Self::round(*weight));
    }
    fn buffer(buffers: &mut PackBuffers) -> &mut Vec<Self>;
}

/// A thread's packed part, in one of the precisions.
#[derive(Default)]
pub struct PackBuffers {
    fp16: Vec<f16>,
    bf16: Vec<bf16>,
    fp32: Vec<f32>,
}

impl PackedElement for f16 {
    fn round(weight: f32) -> f16 {
        f16::from_f32(weight)
    }
    // The processor converts several at a time.
    fn round_all(weights: &[f32], into: &mut [f16]) {
        into.convert_from_f32_slice(weights);
    }
    fn buffer(buffers: &mut PackBuffers) -> &mut Vec<f16> {
        &mut buffers.fp16
    }
}

impl PackedElement for bf16 {
    fn round(weight: f32) -> bf16 {
        bf16::from_f32(weight)
    }
    fn buffer(buffers: &mut PackBuffers) -> &mut Vec<bf16> {
        &mut buffers.bf16
    }
}

impl PackedElement for f32 {
    fn round(weight: f32) -> f32 {
        weight
    }
    fn buffer(buffers: &mut PackBuffers) -> &mut Vec<f32> {
        &mut buffers.fp32
    }
}

/// The parts in which the weights of a convolution are written.
pub fn parts(layout: &ConvLayout) -> Vec<WeightPart> {
    let blocks = match ConvKernel::of(layout) {
        Ok(ConvKernel::In | ConvKernel::Out) => WeightBlock::all(layout, layout.cin, layout.cout),
        _ => WeightBlock::all(layout, PART_INPUTS, TileWidths::of(layout).columns),
    };
    std::iter::once(WeightPart::Vectors).chain(blocks.into_iter().map(WeightPart::Block)).collect()
}

/// How a block of weights is packed: one of [`parts`].
pub struct BlockPacking<'a> {
    layout: &'a ConvLayout,
    block: &'a WeightBlock,
    kernel: ConvKernel,
    order: WeightOrder,
    widths: TileWidths,
    window: Window,
    /// Whether the kernel computes pairs of columns.
    in_columns: bool,
    /// Bytes of an element.
    element: usize,
    /// Packed elements of the block of a slab.
    pub slab_elements: usize,
}

impl<'a> BlockPacking<'a> {
    pub fn new<E: PackedElement>(
        layout: &'a ConvLayout,
        block: &'a WeightBlock,
        order: WeightOrder,
    ) -> Result<BlockPacking<'a>> {
        let (kernel, element, widths) = (ConvKernel::of(layout)?, size_of::<E>(), TileWidths::of(layout));
        let window = if block.shortcut { Window::Point } else { layout.window };
        let in_columns = !block.shortcut && order == WeightOrder::ColumnPairs;
        let taps = if in_columns { COLUMN_PAIR_TAPS } else { window.taps() };
        let slab_elements = match kernel {
            ConvKernel::In => conv_in_elements(layout),
            ConvKernel::Out => conv_out_elements::<E>(layout),
            ConvKernel::Main => {
                let rows = block.rows().next_multiple_of(widths.k_block(element as u64));
                (taps * rows * widths.columns) as usize
            }
        };
        Ok(BlockPacking { layout, block, kernel, order, widths, window, in_columns, element, slab_elements })
    }

    /// Sums of a tile that have weights of their own, and the taps of all.
    fn parts_and_taps(&self) -> (u64, u64) {
        match self.kernel {
            _ if self.in_columns => (2, COLUMN_PAIR_TAPS),
            ConvKernel::Main => (self.window.phases(), self.window.taps()),
            ConvKernel::In | ConvKernel::Out => (1, self.window.taps()),
        }
    }

    /// Whether the slab lies side by side with another one.
    fn is_paired(&self, slab: u64) -> bool {
        self.layout.pairs.is_some_and(|pairs| pairs.contains(slab))
    }

    /// Packs a slab of the block. `packed` holds all of them and is 0 where nothing was packed.
    pub fn pack<E: PackedElement>(&self, slab: u64, plain: &[f32], packed: &mut [E]) {
        let slab = slab - self.block.slabs(self.layout).start;
        let at = slab as usize * self.slab_elements;
        let (rows, columns) = (self.block.rows() as usize, self.block.columns() as usize);
        let tiles = MainTiles { order: self.order, window: self.window, widths: self.widths };
        match self.kernel {
            ConvKernel::In => conv_in(self.layout, plain, &mut packed[at..][..self.slab_elements]),
            ConvKernel::Out => conv_out(self.layout, plain, &mut packed[at..][..self.slab_elements]),
            ConvKernel::Main if !self.block.shortcut && self.is_paired(slab) => {
                let first = (slab - slab % 2) as usize * self.slab_elements;
                let packed = &mut packed[first..][..2 * self.slab_elements];
                let taps = (self.window.side() * self.window.side()) as usize;
                tiles.pack_paired(rows, columns, taps, slab % 2 == 1, plain, packed);
            }
            ConvKernel::Main if self.in_columns => {
                let (taps, half) = (COLUMN_PAIR_ROWS as usize, self.slab_elements / 2);
                for (index, packed) in packed[at..][..self.slab_elements].chunks_exact_mut(half).enumerate() {
                    for second in [false, true] {
                        let plain = column_slab(2 * index + usize::from(second), plain);
                        tiles.pack_paired(rows, columns, taps, second, &plain, packed);
                    }
                }
            }
            ConvKernel::Main => tiles.pack(rows, columns, plain, &mut packed[at..][..self.slab_elements]),
        }
    }

    /// Where the packed elements belong: offsets in bytes from the first slab, and what is there.
    pub fn pieces(&self, slab_bytes: u64) -> impl Iterator<Item = (u64, Range<usize>)> {
        let slabs = self.block.slabs(self.layout);
        let (phases, taps) = self.parts_and_taps();
        let k_block = self.widths.k_block(self.element as u64);
        let cin = if self.block.shortcut { self.layout.shortcut.unwrap_or(0) } else { self.layout.cin };
        // K blocks of a phase and a channel tile, those before the block, and the bytes of each.
        let (k_blocks, before) = (cin.div_ceil(k_block), self.block.inputs.start / k_block);
        let bytes = taps / phases * self.widths.bytes();
        let (tile, tiles) = (self.block.outputs.start / self.widths.columns, channel_tiles(self.layout));
        (0..slabs.end - slabs.start).flat_map(move |slab| {
            let paired = !self.block.shortcut && self.is_paired(slab);
            // A pair is one piece, twice as long.
            let slabs = match (paired, slab % 2) {
                (true, 1) => 0,
                (paired, _) => 1 + usize::from(paired),
            };
            (0..phases).filter(move |_| slabs > 0).map(move |phase| {
                let elements = self.slab_elements / phases as usize;
                let from = slab as usize * self.slab_elements + phase as usize * slabs * elements;
                let block = (phase * tiles + tile) * k_blocks + before;
                (slab * slab_bytes + slabs as u64 * block * bytes, from..from + slabs * elements)
            })
        })
    }
}

/// One of the four slabs of pairs of columns, in the order of the kernels: Winograd F(2,3) along rows of 3 x 3 taps.
fn column_slab(slab: usize, plain: &[f32]) -> Vec<f32> {
    let rows = COLUMN_PAIR_ROWS as usize;
    let (mut packed, tap) = (Vec::with_capacity(plain.len() / 3), plain.len() / rows / 3);
    for row in plain.chunks_exact(3 * tap) {
        let (left, others) = row.split_at(tap);
        let (middle, right) = others.split_at(tap);
        let taps = left.iter().zip(middle).zip(right).map(|((left, middle), right)| (left, middle, right));
        // A loop of its own for each, so that the compiler makes vectors of it.
        match slab {
            0 => packed.extend(taps.map(|(left, middle, right)| 0.5 * (left + middle + right))),
            1 => packed.extend(taps.map(|(left, middle, right)| 0.5 * (left - middle + right))),
            2 => packed.extend_from_slice(left),
            _ => packed.extend(right.iter().map(|right| -right)),
        }
    }
    packed
}

/// Place of input channel `k` of a step and output channel `n` of `columns` in [`WeightOrder::Fragments`]: [product][two
/// blocks of 8 columns][lane][block][half of the product][word].
fn in_fragments<E>(columns: usize, k: usize, n: usize) -> usize {
    let (unit, word) = (UNIT / size_of::<E>(), UNIT / 4 / size_of::<E>());
    // Lane 4 r + t stores columns 2 t and 2 t + 1 of four blocks: whole units of output channels.
    let (t, within) = (n % (4 * unit) / unit, n % unit);
    let (block, column) = (n % 32 / (4 * unit) * (unit / 2) + within / 2 + n / 32 * 4, 2 * t + within % 2);
    // Lane 4 c + t multiplies column c with word t of both units of a product.
    let (product, half, t) = (k / unit / 2, k / unit % 2, k % unit / word);
    let load = (product * (columns / 16) + block / 2) * 32 + column * 4 + t;
    (load * 2 + block % 2) * 2 * word + half * word + k % word
}

/// Packs rows of input channels, each of up to `columns` output channels, into tiles.
struct RowPacking<E> {
    columns: usize,
    /// Bytes of input channels that an output channel has in a swizzled tile.
    row_bytes: usize,
    order: WeightOrder,
    /// Places in a step of [`WeightOrder::Fragments`]: [input channel][output channel].
    places: Vec<u16>,
    rounded: [[E; MOST_COLUMNS]; UNIT / 2],
}

impl<E: PackedElement> RowPacking<E> {
    fn new(order: WeightOrder, columns: usize, row_bytes: usize) -> RowPacking<E> {
        let step = if order == WeightOrder::Fragments { PAIR_ROW_BYTES as usize / size_of::<E>() } else { 0 };
        let place = |at: usize| in_fragments::<E>(columns, at / columns, at % columns) as u16;
        let places = (0..step * columns).map(place).collect();
        RowPacking { columns, row_bytes, order, places, rounded: [[E::default(); MOST_COLUMNS]; UNIT / 2] }
    }

    /// By how much an output channel shifts its units in a swizzled tile.
    fn swizzle(&self, n: usize) -> usize {
        if self.row_bytes == 64 { (n / 2) & 3 } else { n & 7 }
    }

    /// `from`: rows of `columns` output channels, at most as many as `into` has.
    fn pack(&mut self, columns: usize, from: &[f32], into: &mut [E]) {
        let (row, unit) = (self.row_bytes / size_of::<E>(), UNIT / size_of::<E>());
        for (at, rows) in from.chunks(unit * columns).enumerate() {
            self.rounded.iter_mut().skip(rows.len() / columns).for_each(|rounded| rounded.fill(E::default()));
            for (rounded, row) in self.rounded.iter_mut().zip(rows.chunks_exact(columns)) {
                E::round_all(row, &mut rounded[..columns]);
            }
            match self.order {
                WeightOrder::Swizzled | WeightOrder::ColumnPairs => {
                    for (n, into) in into.chunks_exact_mut(row).enumerate().take(columns) {
                        let into = &mut into[(at ^ self.swizzle(n)) * unit..][..unit];
                        into.iter_mut().zip(&self.rounded).for_each(|(to, rounded)| *to = rounded[n]);
                    }
                }
                WeightOrder::Fragments => {
                    let step = self.places.len() / self.columns;
                    let into = &mut into[at * unit / step * step * self.columns..][..step * self.columns];
                    let places = self.places.chunks_exact(self.columns).skip(at * unit % step);
                    for (rounded, places) in self.rounded.iter().take(unit).zip(places) {
                        for (value, place) in rounded[..columns].iter().zip(places) {
                            into[usize::from(*place)] = *value;
                        }
                    }
                }
            }
        }
    }
}

/// Tiles of the kernels of many channels. Here of one channel tile, and of some K blocks. A K block is a row of a tile.
/// Swizzled: its 16-byte units by the output channel. Fragments: steps of 64 bytes of input channels, see
/// [`in_fragments`].
struct MainTiles {
    order: WeightOrder,
    window: Window,
    widths: TileWidths,
}

impl MainTiles {
    /// [phase][channel tile][K block][tap].
    fn pack<E: PackedElement>(&self, rows: usize, columns: usize, plain: &[f32], packed: &mut [E]) {
        let (tile_columns, row_bytes) = (self.widths.columns as usize, self.widths.row_bytes as usize);
        let k_block = row_bytes / size_of::<E>();
        let (k_blocks, taps) = (rows.div_ceil(k_block), tap_order(self.window));
        let mut packing = RowPacking::new(self.order, tile_columns, row_bytes);
        for (index, into) in packed.chunks_exact_mut(k_block * tile_columns).enumerate() {
            let (phase, first, tap) =
                (index / taps.len() / k_blocks, index / taps.len() % k_blocks, index % taps.len());
            let from = &plain[(phase * taps.len() + taps[tap] as usize) * rows * columns..][..rows * columns];
            packing.pack(columns, rows_of(from, columns, first * k_block, k_block), into);
        }
    }

    /// For pairs of frames or columns: two slabs side by side, of which this is the first or the second.
    /// [phase][channel tile][step][tap][slab][output channel][input channels of a step]. Rows have 64 bytes. A wide K
    /// block is two steps.
    fn pack_paired<E: PackedElement>(
        &self,
        rows: usize,
        columns: usize,
        taps: usize,
        second: bool,
        plain: &[f32],
        packed: &mut [E],
    ) {
        let (tile_columns, row) = (self.widths.columns as usize, PAIR_ROW_BYTES as usize / size_of::<E>());
        let k_block = self.widths.row_bytes as usize / size_of::<E>();
        // Taps are in reading order in all windows that have pairs.
        let steps = rows.next_multiple_of(k_block) / row;
        let mut packing = RowPacking::new(self.order, tile_columns, PAIR_ROW_BYTES as usize);
        for (index, both) in packed.chunks_exact_mut(2 * row * tile_columns).enumerate() {
            let (phase, step, tap) = (index / taps / steps, index / taps % steps, index % taps);
            let into = &mut both[usize::from(second) * row * tile_columns..][..row * tile_columns];
            let from = &plain[(phase * taps + tap) * rows * columns..][..rows * columns];
            packing.pack(columns, rows_of(from, columns, step * row, row), into);
        }
    }
}

/// Rows `first` to `first + most`, as far as there are any.
fn rows_of(plain: &[f32], columns: usize, first: usize, most: usize) -> &[f32] {
    let rows = plain.len() / columns;
    &plain[first.min(rows) * columns..(first + most).min(rows) * columns]
}

/// For the convolution from pixels: [padded output channel][tap][4].
fn conv_in<E: PackedElement>(layout: &ConvLayout, plain: &[f32], packed: &mut [E]) {
    let (cin, cout) = (layout.cin as usize, layout.cout as usize);
    for (at, value) in plain.iter().enumerate() {
        let (tap, c, n) = (at / cout / cin, at / cout % cin, at % cout);
        packed[(n * 9 + tap) * 4 + c] = E::round(*value);
    }
}

fn conv_in_elements(layout: &ConvLayout) -> usize {
    padded_outputs(layout) as usize * 9 * 4
}

/// For the convolution to pixels: fragments of a matrix product with tap x output as columns, [group of 64 bytes of
/// channels][product][lane] [block of 8 columns][half][4 bytes of channels]. Lane 4 n + t holds, of column n of a
/// block, the t-th 16 bytes of a group's channels, 8 of them a product.
fn conv_out<E: PackedElement>(layout: &ConvLayout, plain: &[f32], packed: &mut [E]) {
    let (cin, cout) = (layout.cin as usize, layout.cout as usize);
    let (unit, word) = (UNIT / size_of::<E>(), 4 / size_of::<E>());
    let group = 4 * unit;
    for (at, value) in plain.iter().enumerate() {
        let (tap, c, o) = (at / cout / cin, at / cout % cin, at % cout);
        let (column, t, within) = (tap * 3 + o, c % group / unit, c % unit);
        let (product, half, e) = (within / word / 2, within / word % 2, within % word);
        let (block, n) = (column / 8, column % 8);
        packed[((((c / group * 2 + product) * 32 + 4 * n + t) * 4 + block) * 2 + half) * word + e] = E::round(*value);
    }
}

fn conv_out_elements<E: PackedElement>(layout: &ConvLayout) -> usize {
    (layout.cin as usize).next_multiple_of(4 * UNIT / size_of::<E>()) * 32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Precision;
    use crate::backend::cuda::driver::KernelArch;
    use crate::backend::cuda::launch::CudaSizes;
    use crate::backend::cuda::launch::tiling::PAIRS;
    use crate::ir::{ConvSource, Norm, Prologue};
    use crate::testing::{CutSlabs, SlabSource};

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
            norm: Norm::Group { groups: 1 },
            pairs: None,
            first_frame_slab: None,
        }
    }

    /// Everything that is packed of `slabs` slabs, block by block, where it belongs.
    fn packed<E: PackedElement>(order: WeightOrder, layout: &ConvLayout, slabs: &[Vec<f32>]) -> Vec<E> {
        struct Slabs<'a>(&'a [Vec<f32>]);
        impl SlabSource for Slabs<'_> {
            fn slab(&mut self, slab: u64, into: &mut [f32]) {
                into.copy_from_slice(&self.0[slab as usize]);
            }
            fn bias(&mut self, _: u64, _: &mut [f32]) {}
            fn norm(&mut self, _: &mut [f32], _: &mut [f32]) {}
        }
        let mut all = Vec::new();
        for part in parts(layout) {
            let WeightPart::Block(block) = part else { continue };
            let packing = BlockPacking::new::<E>(layout, &block, order).unwrap();
            let mut packed = vec![E::default(); packing.slab_elements * slabs.len()];
            let mut source = CutSlabs { layout, source: &mut Slabs(slabs) };
            let mut pack = |slab, plain: &[f32]| {
                packing.pack(slab, plain, &mut packed);
                Ok(())
            };
            source.block(&block, &mut pack).unwrap();
            let widths = TileWidths::of(layout);
            let k_blocks = layout.cin.div_ceil(widths.k_block(size_of::<E>() as u64));
            let slab_bytes = match ConvKernel::of(layout).unwrap() {
                ConvKernel::Main => packing.parts_and_taps().1 * channel_tiles(layout) * k_blocks * widths.bytes(),
                _ => (packing.slab_elements * size_of::<E>()) as u64,
            };
            all.resize(slabs.len() * slab_bytes as usize / size_of::<E>(), E::default());
            for (to, from) in packing.pieces(slab_bytes) {
                all[to as usize / size_of::<E>()..][..from.len()].copy_from_slice(&packed[from]);
            }
        }
        all
    }

    fn assert_each_once(packed: &[f32], count: usize) {
        let mut found: Vec<f32> = packed.iter().copied().filter(|w| *w != 0.0).collect();
        found.sort_by(f32::total_cmp);
        assert_eq!(found, numbered(count));
    }

    #[test]
    fn packing_keeps_every_weight_once() {
        let (cin, cout) = (100, 136);
        for order in [WeightOrder::Swizzled, WeightOrder::Fragments] {
            for window in [Window::Point, Window::Same, Window::Down, Window::Up] {
                let count = (window.taps() * cin * cout) as usize;
                let packed = packed::<f32>(order, &layout(cin, cout, window), &[numbered(count)]);
                assert_eq!(packed.len() as u64, window.taps() * 2 * 4 * TILE_CHANNELS * 32);
                assert_each_once(&packed, count);
            }
            for window in [Window::Same, Window::Up] {
                let count = (window.taps() * cin * cout) as usize;
                let pairs = ConvLayout { slabs: 4, pairs: Some(PAIRS), ..layout(cin, cout, window) };
                let slabs: Vec<Vec<f32>> = numbered(4 * count).chunks(count).map(<[f32]>::to_vec).collect();
                assert_each_once(&packed(order, &pairs, &slabs), 4 * count);
            }
            let pixels = layout(3, 20, Window::Same);
            assert_each_once(&packed(order, &pixels, &[numbered(9 * 3 * 20)]), 9 * 3 * 20);
            let pixels = ConvLayout { prologue: Prologue::NormSilu, ..layout(40, 3, Window::Same) };
            assert_each_once(&packed(order, &pixels, &[numbered(9 * 40 * 3)]), 9 * 40 * 3);
        }
    }

    /// Where the packed weight of input channel `k` and output channel `n` is, of 64 and 128, in bytes.
    fn place<E: PackedElement + PartialEq>(order: WeightOrder, k: usize, n: usize) -> usize {
        let mut plain = vec![0.0; 64 * 128];
        plain[k * 128 + n] = 1.0;
        let packed = packed::<E>(order, &layout(64, 128, Window::Point), &[plain]);
        packed.iter().position(|w| *w == E::round(1.0)).unwrap() * size_of::<E>()
    }

    /// Of a layer with pairs: each weight of each slab is where the kernels look for it, and there is nothing else.
    #[test]
    fn narrow_tiles_are_where_kernels_read_them() {
        let (cin, cout, taps) = (100, 136, 9);
        let wide = ConvLayout { slabs: 6, pairs: Some(PAIRS), ..layout(cin as u64, cout as u64, Window::Same) };
        let layout = ConvLayout { norm: Norm::Pixel, ..wide };
        assert_eq!(TileWidths::of(&layout), TileWidths::NARROW);
        let count = taps * cin * cout;
        let slabs: Vec<Vec<f32>> = numbered(6 * count).chunks(count).map(<[f32]>::to_vec).collect();
        for order in [WeightOrder::Swizzled, WeightOrder::Fragments] {
            let packed = packed::<f32>(order, &layout, &slabs);
            assert_each_once(&packed, 6 * count);
            let (tiles, steps, step) = (2, cin.div_ceil(16), 16);
            let tile_elements = 96 * step;
            for (at, weight) in slabs.concat().into_iter().enumerate() {
                let (slab, tap, c, channel) = (at / count, at / cout / cin % taps, at / cout % cin, at % cout);
                let (tile, n, first, k) = (channel / 96, channel % 96, c / step, c % step);
                // [slab][tile][step][tap], or [two slabs][tile][step][tap][slab].
                let tap_index = (tile * steps + first) * taps + tap;
                let tile_at = match slab {
                    0..4 => slab / 2 * 2 * tiles * steps * taps + 2 * tap_index + slab % 2,
                    _ => slab * tiles * steps * taps + tap_index,
                };
                let within = match order {
                    WeightOrder::Fragments => in_fragments::<f32>(96, k, n),
                    _ => n * step + ((k / 4) ^ (n / 2 % 4)) * 4 + k % 4,
                };
                assert_eq!(
                    packed[tile_at * tile_elements + within],
                    weight,
                    "slab {slab}, tap {tap}, {c} to {channel}"
                );
            }
        }
    }

    /// Of a layer whose columns are computed in pairs: the four sums of the taps of each tap row.
    #[test]
    fn slabs_of_column_pairs_are_where_kernels_read_them() {
        let (cin, cout, step) = (100, 136, 16);
        let layout = ConvLayout { prologue: Prologue::NormSilu, ..layout(cin, cout, Window::Same) };
        let (cin, cout) = (cin as usize, cout as usize);
        // Small whole numbers: their sums and halves are exact.
        let plain: Vec<f32> = (0..9 * cin * cout).map(|i| (i * 7919 % 61) as f32 - 30.0).collect();
        let packed = packed::<f32>(WeightOrder::ColumnPairs, &layout, std::slice::from_ref(&plain));
        let (tiles, steps) = (2, cin.next_multiple_of(32) / step);
        assert_eq!(packed.len(), 12 * tiles * steps * 128 * step);
        for (row, c, channel) in (0..3).flat_map(|row| (0..cin).flat_map(move |c| (0..cout).map(move |n| (row, c, n))))
        {
            let [left, middle, right] =
                std::array::from_fn(|column| plain[((3 * row + column) * cin + c) * cout + channel]);
            let slabs = [(left + middle + right) / 2.0, (left - middle + right) / 2.0, left, -right];
            let (tile, n, first, k) = (channel / 128, channel % 128, c / step, c % step);
            for (slab, weight) in slabs.into_iter().enumerate() {
                // [sum][tile][step][tap row][slab].
                let tile_at = ((((slab / 2 * tiles + tile) * steps + first) * 3) + row) * 2 + slab % 2;
                let within = n * step + ((k / 4) ^ (n / 2 % 4)) * 4 + k % 4;
                assert_eq!(packed[tile_at * 128 * step + within], weight, "slab {slab}, row {row}, {c} to {channel}");
            }
        }
    }

    /// Bytes that the blocks of a layer are packed to, those of a shortcut apart.
    fn packed_bytes<E: PackedElement>(order: WeightOrder, layout: &ConvLayout) -> [u64; 2] {
        let mut bytes = [0; 2];
        for part in parts(layout) {
            let WeightPart::Block(block) = part else { continue };
            let packing = BlockPacking::new::<E>(layout, &block, order).unwrap();
            let slabs = block.slabs(layout);
            bytes[usize::from(block.shortcut)] +=
                (slabs.end - slabs.start) * (packing.slab_elements * size_of::<E>()) as u64;
        }
        bytes
    }

    #[test]
    fn weights_take_as_much_as_was_planned_on_every_card() {
        let of = |cin, cout, window| ConvLayout { shortcut: Some(72), ..layout(cin, cout, window) };
        let normalised = |layout| ConvLayout { prologue: Prologue::NormSilu, ..layout };
        let narrow = |layout| ConvLayout { norm: Norm::Pixel, ..layout };
        let mut in_columns = 0;
        for (cin, cout) in [(64, 128), (100, 136), (96, 96)] {
            for window in [Window::Point, Window::Same, Window::Down, Window::Up] {
                let plain = of(cin, cout, window);
                let several = ConvLayout { slabs: 3, ..plain };
                for layout in [plain, several, normalised(plain), normalised(several), narrow(normalised(plain))] {
                    for arch in [KernelArch::new(8, 0), KernelArch::new(8, 6), KernelArch::HOPPER] {
                        for precision in [Precision::Fp16, Precision::Bf16, Precision::Fp32] {
                            let sizes = CudaSizes::new(precision, arch);
                            let (order, planned) = (sizes.weight_order(&layout), sizes.weight_layout(&layout));
                            let [slabs, shortcut] = match precision {
                                Precision::Fp16 => packed_bytes::<f16>(order, &layout),
                                Precision::Bf16 => packed_bytes::<bf16>(order, &layout),
                                Precision::Fp32 => packed_bytes::<f32>(order, &layout),
                            };
                            assert_eq!(slabs, layout.slabs * planned.slab_bytes, "{layout:?}, {order:?}");
                            assert_eq!(slabs, planned.shortcut, "{layout:?}, {order:?}");
                            assert_eq!(slabs + shortcut, planned.bias, "{layout:?}, {order:?}");
                            in_columns += u64::from(order == WeightOrder::ColumnPairs);
                        }
                    }
                }
            }
        }
        assert!(in_columns > 0);
    }

    /// As warpgroup products read them, for every element type.
    #[test]
    fn packing_swizzles_rows_by_units() {
        fn unit_of<E: PackedElement + PartialEq>(k: usize, n: usize) -> usize {
            place::<E>(WeightOrder::Swizzled, k, n) / UNIT
        }
        // 8 units an output channel.
        assert_eq!(unit_of::<f16>(17, 5), 5 * 8 + (2 ^ 5));
        assert_eq!(unit_of::<bf16>(17, 5), 5 * 8 + (2 ^ 5));
        assert_eq!(unit_of::<f32>(17, 5), 5 * 8 + (4 ^ 5));
        assert_eq!(unit_of::<f32>(32 + 17, 5), 128 * 8 + 5 * 8 + (4 ^ 5), "the second K block");
    }

    /// One load of a lane holds its operands of a product in two blocks of 8 output channels.
    #[test]
    fn packing_gives_lanes_their_operands() {
        // Lane 4 c + t of mma.sync multiplies column c of a block with word t of both units of a product.
        let at = |step: usize, product: usize, (block, column): (usize, usize), t: usize, half: usize| {
            let load = (step * 2 + product) * 8 + block / 2;
            load * 512 + (column * 4 + t) * 16 + block % 2 * 8 + half * 4
        };
        let (swizzled, fragments) = (WeightOrder::Swizzled, WeightOrder::Fragments);
        // Output channels 5 and 127: the units of lanes 0 and 3 of a pixel.
        assert_eq!(place::<f16>(fragments, 3 * 8 + 2 * 2 + 1, 5), at(0, 1, (2, 1), 2, 1) + 2);
        assert_eq!(place::<bf16>(fragments, 32 + 8 + 2 * 3, 127), at(1, 0, (15, 7), 3, 1));
        assert_eq!(place::<f32>(fragments, 2 * 4 + 1, 5), at(0, 1, (0, 3), 1, 0));
        assert_eq!(place::<f32>(fragments, 16 + 3, 5), at(1, 0, (0, 3), 3, 0));
        assert_ne!(place::<f32>(swizzled, 16 + 3, 5), at(1, 0, (0, 3), 3, 0));
    }
}
