//! The picture of a plan as data: its steps with their estimated times, and which bytes of each memory hold what.
//!
//! Follows the schedule that the run follows. Reads lifetimes off the operations; changes nothing.

use std::collections::HashMap;

use serde_json::{Value, json};

use super::numbers::PlanReport;
use super::operations::{op_frames, op_name};
use crate::error::Result;
use crate::ir::{self, Access, LayerId, Op, Place};
use crate::model::Network;
use crate::plan::{Arena, Arenas, CostModel, Estimate, Memory, Moved, Plan, Slot, Slots, Target, WeightArrivals};

/// The most steps and rectangles that are shown. The rest of a longer job is like its last slices.
const MAX_STEPS: usize = 4096;
const MAX_RECTANGLES: usize = 1 << 14;
/// Bytes below which nothing is drawn: norm statistics.
const MIN_BYTES: u64 = 64 << 10;

/// What lies somewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Content {
    Activations,
    CausalCache,
    PartialSums,
    Weights,
    Scratch,
    Bands,
    Staging,
    PageTables,
}

impl Content {
    fn of(value: ir::Value) -> Content {
        match value {
            ir::Value::Frame | ir::Value::Statistics => Content::Activations,
            ir::Value::Cached => Content::CausalCache,
            ir::Value::PartialSums => Content::PartialSums,
            ir::Value::Weights => Content::Weights,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Content::Activations => "activations",
            Content::CausalCache => "causal cache",
            Content::PartialSums => "partial sums",
            Content::Weights => "weights",
            Content::Scratch => "scratch",
            Content::Bands => "band buffers",
            Content::Staging => "staging",
            Content::PageTables => "page tables",
        }
    }
}

fn memory_name(memory: Memory) -> &'static str {
    if memory == Memory::Device { "device" } else { "host" }
}

/// Bytes that hold one thing from the start of step `first` to the end of step `last`.
#[derive(Debug, Clone, Copy)]
struct Rectangle {
    memory: Memory,
    offset: u64,
    bytes: u64,
    first: usize,
    last: usize,
    content: Content,
}

impl Rectangle {
    fn json(&self) -> Value {
        json!({
            "memory": memory_name(self.memory), "content": self.content.name(), "offset": self.offset, "bytes": self.bytes,
            "first": self.first, "last": self.last,
        })
    }
}

/// One operation, with its place in the estimated time. Copies to and from the host run beside it.
struct Step {
    name: String,
    stage: usize,
    frames: usize,
    start: f64,
    estimate: Estimate,
    /// Bytes from the host and to it, and when the copies begin.
    moved: Moved,
    copies_start: f64,
}

impl Step {
    fn json(&self) -> Value {
        json!({
            "name": self.name, "stage": self.stage, "frames": self.frames, "start": self.start,
            "seconds": self.estimate.seconds, "waited": self.estimate.waited, "bytes_up": self.moved.up,
            "bytes_down": self.moved.down, "copies_start": self.copies_start,
        })
    }
}

/// Bytes that a plan may take.
#[derive(Debug, Clone, Copy)]
pub struct PlanLimits {
    pub device: u64,
    pub host: u64,
}

/// Bytes of a memory that hold one thing all the time.
struct Region {
    memory: Memory,
    content: Content,
    offset: u64,
    bytes: u64,
}

impl Region {
    fn json(&self) -> Value {
        json!({
            "memory": memory_name(self.memory), "content": self.content.name(), "offset": self.offset,
            "bytes": self.bytes,
        })
    }
}

