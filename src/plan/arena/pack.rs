//! Packs frames with known lifetimes: each gets the lowest offset that no interfering frame uses.
//! The result depends on the order of placement. Several orders are tried and improved: frames that end above the best
//! result so far are placed sooner.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::trace::LifetimeTrace;
use crate::thread_pool;

/// Slices that differ from later ones, from the first one with an output frame on.
const WARM_UP: usize = 2;
/// Slices after its own in which a frame may still be live.
const REACH: usize = 3;
/// Slices after which frames get the same offsets again. Cached frames form rings of two, three or more slices; this is
/// a common multiple of most.
const PERIOD: usize = 6;
/// Tries for each starting order: fewer where more frames interfere, within bounds. Fuzzing needs many plans, not the
/// smallest ones.
const INTERFERENCES: usize = if cfg!(fuzzing) { 1_000 } else { 300_000 };
const MIN_TRIES: usize = if cfg!(fuzzing) { 1 } else { 12 };
const MAX_TRIES: usize = 150;
/// Interferences of all tries together: a search packs several plans within its second.
const MAX_INTERFERENCES: usize = 3_000_000;
/// One try in this many comes first, and tells which starts to drop.
const FIRST_TRIES: usize = 3;
/// A start is dropped if it is above the best by more than the best divided by this.
const PROMISING: u64 = 8;
/// How much sooner frames are placed that end too high.
#[derive(Clone, Copy)]
enum Sooner {
    First,
    Halfway,
}

/// The offset of each frame of each kind of slice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackedLayout {
    /// The first slice of a periodic job that is like later ones.
    steady: Option<usize>,
    offsets: Vec<Vec<u64>>,
    bytes: u64,
}

impl PackedLayout {
    /// Slices of a periodic job that a rehearsal must trace, after those that fill the cone.
    pub const TRACED_SLICES: usize = WARM_UP + PERIOD + REACH;
    /// Slices after which frames get the same offsets again.
    pub const PERIOD: usize = PERIOD;

    /// `filling`: of a periodic job, the slices that fill the cone. Slices after these and the warm-up repeat, and more
    /// may come than were traced. When `cancelled`, the layout is useless and found at once.
    pub fn new(trace: &LifetimeTrace, filling: Option<usize>, cancelled: &(dyn Fn() -> bool + Sync)) -> PackedLayout {
        let steady = filling.map(|filling| filling + WARM_UP);
        let frames = packed_frames(trace, steady);
        let interferes = interferences(&frames, cancelled);
        let orders = starting_orders(trace, &frames);
        let places = Places::new(&frames);
        let count = interferes.iter().map(Vec::len).sum::<usize>().max(1);
        let tries = (INTERFERENCES / count).clamp(MIN_TRIES, MAX_TRIES).min(MAX_INTERFERENCES / count).max(1);
        let starts = orders.into_iter().flat_map(|order| [(order.clone(), Sooner::First), (order, Sooner::Halfway)]);
        let mut starts: Vec<Start> =
            starts.enumerate().map(|(turn, (order, sooner))| Start::new(turn, order, sooner)).collect();
        // The first start that reaches the lower bound wins, whichever thread finishes first.
        let perfect = AtomicUsize::new(starts.len());
        let first_tries = tries.div_ceil(FIRST_TRIES);
        for tries in [first_tries, tries - first_tries] {
            starts = thread_pool::map(starts, |mut start| {
                let turn = start.turn;
                let lost = || perfect.load(Ordering::Relaxed) < turn || cancelled();
                start.improve(&places, &interferes, trace.peak_bytes(), tries, lost);
                if start.bytes <= trace.peak_bytes() {
                    perfect.fetch_min(turn, Ordering::Relaxed);
                }
                start
            });
            let least = starts.iter().map(|start| start.bytes).min().unwrap_or(0);
            starts.retain(|start| start.bytes <= least.saturating_add(least / PROMISING));
        }
        let best = starts.into_iter().min_by_key(|start| start.bytes).expect("there are several orders");
        let mut offsets: Vec<Vec<u64>> = Vec::new();
        for (frame, offset) in frames.iter().zip(best.offsets) {
            offsets.resize(offsets.len().max(frame.kind + 1), Vec::new());
            // The frames of a kind come in the order of their indices.
            debug_assert_eq!(offsets[frame.kind].len(), frame.index);
            offsets[frame.kind].push(offset);
        }
        PackedLayout { steady, offsets, bytes: best.bytes }
    }

