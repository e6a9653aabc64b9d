//! Emits what goes around levels: values that wait from the beginning of a level to its end, and are added there.
//! Means are made at once, so that the large frames need not wait. Values that are repeated wait as they are.

use std::ops::Range;
use std::sync::Arc;

use super::emit::{Emitter, LayerOutputs};
use super::layer_cache::{SlotRef, resident};
use super::sink::Sink;
use crate::ir::{AddOp, AddedFrame, FrameRef, LayerId, Op, PoolOp, PooledFrame, Repeat};
use crate::model::{LevelMap, LevelShortcut};
use crate::plan::arena::{Slot, SlotKind};

impl Emitter {
    /// Hands new outputs of a layer to the layers behind levels that they are added to.
    pub fn hand_around(&mut self, layer: LayerId, frames: Range<u64>, outputs: &[SlotRef], to: &mut Sink) {
        let facts = Arc::clone(&self.facts);
        for behind in facts.spec.network.added_around(layer) {
            let slots = resident(outputs);
            let level = facts.spec.network.layers[*behind].level.expect("it adds a value around a level");
            if level.map == LevelMap::Mean {
                self.pool(*behind, level, frames.clone(), &slots, to);
                continue;
            }
            for (frame, slot) in frames.clone().zip(slots) {
                let queue = &mut self.caches[*behind].around;
                // A range may begin with frames that nothing is added to.
                if frame >= queue.end() {
                    to.arenas.device.keep(slot);
                    queue.frames.push_back(slot);
                }
            }
        }
    }

    fn pool(&mut self, behind: LayerId, level: LevelShortcut, frames: Range<u64>, slots: &[Slot], to: &mut Sink) {
        let (sizes, queue) = (&self.facts.sizes, &mut self.caches[behind].around);
        let bytes = sizes.layers[behind].output;
        let kind = if self.facts.spec.is_interleaved() { SlotKind::Pooled } else { SlotKind::Packed };
        let mut pooled = Vec::new();
        for (frame, from) in frames.zip(slots.iter().copied()) {
            let number = level.smaller(frame);
            if number < queue.first {
                continue;
            }
            let clear = number == queue.end();
            if clear {
                queue.frames.push_back(to.arenas.device.take(bytes, kind));
            }
            pooled.push(PooledFrame { from, into: queue.at(number), part: level.part(frame), clear });
        }
        if !pooled.is_empty() {
            let input = self.facts.spec.network.layers[level.from].output_shape(sizes.layers[level.from].input);
            to.ops.push_back(Op::Pool(PoolOp { input, parts: level.parts, frames: pooled }));
        }
    }

    /// Adds what waits to new outputs of a layer. They are written over, but for a frame that was passed on: it may have
    /// other readers.
    pub fn add_around(&mut self, of: &LayerOutputs, outputs: Vec<SlotRef>, to: &mut Sink) -> Vec<SlotRef> {
        let layer = &self.facts.spec.network.layers[of.layer];
        let Some(level) = layer.level.filter(|_| !outputs.is_empty()) else { return outputs };
        let (arena, queue) = (&mut to.arenas.device, &mut self.caches[of.layer].around);
        let shape = layer.output_shape(self.facts.sizes.layers[of.layer].input);
        let channels = self.facts.spec.network.layers[level.from].layout.cout;
        let repeat = match level.map {
            LevelMap::Mean => Repeat { channels: shape.channels, side: 1, parts: 1 },
            LevelMap::Repeat { side } => Repeat { channels, side, parts: level.parts },
        };
        let added = of.frames.clone().zip(resident(&outputs)).map(|(frame, x)| {
            let is_passed = layer.time.recipe(frame).is_passed;
            let own = self.facts.sizes.layers[of.layer].output;
            let out = if is_passed { arena.take(own, of.kept.slot_kind(frame)) } else { x };
            let part = level.part(frame) % repeat.parts;
            AddedFrame { x, addend: queue.at(level.waiting(frame)), part, out }
        });
        let frames: Vec<AddedFrame<_>> = added.collect();
        frames.iter().filter(|frame| frame.out != frame.x).for_each(|frame| arena.drop(frame.x));
        queue.drop_before(Some(level.waiting(of.frames.end)), arena);
        let outputs = frames.iter().map(|frame| FrameRef::Resident(frame.out)).collect();
        to.ops.push_back(Op::Add(AddOp { shape, repeat, frames }));
        outputs
    }
}