/// The first steps of a plan, as `vvae_plan_timeline` documents them.
pub fn timeline(plan: &Plan, report: &PlanReport, device: &str, limits: PlanLimits, target: &Target) -> Result<Value> {
    let network = &plan.spec.network;
    let mut schedule = plan.shown_schedule(target);
    let mut recorder = Recorder::new(network, target);
    let complete = schedule.walk(None, |schedule, op| {
        let Some(op) = op else { return true };
        recorder.record(op, schedule.arenas());
        let is_settled = schedule.front().is_none();
        recorder.chunk += u64::from(is_settled);
        !(is_settled && recorder.is_full() || target.is_cancelled())
    });
    let regions = regions(plan);
    let rectangles = recorder.finish(schedule.arenas().clone(), complete, &regions);
    let is_fixed = |region: &&Region| region.content != Content::Activations && region.bytes > 0;
    target.check_cancel()?;
    let shown = recorder.steps.last().map_or(0.0, |last| last.start + last.estimate.seconds);
    Ok(json!({
        "node": network.direction.name(), "input": report.input.dims(), "output": report.output.dims(),
        "exact": report.exact, "tiles": [report.tiles.0, report.tiles.1], "seconds": report.seconds,
        "device_bytes": report.device_bytes, "host_bytes": report.host_bytes,
        "limit_bytes": limits.device, "host_limit_bytes": limits.host, "text": report.to_string(),
        "device": device, "absent": report.absent, "complete": complete, "frames_shown": recorder.stored, "seconds_shown": shown,
        "steps": recorder.steps.iter().map(Step::json).collect::<Vec<_>>(),
        "slots": rectangles.iter().map(Rectangle::json).collect::<Vec<_>>(),
        "fixed": regions.iter().filter(is_fixed).map(Region::json).collect::<Vec<_>>(),
    }))
}

/// The parts of both memories, as if blocks lay side by side.
fn regions(plan: &Plan) -> Vec<Region> {
    let (weights, buffers, pinned) = (plan.weights.device(), plan.buffers(), plan.pinned());
    let (bands, staging) = (buffers.bands, weights + buffers.staging[0]);
    let end = weights + plan.workspace;
    let device = |content, offset, bytes| Region { memory: Memory::Device, content, offset, bytes };
    let host = |content, offset, bytes| Region { memory: Memory::Host, content, offset, bytes };
    vec![
        device(Content::Weights, 0, weights),
        device(Content::Activations, weights, buffers.scratch),
        device(Content::Scratch, weights + buffers.scratch, bands.offset - buffers.scratch),
        device(Content::Bands, weights + bands.offset, bands.bytes),
        device(Content::Staging, staging, end - staging),
        device(Content::PageTables, end, plan.mapping),
        host(Content::Activations, 0, pinned.offloaded),
        host(Content::Weights, pinned.offloaded, plan.weights.host),
        host(Content::Staging, pinned.offloaded + plan.weights.host, pinned.load + pinned.store),
    ]
}

/// How an operation uses a slot. Inputs that a layer reads again with a later chunk are its causal cache.
#[derive(Clone, Copy)]
struct Touch {
    at: (Memory, Slot),
    content: Content,
    access: Access,
}

/// A frame that may still be used.
struct Live {
    bytes: u64,
    first: usize,
    last: usize,
    content: Content,
    /// Layers that have read it, with the number of the chunk.
    readers: Vec<(LayerId, u64)>,
}

/// Follows operations and their slots.
struct Recorder<'a> {
    costs: CostModel<'a>,
    arrivals: WeightArrivals,
    stages: Vec<usize>,
    stage: usize,
    now: f64,
    chunk: u64,
    steps: Vec<Step>,
    stored: u64,
    live: HashMap<(Memory, Slot), Live>,
    rectangles: Vec<(Memory, Slot, Live)>,
}

