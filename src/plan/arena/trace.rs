//! The lifetime trace of a rehearsal: when each frame is taken and dropped.

/// One frame: taken as number `index` of its slice, live from `from` up to `to`, once it is dropped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TracedFrame {
    pub slice: usize,
    pub index: usize,
    pub bytes: u64,
    pub from: u64,
    pub to: Option<u64>,
    /// 0 once it is dropped.
    uses: u32,
}

/// Records takes and drops, and the most bytes that were live at a time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LifetimeTrace {
    /// The time of the last take or drop.
    pub end: u64,
    pub frames: Vec<TracedFrame>,
    /// 128 bits: plans that fit nowhere are traced too.
    bytes: u128,
    peak_bytes: u128,
}

impl LifetimeTrace {
    /// Returns the number of the frame, by which it is dropped.
    pub fn take(&mut self, slice: usize, index: usize, bytes: u64) -> u32 {
        self.end += 1;
        self.frames.push(TracedFrame { slice, index, bytes, from: self.end, to: None, uses: 1 });
        self.bytes += u128::from(bytes);
        self.peak_bytes = self.peak_bytes.max(self.bytes);
        self.frames.len() as u32 - 1
    }

    pub fn uses(&mut self, number: u32) -> &mut u32 {
        &mut self.frames[number as usize].uses
    }

    /// The last use of a frame has ended.
    pub fn drop(&mut self, number: u32) {
        self.end += 1;
        let frame = &mut self.frames[number as usize];
        frame.to = Some(self.end);
        self.bytes -= u128::from(frame.bytes);
    }

    /// The most bytes live at a time. No packing takes less.
    pub fn peak_bytes(&self) -> u64 {
        u64::try_from(self.peak_bytes).unwrap_or(u64::MAX)
    }
}