    pub fn is_periodic(&self) -> bool {
        self.steady.is_some()
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The offset of frame `index` of a slice; `None` if the rehearsal had none.
    pub fn offset(&self, slice: usize, index: usize) -> Option<u64> {
        self.offsets.get(slice_kind(slice, self.steady))?.get(index).copied()
    }
}

/// Slices of one kind have the same frames at the same offsets.
fn slice_kind(slice: usize, steady: Option<usize>) -> usize {
    steady.filter(|steady| slice >= *steady).map_or(slice, |steady| steady + slice % PERIOD)
}

/// A frame of a kind of slice, with its lifetimes in all slices of that kind, in order.
struct PackedFrame {
    kind: usize,
    index: usize,
    bytes: u64,
    lifetimes: Vec<Lifetime>,
}

/// Begin and end; `None` if it has not ended.
type Lifetime = (u64, Option<u64>);

impl PackedFrame {
    /// Its longest lifetime. Those that have not ended end at `end`.
    fn longest(&self, end: u64) -> u64 {
        self.lifetimes.iter().map(|(from, to)| to.unwrap_or(end) - from).max().unwrap_or(0)
    }
}

fn packed_frames(trace: &LifetimeTrace, steady: Option<usize>) -> Vec<PackedFrame> {
    let mut known: HashMap<(usize, usize), usize> = HashMap::new();
    let mut frames: Vec<PackedFrame> = Vec::new();
    for traced in &trace.frames {
        let kind = slice_kind(traced.slice, steady);
        let at = *known.entry((kind, traced.index)).or_insert_with(|| {
            frames.push(PackedFrame { kind, index: traced.index, bytes: 0, lifetimes: Vec::new() });
            frames.len() - 1
        });
        // Tiles at the edge of an image may be smaller than others.
        frames[at].bytes = frames[at].bytes.max(traced.bytes);
        let last = frames[at].lifetimes.last();
        debug_assert!(
            last.is_none_or(|last| last.1.is_some_and(|to| to <= traced.from)),
            "a frame interferes with its successor"
        );
        frames[at].lifetimes.push((traced.from, traced.to));
    }
    frames
}

/// Of each frame, those whose lifetimes overlap with its own. 32 bits each: they are most of a search's memory.
fn interferences(frames: &[PackedFrame], cancelled: &dyn Fn() -> bool) -> Vec<Vec<u32>> {
    let of = |(i, frame): (u32, &PackedFrame)| frame.lifetimes.iter().map(move |(from, to)| (*from, *to, i)).collect();
    let mut lifetimes: Vec<(u64, Option<u64>, u32)> = (0..).zip(frames).flat_map::<Vec<_>, _>(of).collect();
    lifetimes.sort_unstable();
    let mut found: Vec<Vec<u32>> = vec![Vec::new(); frames.len()];
    let mut live: Vec<(Option<u64>, u32)> = Vec::new();
    for (from, to, i) in lifetimes {
        if cancelled() {
            break;
        }
        live.retain(|(end, _)| end.is_none_or(|end| end > from));
        for (_, j) in live.iter().filter(|(_, j)| *j != i) {
            found[i as usize].push(*j);
            found[*j as usize].push(i);
        }
        live.push((to, i));
    }
    for others in &mut found {
        others.sort_unstable();
        others.dedup();
    }
    found
}

/// By bytes times lifetime, by lifetime, and by bytes.
fn starting_orders(trace: &LifetimeTrace, frames: &[PackedFrame]) -> [Vec<usize>; 3] {
    let longest: Vec<u64> = frames.iter().map(|frame| frame.longest(trace.end)).collect();
    let in_order = |key: &dyn Fn(usize) -> (u128, i128)| {
        let mut order: Vec<usize> = (0..frames.len()).collect();
        order.sort_by_key(|i| Reverse(key(*i)));
        order
    };
    [
        in_order(&|i| (u128::from(frames[i].bytes) * u128::from(longest[i]), 0)),
        in_order(&|i| (u128::from(longest[i]), frames[i].bytes.into())),
        in_order(&|i| (u128::from(frames[i].bytes), -i128::from(frames[i].lifetimes[0].0))),
    ]
}

/// A starting order, and the best offsets found from it.
struct Start {
    turn: usize,
    order: Vec<usize>,
    sooner: Sooner,
    offsets: Vec<u64>,
    bytes: u64,
}

impl Start {
    fn new(turn: usize, order: Vec<usize>, sooner: Sooner) -> Start {
        Start { turn, offsets: vec![0; order.len()], order, sooner, bytes: u64::MAX }
    }