impl<'a> Recorder<'a> {
    fn new(network: &'a Network, target: &Target<'a>) -> Recorder<'a> {
        let stages = (0..network.layers.len()).map(|layer| network.stage_of(layer)).collect();
        Recorder {
            costs: CostModel { network, target: *target },
            arrivals: WeightArrivals::new(target.profile.rates.copies),
            stages,
            stage: 0,
            now: 0.0,
            chunk: 0,
            steps: Vec::new(),
            stored: 0,
            live: HashMap::new(),
            rectangles: Vec::new(),
        }
    }

    fn is_full(&self) -> bool {
        self.steps.len() >= MAX_STEPS || self.rectangles.len() >= MAX_RECTANGLES
    }

    fn record(&mut self, op: &Op<Slots>, arenas: &Arenas) {
        let step = self.steps.len();
        let mut touches: Vec<Touch> = Vec::new();
        op.each_value(|place, value, access| {
            let at = match place {
                Place::Device(slot) => (Memory::Device, slot),
                Place::Host(slot) => (Memory::Host, slot),
            };
            touches.push(Touch { at, content: Content::of(value), access });
        });
        // Reads come first: a result may lie over an input.
        touches.sort_by_key(|touch| touch.access == Access::Write);
        for touch in touches {
            self.touch(step, touch, arena(arenas, touch.at.0).slot_bytes(touch.at.1));
        }
        self.stage = op.reads_weights_of().map_or(self.stage, |(layer, _)| self.stages[layer]);
        self.stored += u64::from(matches!(op, Op::Store(_)));
        let estimate = self.arrivals.pass(op, self.costs.of(op));
        let copies_start = match op {
            Op::Fetch(_) => self.arrivals.last_start,
            _ => self.now + estimate.waited,
        };
        self.steps.push(Step {
            name: op_name(op, self.costs.network),
            stage: self.stage,
            frames: op_frames(op),
            start: self.now,
            estimate,
            moved: self.costs.moved_by(op),
            copies_start,
        });
        self.now += estimate.seconds;
    }

    fn touch(&mut self, step: usize, Touch { at, content, access }: Touch, bytes: u64) {
        let fresh = |content| Live { bytes, first: step, last: step, content, readers: Vec::new() };
        let live = self.live.entry(at).or_insert_with(|| fresh(content));
        match access {
            // Another frame, unless the operation has read what it overwrites.
            Access::Write if live.last < step => {
                let ended = std::mem::replace(live, fresh(content));
                self.rectangles.push((at.0, at.1, ended));
            }
            Access::Input(layer) => {
                let is_cached = live.readers.iter().any(|(reader, chunk)| *reader == layer && *chunk < self.chunk);
                if is_cached && live.content == Content::Activations {
                    let cached = Live { first: live.last + 1, ..fresh(Content::CausalCache) };
                    let ended = std::mem::replace(live, cached);
                    self.rectangles.push((at.0, at.1, ended));
                }
                live.readers.push((layer, self.chunk));
            }
            Access::Write | Access::Read => {}
        }
        live.last = step;
    }

    /// The rectangles. What is still in use lives on: as a causal cache if its layer has read it.
    fn finish(&mut self, mut arenas: Arenas, complete: bool, regions: &[Region]) -> Vec<Rectangle> {
        let end = self.steps.len().saturating_sub(1);
        for ((memory, slot), mut live) in self.live.drain() {
            if !complete && live.last < end && is_live(&mut arenas, memory, slot) {
                if live.content == Content::Activations && !live.readers.is_empty() {
                    let cached = Live {
                        first: live.last + 1,
                        last: end,
                        content: Content::CausalCache,
                        readers: vec![],
                        ..live
                    };
                    self.rectangles.push((memory, slot, cached));
                } else {
                    live.last = end;
                }
            }
            self.rectangles.push((memory, slot, live));
        }
        let is_arena = |region: &&Region| region.content == Content::Activations;
        let base = |memory| {
            regions.iter().filter(is_arena).find(|region| region.memory == memory).map_or(0, |region| region.offset)
        };
        let rectangle = |(memory, slot, live): (Memory, Slot, Live)| {
            let offset = base(memory) + arena(&arenas, memory).offset(slot)?;
            let Live { bytes, first, last, content, .. } = live;
            (bytes >= MIN_BYTES).then_some(Rectangle { memory, offset, bytes, first, last, content })
        };
        merged(self.rectangles.drain(..).filter_map(rectangle).collect())
    }
}

/// Frames of one chunk that lie side by side are one rectangle.
fn merged(mut rectangles: Vec<Rectangle>) -> Vec<Rectangle> {
    rectangles.sort_by_key(|rectangle| {
        (rectangle.memory, rectangle.first, rectangle.last, rectangle.content, rectangle.offset)
    });
    let mut merged: Vec<Rectangle> = Vec::with_capacity(rectangles.len());
    for rectangle in rectangles {
        let key = |rectangle: &Rectangle| (rectangle.memory, rectangle.first, rectangle.last, rectangle.content);
        match merged.last_mut() {
            Some(before) if key(before) == key(&rectangle) && before.offset + before.bytes == rectangle.offset => {
                before.bytes += rectangle.bytes;
            }
            _ => merged.push(rectangle),
        }
    }
    merged
}

fn is_live(arenas: &mut Arenas, memory: Memory, slot: Slot) -> bool {
    match memory {
        Memory::Device => arenas.device.is_live(slot),
        Memory::Host => arenas.host.is_live(slot),
    }
}

fn arena(arenas: &Arenas, memory: Memory) -> &Arena {
    match memory {
        Memory::Device => &arenas.device,
        Memory::Host => &arenas.host,
    }
}
