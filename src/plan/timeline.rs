//! The picture of a plan as data: its steps with their estimated times, and which bytes of each memory hold what.
//!
//! Follows the schedule that the run follows. Reads lifetimes off the operations; changes nothing.

use std::collections::HashMap;

use serde_json::{Value, json};

use super::arena::{Arena, Arenas, Slot, Slots};
use super::cost::{CostModel, Estimate, Moved, Target, WeightArrivals};
use super::plan::Plan;
use crate::ir::{self, Access, LayerId, Op, Place};
use crate::model::Network;

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

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Memory {
    Device,
    Host,
}

impl Memory {
    fn name(self) -> &'static str {
        if self == Memory::Device { "device" } else { "host" }
    }
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
            "memory": self.memory.name(), "content": self.content.name(), "offset": self.offset, "bytes": self.bytes,
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

impl Plan {
    /// Its first steps, as `vvae_plan_timeline` documents them. `limits`: of device memory and of host memory.
    pub fn timeline(&self, device: &str, limits: (u64, u64), target: &Target) -> Value {
        let network = &self.spec.network;
        let mut schedule = self.shown_schedule(target);
        let mut recorder = Recorder::new(network, target);
        let complete = schedule.walk(None, |arenas, op, is_settled| {
            let Some(op) = op else { return !target.is_cancelled() };
            recorder.record(op, arenas);
            recorder.chunk += u64::from(is_settled);
            !(is_settled && recorder.is_full())
        });
        let (on_device, on_host) = (self.device_regions(), self.host_regions());
        let base =
            |regions: &[(Content, u64, u64)]| regions.iter().find(|r| r.0 == Content::Activations).map_or(0, |r| r.1);
        let rectangles = recorder.finish(schedule.arenas(), complete, (base(&on_device), base(&on_host)));
        let mut fixed = Vec::new();
        for (memory, regions) in [(Memory::Device, on_device), (Memory::Host, on_host)] {
            let regions = regions.into_iter().filter(|region| region.0 != Content::Activations && region.2 > 0);
            fixed.extend(regions.map(|(content, offset, bytes)| {
                json!({ "memory": memory.name(), "content": content.name(), "offset": offset, "bytes": bytes })
            }));
        }
        let report = self.report();
        let shown = recorder.steps.last().map_or(0.0, |last| last.start + last.estimate.seconds);
        json!({
            "node": network.direction.name(), "input": report.input.dims(), "output": report.output.dims(),
            "exact": report.exact, "tiles": [report.tiles.0, report.tiles.1], "seconds": report.seconds,
            "device_bytes": report.device_bytes, "host_bytes": report.host_bytes,
            "limit_bytes": limits.0, "host_limit_bytes": limits.1, "text": report.to_string(),
            "device": device, "complete": complete, "frames_shown": recorder.stored, "seconds_shown": shown,
            "steps": recorder.steps.iter().map(Step::json).collect::<Vec<_>>(),
            "slots": rectangles.iter().map(Rectangle::json).collect::<Vec<_>>(),
            "fixed": fixed,
        })
    }

    /// Offset and bytes of each part of device memory, as if blocks lay side by side.
    fn device_regions(&self) -> Vec<(Content, u64, u64)> {
        let (weights, buffers) = (self.weights.device(), self.buffers());
        let (bands, staging) = (buffers.bands, buffers.staging[0]);
        let end = weights + self.workspace_bytes();
        vec![
            (Content::Weights, 0, weights),
            (Content::Activations, weights, buffers.scratch),
            (Content::Scratch, weights + buffers.scratch, bands.0 - buffers.scratch),
            (Content::Bands, weights + bands.0, bands.1),
            (Content::Staging, weights + staging, end - weights - staging),
            (Content::PageTables, end, self.mapping_bytes()),
        ]
    }

    fn host_regions(&self) -> Vec<(Content, u64, u64)> {
        let (pinned, weights) = (self.pinned(), self.weights.host);
        let frames = pinned.offloaded;
        vec![
            (Content::Activations, 0, frames),
            (Content::Weights, frames, weights),
            (Content::Staging, frames + weights, pinned.load + pinned.store),
        ]
    }
}

/// How an operation is called, in timelines and traces.
pub fn op_name<L: crate::ir::Location>(op: &Op<L>, network: &Network) -> String {
    let of = |what: &str, layer: LayerId| format!("{what} {}", network.layers[layer].name());
    match op {
        Op::Load(_) => "load".into(),
        Op::Fetch(fetch) => of("fetch", fetch.layer),
        Op::Conv(conv) => of("conv", conv.layer),
        Op::BandedConv(conv) => of("banded conv", conv.layer),
        Op::Normalise(norm) => of("norm", norm.layer),
        Op::Attention(_) => "attention".into(),
        Op::Blend(_) => "blend".into(),
        Op::Store(_) => "store".into(),
    }
}

/// Frames that an operation makes.
pub fn op_frames<L: crate::ir::Location>(op: &Op<L>) -> usize {
    match op {
        Op::Conv(conv) => conv.frames.len(),
        Op::BandedConv(conv) => conv.frames.len(),
        Op::Normalise(norm) => norm.frames.len(),
        Op::Attention(attention) => attention.frames.len(),
        Op::Load(_) | Op::Blend(_) | Op::Store(_) => 1,
        Op::Fetch(_) => 0,
    }
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

    /// The rectangles. What is still in use lives on: as a causal cache if its layer has read it. `bases`: where the
    /// arenas begin in device and host memory.
    fn finish(&mut self, arenas: &Arenas, complete: bool, bases: (u64, u64)) -> Vec<Rectangle> {
        let end = self.steps.len().saturating_sub(1);
        for ((memory, slot), mut live) in self.live.drain() {
            if !complete && live.last < end && arena(arenas, memory).is_live(slot) {
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
        let base = |memory| if memory == Memory::Device { bases.0 } else { bases.1 };
        let rectangle = |(memory, slot, live): (Memory, Slot, Live)| {
            let offset = base(memory) + arena(arenas, memory).offset(slot)?;
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

fn arena(arenas: &Arenas, memory: Memory) -> &Arena {
    match memory {
        Memory::Device => &arenas.device,
        Memory::Host => &arenas.host,
    }
}
