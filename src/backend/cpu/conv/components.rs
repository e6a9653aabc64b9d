//! Convolutions in the Winograd domain, f32. A task goes through single frames and pairs of frames of one area. Its
//! input goes into one of the components of columns at a time, is multiplied, and comes back.
//! A sum is in the order of terms and channels in each component, and the same for a frame alone as in a pair.

use super::AreaTask;
use super::grid::split_evenly;
use super::patch::{self, KeptInputs, PatchSize};
use super::square::{GROUP, Square};
use super::winograd::{InputTransform, OutputTransform, ShareProducts};
use crate::backend::Stop;
use crate::backend::cpu::simd::{BLOCK, MicroTile, Microkernels, PANEL};
use crate::ir::{FrameUnit, Offsets, Term};

/// Input channels of a product that is added to a sum. A long sum of products is rounded more than the sum of a few
/// shorter ones, and the weights of so many channels and a panel stay in the first-level cache for all squares.
const SUM_CHANNELS: usize = 128;

/// Products of a patch and a slab, which are added to a sum or begin it.
#[derive(Clone, Copy)]
struct Step {
    patch: usize,
    slab: u8,
    sum: usize,
    add: bool,
}

/// An output frame, the sum that it is made of, and whether it is complete then but for its epilogue.
struct PassFrame {
    frame: usize,
    sum: usize,
    finish: bool,
}

/// A component of columns and of rows, and the number of the former in its group.
#[derive(Clone, Copy)]
struct Component {
    column: usize,
    row: usize,
    number: usize,
}

/// Steps over patches that are prepared.
struct Pass {
    steps: Vec<Step>,
    /// Whether the frames of a pair share the first two steps.
    shares: bool,
    frames: Vec<PassFrame>,
    /// Whether to add to the outputs.
    add: bool,
    size: PatchSize,
    square: Square,
}

impl Pass {
    /// Rows and columns of squares.
    fn squares(&self) -> (usize, usize) {
        self.size.squares(self.square)
    }
}