    /// Stops at the lower bound `peak`, and when `lost`.
    fn improve(&mut self, places: &Places, interferes: &[Vec<u32>], peak: u64, tries: usize, lost: impl Fn() -> bool) {
        for _ in 0..tries {
            if self.bytes <= peak || lost() {
                break;
            }
            let Some((offsets, bytes)) = places.assign(interferes, &self.order, &lost) else { break };
            let least = self.bytes.min(bytes);
            let fits = |i: usize| offsets[i].saturating_add(places.bytes(i)) < least;
            let turn = |(at, i): (usize, &usize)| match self.sooner {
                _ if fits(*i) => (2 * at + 1, *i),
                Sooner::First => (0, *i),
                Sooner::Halfway => (at, *i),
            };
            let mut turns: Vec<(usize, usize)> = Vec::with_capacity(self.order.len());
            turns.extend(self.order.iter().enumerate().map(turn));
            turns.sort_by_key(|(at, _)| *at);
            self.order = turns.into_iter().map(|(_, i)| i).collect();
            if bytes < self.bytes {
                (self.offsets, self.bytes) = (offsets, bytes);
            }
        }
    }
}

/// A placed frame: begin and end in one number, so that intervals sort fast. An end is never 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Interval(NonZeroU64);

impl Interval {
    /// `None` for a frame of no bytes, which is in nobody's way.
    fn new(from: u64, to: u64) -> Option<Interval> {
        NonZeroU64::new(from << 32 | to).map(Interval)
    }

    fn ends(self) -> (u64, u64) {
        (self.0.get() >> 32, self.0.get() & u64::from(u32::MAX))
    }
}

/// Gives frames their places.
struct Places {
    /// Bytes of a unit: the largest power of two that divides the bytes of all frames, or more where there would be too
    /// many units for 32 bits.
    unit: u64,
    /// Units of each frame.
    units: Vec<u64>,
}

impl Places {
    fn new(frames: &[PackedFrame]) -> Places {
        let bits = frames.iter().fold(1 << 63, |bits, frame| bits | frame.bytes);
        // A frame begins where another ends, so none ends beyond the sum of all.
        let all: u128 = frames.iter().map(|frame| u128::from(frame.bytes)).sum();
        let unit = (1 << bits.trailing_zeros()).max((all >> 31) as u64).next_power_of_two();
        Places { unit, units: frames.iter().map(|frame| frame.bytes.div_ceil(unit)).collect() }
    }

    fn bytes(&self, frame: usize) -> u64 {
        self.units[frame].saturating_mul(self.unit)
    }

    /// Places frames in this order, each by first fit. Returns the offsets and the bytes, unless `lost`.
    fn assign(&self, interferes: &[Vec<u32>], order: &[usize], lost: &impl Fn() -> bool) -> Option<(Vec<u64>, u64)> {
        let mut placed: Vec<Option<Interval>> = vec![None; order.len()];
        let mut taken: Vec<Interval> = Vec::new();
        let mut end = 0;
        for &i in order {
            if lost() {
                return None;
            }
            taken.clear();
            taken.extend(interferes[i].iter().filter_map(|j| placed[*j as usize]));
            taken.sort_unstable();
            let from = first_fit(taken.iter().map(|taken| taken.ends()), self.units[i]);
            placed[i] = Interval::new(from, from + self.units[i]);
            end = end.max(from + self.units[i]);
        }
        let offset = |place: Option<Interval>| place.map_or(0, |place| place.ends().0.saturating_mul(self.unit));
        Some((placed.into_iter().map(offset).collect(), end.saturating_mul(self.unit)))
    }
}

/// The lowest offset with room for `bytes`, given what is taken, in order.
pub fn first_fit(taken: impl Iterator<Item = (u64, u64)>, bytes: u64) -> u64 {
    let mut start = 0u64;
    for (from, to) in taken {
        if from >= start.saturating_add(bytes) {
            break;
        }
        start = start.max(to);
    }
    start
}
