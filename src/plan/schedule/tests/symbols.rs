//! A symbolic device: a frame's content is a hash of how it was made. A wrong frame, slab or slot gives another hash,
//! and policies that must give the same bits must give the same hashes.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use crate::ir::{
    Access, AddedFrame, BandPart, BandShape, BandSource, BandedConvOp, CacheFormat, ConvLayout, ConvOp, ConvProducts,
    DeviceProfile, FetchedWeights, FrameRef, FrameShape, LayerId, Op, PartialSumsSize, Place, Prologue, Rates, Sizes,
    Window,
};
use crate::plan::arena::{Arena, Arenas, Slot, Slots};
use crate::plan::cost::Target;
use crate::plan::plan::Plan;
use crate::plan::policy::Memory;
use crate::plan::schedule::{Next, Schedule};
use crate::plan::spec::ScheduleSpec;

/// A device that takes four bytes an element.
#[derive(Clone, Copy)]
pub struct Device {
    /// Whether norms are operations of their own, and sums land on their residuals.
    pub separate_norms: bool,
    /// Bytes a second to and from host memory, for a device that offloads.
    pub copies: Option<f64>,
    /// Whether partial sums replace the caches of the last convolution and of downsamplers in time.
    pub partial_sums: bool,
    /// Bytes of a weight, in eighths.
    pub weights: u64,
}

pub const FUSED: Device = Device { separate_norms: false, copies: None, partial_sums: false, weights: 1 };
pub const SEPARATE: Device = Device { separate_norms: true, copies: None, partial_sums: false, weights: 1 };
pub const SLOW_COPIES: Device = Device { separate_norms: true, copies: Some(1e8), partial_sums: true, weights: 1 };
pub const FAST_COPIES: Device = Device { separate_norms: true, copies: Some(1e12), partial_sums: true, weights: 1 };

impl Device {
    pub fn target(&self) -> Target<'_> {
        let copies = self.copies.unwrap_or(1.0);
        let profile = DeviceProfile {
            rates: Rates { products: 1e12, memory: 1e12, copies, copy_contention: 0.06 },
            busy_pixels: 16384,
            chunk_frames: 8,
            column_step: 32,
            fuses_norm: !self.separate_norms,
            pairs: None,
            upsampler_pairs: false,
            attention_cost: 1.0,
            adds_in_place: self.separate_norms,
            offloads: self.copies.is_some(),
        };
        Target::new(profile, self, 8)
    }

    fn keeps_partial_sums(&self, layout: &ConvLayout) -> bool {
        self.partial_sums && (layout.window == Window::Down || layout.cout <= 3)
    }
}

impl Sizes for Device {
    fn frame_bytes(&self, shape: FrameShape, _: u64) -> u64 {
        // An empty frame still has its statistics.
        4 * shape.elements().max(1)
    }
    fn u8_frame_bytes(&self, shape: FrameShape) -> Option<u64> {
        self.copies.map(|_| shape.elements().max(1))
    }
    fn weight_bytes(&self, layout: &ConvLayout) -> u64 {
        layout.slabs * layout.window.taps() * layout.cin * layout.cout * self.weights / 8
    }
    fn conv_scratch(&self, layout: &ConvLayout, _: FrameShape, frames: u64) -> u64 {
        layout.cout * frames
    }
    fn attention_scratch(&self, shape: FrameShape, _: u64) -> u64 {
        shape.pixels()
    }
    fn band_bytes(&self, shape: &BandShape, parts: &[BandPart], outputs: u64) -> Option<u64> {
        let is_host_part = |part: &&BandPart| matches!(part, BandPart::HostColumns(_) | BandPart::NewHostColumns(_));
        let host_parts = parts.iter().filter(is_host_part).count() as u64;
        let columns = (parts.len() as u64 - host_parts) * shape.input.width + host_parts * shape.columns.host_width();
        self.copies.map(|_| columns * (48 / outputs).max(1) * shape.input.channels)
    }
    fn normalises_itself(&self, layout: &ConvLayout) -> bool {
        layout.window == Window::Same && self.keeps_partial_sums(layout)
    }
    fn partial_sums(&self, layout: &ConvLayout, input: FrameShape, pending: u64) -> Option<PartialSumsSize> {
        let (bytes, in_place) = match layout.window {
            Window::Down if pending == 1 => (layout.cout * input.pixels() + 1, false),
            Window::Same if pending == 2 => (6 * 4 * input.pixels(), true),
            _ => return None,
        };
        self.keeps_partial_sums(layout).then_some(PartialSumsSize { bytes, in_place })
    }
    fn staging_bytes(&self, shape: FrameShape) -> u64 {
        if self.separate_norms { shape.elements() } else { 0 }
    }
    fn fade_bytes(&self, _: FrameShape) -> u64 {
        0
    }
    fn least_band_offset(&self, _: FrameShape) -> u64 {
        0
    }
    fn effective_products(&self, _: &ConvLayout, work: ConvProducts) -> f64 {
        work.products
    }

