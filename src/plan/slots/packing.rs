//! Packs frames whose lives are known into as little memory as a simple rule finds: each as low as those allow that live at the
//! same time, first the largest, or those that live long, or both, or those that live when most is taken. Then those sooner that
//! ended up above what should do, a few times over; and whatever took the least.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::workers;

/// Slices that are not like the later ones.
const IRREGULAR: usize = 2;
/// Slices that a frame may be needed after its own, when others of its kind are already there.
const REACH: usize = 3;
/// Slices until frames find the same places again. Frames of the past follow one another in rings of two, three or more, which
/// pack best into a whole number of rounds.
const PERIOD: usize = 6;
/// Orders that are tried, from each that one begins with: fewer where more frames meet more others, but never too few.
const MEETINGS: usize = 300_000;
const FEWEST_TRIES: usize = 12;
const MOST_TRIES: usize = 150;
/// How much sooner frames are placed that would not fit: by what their turn is divided.
const ALL_THE_WAY: usize = usize::MAX;
const HALF_WAY: usize = 2;

/// A frame's life, by when it was taken and given back.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Life {
    slice: usize,
    index: usize,
    bytes: u64,
    from: u64,
    to: u64,
}

/// What frames a job takes, and when it gives them back.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Recording {
    clock: u64,
    lives: Vec<Life>,
    bytes: u64,
    most_bytes: u64,
}

impl Recording {
    /// The number of a frame that was taken as number `index` of its slice.
    pub fn take(&mut self, slice: usize, index: usize, bytes: u64) -> u64 {
        self.clock += 1;
        self.lives.push(Life { slice, index, bytes, from: self.clock, to: u64::MAX });
        self.bytes += bytes;
        self.most_bytes = self.most_bytes.max(self.bytes);
        self.lives.len() as u64 - 1
    }

    pub fn give_back(&mut self, number: u64) {
        self.clock += 1;
        let life = &mut self.lives[number as usize];
        life.to = self.clock;
        self.bytes -= life.bytes;
    }

    /// The most bytes that were in use at a time: no packing takes less.
    pub fn most_bytes(&self) -> u64 {
        self.most_bytes
    }

    pub fn pack(&self, repeats: bool) -> Packed {
        let mut known: HashMap<(usize, usize), usize> = HashMap::new();
        let mut frames: Vec<Frame> = Vec::new();
        for life in &self.lives {
            let kind = kind(life.slice, repeats);
            let at = *known.entry((kind, life.index)).or_insert_with(|| {
                frames.push(Frame { kind, index: life.index, bytes: 0, lives: Vec::new() });
                frames.len() - 1
            });
            // Tiles at the edge of an image may be smaller than others.
            frames[at].bytes = frames[at].bytes.max(life.bytes);
            debug_assert!(
                frames[at].lives.last().is_none_or(|last| last.1 <= life.from),
                "a frame meets its successor"
            );
            frames[at].lives.push((life.from, life.to));
        }
        let lives_with = frames.iter().enumerate().map(|(i, frame)| {
            let others = frames.iter().enumerate().filter(|(j, other)| i != *j && frame.lives_with(other));
            others.map(|(j, _)| j).collect()
        });
        let lives_with: Vec<Vec<usize>> = lives_with.collect();
        let longest: Vec<u64> = frames.iter().map(|frame| frame.longest(self.clock)).collect();
        let crowds = self.crowds(&frames);
        let in_order = |key: &dyn Fn(usize) -> (u128, u64)| {
            let mut order: Vec<usize> = (0..frames.len()).collect();
            order.sort_by_key(|i| Reverse(key(*i)));
            order
        };
        let orders = [
            in_order(&|i| (u128::from(frames[i].bytes) * u128::from(longest[i]), 0)),
            in_order(&|i| (u128::from(longest[i]), frames[i].bytes)),
            in_order(&|i| (u128::from(frames[i].bytes), u64::MAX - frames[i].lives[0].0)),
            in_order(&|i| (u128::from(crowds[i]), frames[i].bytes)),
        ];
        let ways = orders.into_iter().flat_map(|order| [(order.clone(), ALL_THE_WAY), (order, HALF_WAY)]);
        // The first way that is as good as can be is taken, whoever comes first to its end.
        let perfect = AtomicUsize::new(usize::MAX);
        let found = workers::map(ways.enumerate().collect(), |(turn, (order, sooner))| {
            let (places, bytes) =
                self.improve(&frames, &lives_with, order, sooner, || perfect.load(Ordering::Relaxed) < turn);
            if bytes <= self.most_bytes {
                perfect.fetch_min(turn, Ordering::Relaxed);
            }
            (places, bytes)
        });
        let (places, bytes) = found.into_iter().min_by_key(|(_, bytes)| *bytes).expect("there are several ways");
        Packed::new(&frames, &places, bytes, repeats)
    }