impl AreaTask<'_> {
    /// # Safety
    /// The processor has `S`.
    pub(super) unsafe fn run_winograd<S: Microkernels>(&self, square: Square, stop: &mut Stop) {
        for unit in &self.conv.units[self.units.clone()] {
            // SAFETY: by this function's contract.
            let done = unsafe {
                match *unit {
                    FrameUnit::Single(frame) => self.run_single::<S>(frame, square, stop),
                    FrameUnit::Pair(frames) => self.run_pair::<S>(frames, square, stop),
                }
            };
            if !done {
                return;
            }
        }
    }

    /// A frame, as many terms at a time as there is room for. False if told to stop.
    ///
    /// # Safety
    /// As [`AreaTask::run_winograd`].
    unsafe fn run_single<S: Microkernels>(&self, frame: usize, square: Square, stop: &mut Stop) -> bool {
        let (conv, area) = (self.conv, self.area.in_squares(square));
        let of = &conv.frames[frame].terms;
        let main: Vec<&Term<Offsets>> = of.iter().filter(|term| !conv.is_shortcut(term)).collect();
        let mut done = 0;
        for terms in main.chunks(conv.grid.patches) {
            let (mut size, mut steps) = (PatchSize { rows: 0, columns: 0 }, Vec::with_capacity(terms.len()));
            for (patch, term) in terms.iter().enumerate() {
                // SAFETY: the slot has room for a table and for the patches.
                size = unsafe {
                    let source = conv.source(term, 0, self.slot, 0);
                    patch::windowed::<S, f32>(&source, &conv.grid, area, conv.patch(self.slot, patch))
                };
                steps.push(Step { patch, slab: term.slab, sum: 0, add: patch > 0 });
            }
            let frames = vec![PassFrame { frame, sum: 0, finish: done + terms.len() == of.len() }];
            // SAFETY: by this function's contract.
            if !unsafe { self.run_pass::<S>(&Pass { steps, shares: false, frames, add: done > 0, size, square }, stop) }
            {
                return false;
            }
            done += terms.len();
        }
        // SAFETY: by this function's contract.
        unsafe { self.add_shortcut::<S>(frame, done, stop) }
    }

    /// A pair, or one frame of it. False if told to stop.
    ///
    /// # Safety
    /// As [`AreaTask::run_winograd`].
    unsafe fn run_pair<S: Microkernels>(&self, pair: [Option<usize>; 2], square: Square, stop: &mut Stop) -> bool {
        let (conv, area) = (self.conv, self.area.in_squares(square));
        let inputs = conv.pair_inputs(pair);
        // SAFETY: the slot has room for a table of each input and for all patches.
        let size = unsafe {
            let sources = [0, 1, 2, 3].map(|i| inputs[i].map(|term| conv.source(term, 0, self.slot, i)));
            let into = [0, 1, 2, 3].map(|i| conv.patch(self.slot, i));
            patch::windowed_pair::<S, f32>(&sources, &conv.grid, area, KeptInputs::NONE, into)
        };
        let step = |patch: usize, sum: usize, add: bool| Some(Step { patch, slab: inputs[patch]?.slab, sum, add });
        let mut pass = Pass {
            steps: [step(1, 0, false), step(2, 1, false)].into_iter().flatten().collect(),
            shares: true,
            frames: Vec::new(),
            add: false,
            size,
            square,
        };
        for (sum, frame) in pair.into_iter().enumerate().filter_map(|(sum, frame)| frame.map(|frame| (sum, frame))) {
            pass.steps.extend(step(3 * sum, sum, true));
            pass.frames.push(PassFrame { frame, sum, finish: conv.frames[frame].terms.len() == 3 });
        }
        // SAFETY: by this function's contract.
        unsafe {
            self.run_pass::<S>(&pass, stop)
                && pass.frames.iter().all(|frame| self.add_shortcut::<S>(frame.frame, 3, stop))
        }
    }

    /// Adds what terms a frame has after the `done` first ones, without Winograd's algorithm. False if told to stop.
    ///
    /// # Safety
    /// As [`AreaTask::run_winograd`].
    unsafe fn add_shortcut<S: Microkernels>(&self, frame: usize, done: usize, stop: &mut Stop) -> bool {
        let (terms, mut ready) = (&self.conv.frames[frame].terms, None);
        // SAFETY: by this function's contract.
        unsafe {
            if terms.is_empty() {
                self.write_empty_sum::<S>(frame);
            }
            (done..terms.len()).all(|number| self.add_term::<S>(frame, number, &terms[number], &mut ready, stop))
        }
    }

    /// False if told to stop.
    ///
    /// # Safety
    /// As [`AreaTask::run_winograd`]; the patches are prepared.
    unsafe fn run_pass<S: Microkernels>(&self, pass: &Pass, stop: &mut Stop) -> bool {
        let (rows, columns) = pass.squares();
        let blocks = (self.conv.op.layout.cin as usize).div_ceil(BLOCK);
        for (group, group_columns) in pass.square.groups().enumerate() {
            for column in group_columns.clone() {
                for step in &pass.steps {
                    // SAFETY: the slot has room for the components.
                    unsafe {
                        S::enter(InputTransform {
                            square: pass.square,
                            patch: self.conv.patch(self.slot, step.patch),
                            size: pass.size,
                            blocks,
                            column,
                            into: self.component(pass, 0, step.patch),
                            component: self.conv.grid.patches * blocks * rows * columns * BLOCK,
                        });
                    }
                }
                for component in 0..pass.square.components() {
                    for panel in self.panels.clone() {
                        if stop() {
                            return false;
                        }
                        let at = Component { column, row: component, number: column - group_columns.start };
                        // SAFETY: by this function's contract.
                        unsafe { self.multiply::<S>(pass, at, panel) };
                    }
                }
            }
            for frame in &pass.frames {
                for panel in self.panels.clone() {
                    // SAFETY: by this function's contract.
                    unsafe { self.transform_back::<S>(pass, frame, group, panel) };
                }
            }
        }
        true
    }

    /// The input of a patch in one of the components of rows.
    fn component(&self, pass: &Pass, component: usize, patch: usize) -> *mut f32 {
        let (rows, columns) = pass.squares();
        let patches = component * self.conv.grid.patches + patch;
        let blocks = (self.conv.op.layout.cin as usize).div_ceil(BLOCK);
        self.conv.components(self.slot).wrapping_add(patches * blocks * rows * columns * BLOCK)
    }

    /// The sums of a panel in a component of rows, and in the component of columns that has `number` in its group.
    fn sum(&self, pass: &Pass, sum: usize, number: usize, component: usize, panel: usize) -> *mut f32 {
        let (rows, columns) = pass.squares();
        let index = (sum * self.panels.len() + panel - self.panels.start) * GROUP + number;
        let index = index * pass.square.components() + component;
        self.conv.sums(self.slot).wrapping_add(index * rows * columns * PANEL)
    }

    /// All steps of one panel in one component.
    ///
    /// # Safety
    /// As [`AreaTask::run_pass`]; the components are prepared.
    unsafe fn multiply<S: Microkernels>(&self, pass: &Pass, at: Component, panel: usize) {
        let (conv, cin) = (self.conv, self.conv.op.layout.cin as usize);
        let (rows, columns) = pass.squares();
        let (squares, width) = (rows * columns, conv.panel_width(panel).1);
        let components = pass.square.components();
        let weights = |step: usize, component: usize, panel: usize| {
            conv.weights.panel(usize::from(pass.steps[step].slab), components * at.column + component, panel)
        };
        for (number, step) in pass.steps.iter().enumerate() {
            let next = if number + 1 < pass.steps.len() {
                weights(number + 1, at.row, panel)
            } else if panel + 1 < self.panels.end {
                weights(0, at.row, panel + 1)
            } else {
                weights(0, (at.row + 1) % components, self.panels.start)
            };
            let own = weights(number, at.row, panel);
            let from = self.component(pass, at.row, step.patch);
            let out = self.sum(pass, step.sum, at.number, at.row, panel);
            let tiles = squares.div_ceil(S::PIXELS);
            for channel in (0..cin).step_by(SUM_CHANNELS) {
                let end = cin.min(channel + SUM_CHANNELS);
                let next = if end < cin { own.wrapping_add(end * width) } else { next };
                for index in 0..tiles {
                    let (first, last) = split_evenly(squares, tiles, index);
                    let mut tile = MicroTile {
                        patch: from.wrapping_add((channel * squares) + first * BLOCK),
                        block: squares * BLOCK,
                        step: BLOCK,
                        taps: &[0],
                        cin: end - channel,
                        weights: own.wrapping_add(channel * width),
                        width,
                        out: out.wrapping_add(first * PANEL),
                        out_step: PANEL,
                        add: step.add || channel > 0,
                        later: std::ptr::null(),
                    };
                    tile.prefetch_later(next, SUM_CHANNELS.min(cin) * width, index);
                    // SAFETY: the tile is inside the components and the sums.
                    unsafe { S::tile(&tile, last - first) };
                }
            }
            if pass.shares && number == 1 {
                let [first, second] = [0, 1].map(|sum| self.sum(pass, sum, at.number, at.row, panel));
                // SAFETY: the slot has room for the sums of both frames.
                unsafe { S::enter(ShareProducts { first, second, floats: squares * PANEL }) };
            }
        }
    }

    /// Adds a group of components of columns to the output. The last one lets each row get its epilogue at once.
    ///
    /// # Safety
    /// As [`AreaTask::run_pass`].
    unsafe fn transform_back<S: Microkernels>(&self, pass: &Pass, frame: &PassFrame, group: usize, panel: usize) {
        let (rows, columns) = pass.squares();
        let into = self.pass(frame.frame, panel);
        let (side, cout) = (pass.square.side(), self.conv.op.layout.cout as usize);
        for row in 0..rows {
            let pixels = side * row..self.area.height.min(side * (row + 1));
            // SAFETY: rows of the area.
            unsafe {
                S::enter(OutputTransform {
                    square: pass.square,
                    sums: self.sum(pass, frame.sum, 0, 0, panel).add(row * columns * PANEL),
                    column: pass.square.components() * rows * columns * PANEL,
                    component: rows * columns * PANEL,
                    group,
                    out: into.out_row(side * row),
                    rows: pixels.len(),
                    row: self.conv.grid.width * cout,
                    step: cout,
                    pixels: self.area.width,
                    channels: self.conv.panel_width(panel).0,
                    add: pass.add,
                });
                if frame.finish && group > side / 2 {
                    pixels.for_each(|y| into.finish_row::<S, f32>(y, None));
                }
            }
        }
    }
}
