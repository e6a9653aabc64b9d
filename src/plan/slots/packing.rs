//! Packs frames whose lives are known into as little memory as a simple rule finds: each as low as those allow that live at the
//! same time, first the largest, or those that are large for long, whichever takes less in the end.

use std::collections::HashMap;

/// Slices that are not like the later ones.
const IRREGULAR: usize = 2;
/// Slices that a frame may be needed after its own, when others of its kind are already there.
const REACH: usize = 3;
/// Slices until frames find the same places again. Frames of the past follow one another in rings of two, three or more, which
/// pack best into a whole number of rounds.
const PERIOD: usize = 6;

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
        frames.sort_by_key(|frame| (std::cmp::Reverse(frame.bytes), frame.lives[0].0));
        let largest_first = Packed::new(&frames, repeats);
        frames.sort_by_key(|frame| std::cmp::Reverse(u128::from(frame.bytes) * u128::from(frame.longest(self.clock))));
        let longest_first = Packed::new(&frames, repeats);
        if longest_first.bytes < largest_first.bytes { longest_first } else { largest_first }
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

impl Packed {
    /// Places frames in their order.
    fn new(frames: &[Frame], repeats: bool) -> Packed {
        let mut packed = Packed { repeats, places: Vec::new(), bytes: 0 };
        // In the order of where they lie.
        let mut placed: Vec<(u64, &Frame)> = Vec::new();
        for frame in frames {
            let mut start = 0;
            for (at, other) in placed.iter().filter(|(_, other)| other.lives_with(frame)) {
                if *at >= start + frame.bytes {
                    break;
                }
                start = start.max(at + other.bytes);
            }
            let after = placed.partition_point(|(at, _)| *at <= start);
            placed.insert(after, (start, frame));
            packed.put(frame.kind, frame.index, start);
            packed.bytes = packed.bytes.max(start + frame.bytes);
        }
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