    /// Of each frame, the most bytes that were in use at a time while it lived.
    fn crowds(&self, frames: &[Frame]) -> Vec<u64> {
        let mut ends: Vec<(u64, u64)> = self.lives.iter().map(|life| (life.to, life.bytes)).collect();
        ends.sort_unstable();
        let (mut ends, mut bytes) = (ends.into_iter().peekable(), 0);
        let takes = self.lives.iter().map(|life| {
            while let Some((_, gone)) = ends.next_if(|(to, _)| *to <= life.from) {
                bytes -= gone;
            }
            bytes += life.bytes;
            (life.from, bytes)
        });
        let takes: Vec<(u64, u64)> = takes.collect();
        let crowd = |(from, to): &(u64, u64)| {
            let begun = takes.partition_point(|(at, _)| at < from);
            takes[begun..].iter().take_while(|(at, _)| at < to).map(|(_, bytes)| *bytes).max().unwrap_or(0)
        };
        frames.iter().map(|frame| frame.lives.iter().map(crowd).max().unwrap_or(0)).collect()
    }

    /// Places frames in this order, and in others where those come sooner that would not fit: where they lie, and the bytes that they
    /// take. A way that `has_lost` to another need not go on.
    fn improve(
        &self,
        frames: &[Frame],
        lives_with: &[Vec<usize>],
        mut order: Vec<usize>,
        sooner: usize,
        has_lost: impl Fn() -> bool,
    ) -> (Vec<u64>, u64) {
        let mut best = (Vec::new(), u64::MAX);
        let meetings = lives_with.iter().map(Vec::len).sum::<usize>().max(1);
        for _ in 0..(MEETINGS / meetings).clamp(FEWEST_TRIES, MOST_TRIES) {
            if best.1 <= self.most_bytes || has_lost() {
                break;
            }
            let (places, bytes) = place(frames, lives_with, &order);
            let least = best.1.min(bytes);
            let fits = |i: usize| places[i] + frames[i].bytes < least;
            let mut turns: Vec<(usize, usize)> = Vec::with_capacity(order.len());
            turns.extend(
                order.iter().enumerate().map(|(at, i)| (if fits(*i) { 2 * at + 1 } else { 2 * at / sooner }, *i)),
            );
            turns.sort_by_key(|(at, _)| *at);
            order = turns.into_iter().map(|(_, i)| i).collect();
            if bytes < best.1 {
                best = (places, bytes);
            }
        }
        best
    }
}

/// A frame of a kind of slice, with its lives in every slice of that kind.
struct Frame {
    kind: usize,
    index: usize,
    bytes: u64,
    /// In their order.
    lives: Vec<(u64, u64)>,
}

impl Frame {
    /// Its longest life, of those that end before `now` or then.
    fn longest(&self, now: u64) -> u64 {
        self.lives.iter().map(|(from, to)| to.min(&now) - from).max().unwrap_or(0)
    }

    fn lives_with(&self, other: &Frame) -> bool {
        let (mut mine, mut theirs) = (self.lives.iter().peekable(), other.lives.iter().peekable());
        while let (Some(a), Some(b)) = (mine.peek(), theirs.peek()) {
            if a.0 < b.1 && b.0 < a.1 {
                return true;
            }
            if a.1 <= b.1 {
                mine.next();
            } else {
                theirs.next();
            }
        }
        false
    }
}

fn kind(slice: usize, repeats: bool) -> usize {
    if repeats && slice >= IRREGULAR { IRREGULAR + slice % PERIOD } else { slice }
}

/// Where each frame of each kind of slice lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packed {
    repeats: bool,
    places: Vec<Vec<u64>>,
    bytes: u64,
}

/// Places frames in this order, each as low as those allow that are there; the bytes that they then take together.
fn place(frames: &[Frame], lives_with: &[Vec<usize>], order: &[usize]) -> (Vec<u64>, u64) {
    const NOWHERE: u64 = u64::MAX;
    let (mut places, mut bytes) = (vec![NOWHERE; frames.len()], 0);
    for &i in order {
        let placed = lives_with[i].iter().filter(|j| places[**j] != NOWHERE);
        let mut taken: Vec<(u64, u64)> = placed.map(|j| (places[*j], places[*j] + frames[*j].bytes)).collect();
        taken.sort_unstable();
        let mut start = 0;
        for (from, to) in taken {
            if from >= start + frames[i].bytes {
                break;
            }
            start = start.max(to);
        }
        places[i] = start;
        bytes = bytes.max(start + frames[i].bytes);
    }
    (places, bytes)
}

impl Packed {
    fn new(frames: &[Frame], places: &[u64], bytes: u64, repeats: bool) -> Packed {
        let mut packed = Packed { repeats, places: Vec::new(), bytes };
        frames.iter().zip(places).for_each(|(frame, start)| packed.put(frame.kind, frame.index, *start));
        packed
    }

    /// Slices that show all there is to know of a job that goes on like that.
    pub const TELLING_SLICES: usize = IRREGULAR + PERIOD + REACH;

    /// Slices after which frames find the same places again.
    pub const PERIOD: usize = PERIOD;

    /// Whether slices are alike from the third on, but for a last one that is shorter.
    pub fn repeats(&self) -> bool {
        self.repeats
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Where the frame lies that is taken as number `index` of a slice; nowhere, if the rehearsal had none.
    pub fn place(&self, slice: usize, index: usize) -> u64 {
        let places = self.places.get(kind(slice, self.repeats));
        places.and_then(|places| places.get(index)).copied().unwrap_or(u64::MAX)
    }

    fn put(&mut self, kind: usize, index: usize, start: u64) {
        if self.places.len() <= kind {
            self.places.resize(kind + 1, Vec::new());
        }
        let places = &mut self.places[kind];
        if places.len() <= index {
            places.resize(index + 1, u64::MAX);
        }
        places[index] = start;
    }
}