    fn block_bytes(&self, bytes: u64) -> u64 {
        bytes
    }
    fn mapping_bytes(&self, _: u64) -> u64 {
        0
    }
}

pub fn hash(value: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// The end and the content of each frame, by its offset.
#[derive(Clone, Default)]
pub struct SymbolMemory(pub BTreeMap<u64, (u64, u64)>);

impl SymbolMemory {
    pub fn read(&self, arena: &Arena, slot: Slot) -> u64 {
        let (start, end) = span(arena, slot);
        let found = self.0.get(&start).unwrap_or_else(|| panic!("nothing is left at {start}"));
        assert_eq!(found.0, end, "another frame is at {start}");
        found.1
    }

    /// Destroys whatever it overlaps.
    pub fn write(&mut self, arena: &Arena, slot: Slot, content: u64) {
        let (start, end) = span(arena, slot);
        self.0.retain(|at, (to, _)| *to <= start || *at >= end);
        self.0.insert(start, (end, content));
    }
}

fn span(arena: &Arena, slot: Slot) -> (u64, u64) {
    let start = arena.offset(slot).expect("the run keeps to its plan");
    (start, start + arena.slot_bytes(slot))
}

/// In place of the statistics of a frame that is not resident.
fn statistics_of(content: u64) -> u64 {
    hash(("statistics", content))
}

/// (input, slab) of a sum, in order.
type Sum = Vec<(u64, u8)>;

/// What memory holds, and what the host was given: (clip, frame, content).
#[derive(Clone)]
pub struct Symbols {
    pub device: Device,
    pub memory: SymbolMemory,
    pub host: SymbolMemory,
    pub stored: Vec<(u64, u64, u64)>,
    /// The terms of partial sums for each pending output, by their hash.
    pub partial_sums: HashMap<u64, VecDeque<Sum>>,
}

/// An operation writes what it says. One that adds to a frame, or fills a part of it, says that it reads it.
fn check_writes(op: &Op<Slots>, written: &[Place<Slots>]) {
    let adds = |place: &Place<Slots>| match op {
        Op::Blend(blend) => !blend.clear,
        Op::Pool(pool) => pool.frames.iter().any(|frame| !frame.clear && *place == Place::Device(frame.into)),
        _ => false,
    };
    let mut said: Vec<Place<Slots>> = Vec::new();
    op.each_value(|place, _, access| said.extend((access == Access::Write).then_some(place)));
    let known = said.iter().all(|place| written.contains(place));
    let same = known && written.iter().all(|place| said.contains(place) || adds(place));
    assert!(same && said.len() <= written.len(), "{said:?} is not {written:?}: {op:?}");
}

/// What an operation writes on the device, and in host memory.
type Writes = (Vec<(Slot, u64)>, Vec<(Slot, u64)>);

impl Symbols {
    pub fn new(device: &Device) -> Symbols {
        let memory = SymbolMemory::default();
        Symbols { device: *device, host: memory.clone(), memory, stored: Vec::new(), partial_sums: HashMap::new() }
    }

    pub fn run(&mut self, schedule: &mut Schedule) {
        let op = schedule.front().expect("an operation is in front").clone();
        let (spec, arenas) = (schedule.spec().clone(), schedule.arenas().clone());
        let at = |slot: Slot| self.memory.read(&arenas.device, slot);
        let (device, host) = match &op {
            Op::Load(op) => {
                let region = spec.input_region(spec.tile_of(op.item));
                (vec![(op.into, hash((op.batch, op.frame, region.top, region.left)))], vec![])
            }
            Op::Fetch(op) => (vec![(op.into.at, hash(("weights", op.layer, op.into.slabs)))], vec![]),
            Op::Conv(op) => self.conv(op, &spec, &arenas),
            Op::BandedConv(op) => self.banded_conv(op, &spec, &arenas),
            Op::Normalise(op) => {
                self.check_weights(op.layer, op.weights, &mut std::iter::empty(), &spec, &arenas);
                (op.frames.iter().map(|(from, to)| (*to, hash(("norm", op.layer, at(*from))))).collect(), vec![])
            }
            Op::Attention(op) => {
                (op.frames.iter().map(|(from, to)| (*to, hash(("attention", at(*from))))).collect(), vec![])
            }
            Op::Pool(op) => {
                let mut pooled: Vec<(Slot, u64)> = Vec::new();
                for frame in &op.frames {
                    let before = pooled.iter().position(|(slot, _)| *slot == frame.into);
                    let old = before.map(|at| pooled.remove(at).1).or_else(|| (!frame.clear).then(|| at(frame.into)));
                    pooled.push((frame.into, hash(("mean", old, frame.part, at(frame.from)))));
                }
                (pooled, vec![])
            }
            Op::Add(op) => {
                let sum =
                    |frame: &AddedFrame<Slots>| hash(("sum", op.repeat, at(frame.x), frame.part, at(frame.addend)));
                (op.frames.iter().map(|frame| (frame.out, sum(frame))).collect(), vec![])
            }
            Op::Blend(op) => {
                let before = if op.clear { 0 } else { at(op.into) };
                (vec![(op.into, hash((before, spec.tile_of(op.item), at(op.from))))], vec![])
            }
            Op::Store(op) => {
                let content = at(op.from);
                self.stored.push((op.batch, op.frame, content));
                (vec![], vec![])
            }
        };
        let mut written: Vec<Place<Slots>> = device.iter().map(|(slot, _)| Place::Device(*slot)).collect();
        written.extend(host.iter().map(|(slot, _)| Place::Host(*slot)));
        check_writes(&op, &written);
        // All frames of an operation are read before any is written: no order among them is promised.
        host.into_iter().for_each(|(slot, content)| self.host.write(&arenas.host, slot, content));
        device.into_iter().for_each(|(slot, content)| self.memory.write(&arenas.device, slot, content));
        schedule.done();
    }

    /// Fetched weights are there and hold the slabs of all terms but the shortcut's.
    fn check_weights(
        &self,
        layer: LayerId,
        fetched: Option<FetchedWeights<Slots>>,
        slabs: &mut dyn Iterator<Item = u8>,
        spec: &ScheduleSpec,
        arenas: &Arenas,
    ) {
        match (fetched, spec.policy.layers[layer].weights == Memory::Host) {
            (Some(fetched), true) => {
                let content = self.memory.read(&arenas.device, fetched.at);
                assert_eq!(content, hash(("weights", layer, fetched.slabs)));
                let own = spec.network.layers[layer].layout.slabs;
                let mut slabs = slabs.map(u64::from).filter(|slab| *slab < own);
                assert!(slabs.all(|slab| slab < fetched.slabs), "slabs of {layer}");
            }
            (fetched, offloaded) => assert!(fetched.is_none() && !offloaded, "weights of {layer}"),
        }
    }

    fn conv(&mut self, op: &ConvOp<Slots>, spec: &ScheduleSpec, arenas: &Arenas) -> Writes {
        let pending = op.partial_sums.after.iter().flat_map(|after| after.pending.iter().flatten());
        let mut slabs = op.frames.iter().flat_map(|frame| &frame.terms).chain(pending).map(|term| term.slab);
        self.check_weights(op.layer, op.weights, &mut slabs, spec, arenas);
        let at = |slot: Slot| self.memory.read(&arenas.device, slot);
        // Kernels that keep partial sums normalise their input themselves.
        let fuses = self.device.separate_norms
            && op.layout.prologue != Prologue::None
            && self.device.keeps_partial_sums(&op.layout);
        let input = |slot: Slot| if fuses { hash(("norm", op.layer, at(slot))) } else { at(slot) };
        let before = op.partial_sums.before.map(|slot| self.partial_sums[&at(slot)].clone());
        let mut sums = before.unwrap_or_default();
        let mut written: Vec<(Slot, u64)> = Vec::new();
        for frame in &op.frames {
            let mut terms = sums.pop_front().unwrap_or_default();
            terms.extend(frame.terms.iter().map(|term| (input(term.frame), term.slab)));
            assert!(frame.terms.iter().all(|term| term.frame != frame.out));
            written.push((frame.out, hash((op.layer, terms, frame.bias, frame.residual.map(at)))));
        }
        if let Some(after) = &op.partial_sums.after {
            let overwrites = op.partial_sums.before == Some(after.into);
            assert!(!overwrites || op.layout.window == Window::Same, "a downsampler's partial sums are not in place");
            let left = after.pending.iter().map(|terms| {
                let mut sum = sums.pop_front().unwrap_or_default();
                sum.extend(terms.iter().map(|term| (input(term.frame), term.slab)));
                sum
            });
            let left: VecDeque<Sum> = left.collect();
            written.push((after.into, hash(("partial sums", &left))));
            self.partial_sums.insert(hash(("partial sums", &left)), left);
        }
        (written, vec![])
    }

    fn banded_conv(&self, op: &BandedConvOp<Slots>, spec: &ScheduleSpec, arenas: &Arenas) -> Writes {
        let mut slabs = op.frames.iter().flat_map(|frame| &frame.terms).map(|term| term.slab);
        self.check_weights(op.layer, op.weights, &mut slabs, spec, arenas);
        let at = |slot: Slot| self.memory.read(&arenas.device, slot);
        let on_host = |slot: Slot| self.host.read(&arenas.host, slot);
        let content_of = |frame: FrameRef<Slots>| match frame {
            FrameRef::Resident(slot) => at(slot),
            FrameRef::Offloaded { frame, statistics } => {
                let content = on_host(frame);
                assert_eq!(at(statistics), statistics_of(content));
                content
            }
            FrameRef::Rematerialised { index, statistics } => {
                let by = op.rematerialise.as_ref().expect("something rematerialises it");
                let normalised = by.layout.prologue != Prologue::None;
                let input = |slot: Slot| if normalised { hash(("norm", by.layer, at(slot))) } else { at(slot) };
                let terms = by.frames[index].terms.iter();
                assert!(terms.clone().all(|term| !normalised || by.block_inputs.contains(&term.frame)));
                let terms: Sum = terms.map(|term| (input(term.frame), term.slab)).collect();
                let content = hash((by.layer, terms, by.frames[index].bias, None::<u64>));
                assert_eq!(at(statistics), statistics_of(content));
                content
            }
        };
        let normalised = |content: u64| match op.layout.prologue {
            Prologue::None => content,
            _ => hash(("norm", op.layer, content)),
        };
        // As the cache stores it.
        let stored = |content: u64| match op.format {
            CacheFormat::Exact => content,
            CacheFormat::U8 => hash(("rounded", content)),
        };
        let (mut device, mut host): Writes = (Vec::new(), Vec::new());
        let mut inputs: Vec<u64> = Vec::new();
        for input in &op.inputs {
            match input.from {
                BandSource::Cached(frame) => {
                    let parts: Vec<u64> = frame.resident.map(at).into_iter().chain(frame.host.map(on_host)).collect();
                    assert!(parts.iter().all(|part| *part == parts[0]), "parts of two frames");
                    inputs.push(parts[0]);
                }
                BandSource::Fresh(frame) => {
                    let content = content_of(frame);
                    device.extend(input.statistics_to.map(|slot| (slot, statistics_of(content))));
                    inputs.push(normalised(content));
                }
            }
        }
        for frame in &op.frames {
            let terms = frame.terms.iter().map(|term| {
                assert!(!term.is_rounded || op.inputs[term.input].is_rounded);
                let content = inputs[term.input];
                (if term.is_rounded { stored(content) } else { content }, term.slab)
            });
            let mut terms: Sum = terms.collect();
            terms.extend(frame.shortcut.map(|shortcut| (content_of(shortcut.from), shortcut.slab)));
            let content = hash((op.layer, terms, frame.bias, frame.residual.map(at)));
            match frame.out {
                FrameRef::Resident(slot) => device.push((slot, content)),
                FrameRef::Rematerialised { statistics, .. } => device.push((statistics, statistics_of(content))),
                FrameRef::Offloaded { frame, statistics } => {
                    device.push((statistics, statistics_of(content)));
                    host.push((frame, content));
                }
            }
        }
        for (i, to) in op.cache_writes() {
            device.extend(to.resident.map(|slot| (slot, stored(inputs[i]))));
            host.extend(to.host.map(|slot| (slot, stored(inputs[i]))));
        }
        (device, host)
    }

    pub fn sorted(mut self) -> Vec<(u64, u64, u64)> {
        self.stored.sort_unstable();
        self.stored
    }
}

/// The bands of the operation in front fit into the planned band buffers, in the smallest bands: those of the most
/// frames.
fn check_bands(schedule: &mut Schedule, plan: &Plan, device: &Device) {
    if let Some(Op::BandedConv(op)) = schedule.front() {
        let (parts, most) = (op.band_parts().collect::<Vec<_>>(), device.target().profile.chunk_frames);
        let (bytes, planned) = (device.band_bytes(&op.band_shape(), &parts, most), plan.buffers().bands.bytes);
        assert!(bytes.is_some_and(|bytes| bytes <= planned), "{bytes:?} of {planned}");
    }
}

/// Runs all operations that need no more input.
fn run_ready(schedule: &mut Schedule, symbols: &mut Symbols, plan: &Plan) {
    while schedule.prepare_next() == Next::Op {
        check_bands(schedule, plan, &symbols.device);
        symbols.run(schedule);
    }
}

pub fn run(plan: &Plan, device: &Device) -> Vec<(u64, u64, u64)> {
    let (mut schedule, mut symbols) = (plan.schedule(&device.target()), Symbols::new(device));
    run_ready(&mut schedule, &mut symbols, plan);
    assert_eq!(schedule.prepare_next(), Next::End);
    symbols.sorted()
}

/// Pushes input frames up to `end` of a clip, at most `piece` at a time, and runs only when nothing more is taken.
pub fn run_pushed(plan: &Plan, device: &Device, end: u64, piece: u64) -> Vec<(u64, u64, u64)> {
    let (mut schedule, mut symbols) = (plan.schedule(&device.target()), Symbols::new(device));
    loop {
        for _ in 0..schedule.room().min(piece).min(end.saturating_sub(schedule.loaded())) {
            schedule.load();
        }
        while schedule.front().is_some() {
            symbols.run(&mut schedule);
        }
        if schedule.loaded() >= end {
            schedule.set_total(schedule.loaded());
        }
        run_ready(&mut schedule, &mut symbols, plan);
        if schedule.prepare_next() == Next::End {
            return symbols.sorted();
        }
    }
}

/// Multiplications of all operations of a plan.
pub fn work_of(plan: &Plan, device: &Device) -> u64 {
    let (mut schedule, mut done) = (plan.schedule(&device.target()), 0);
    let network = Arc::clone(&plan.spec.network);
    while schedule.prepare_next() == Next::Op {
        done += crate::plan::cost::op_work(schedule.front().unwrap(), &network);
        schedule.done();
    }
    done
}
