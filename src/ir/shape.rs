//! Shapes: of a whole clip, and of one frame of activations.

use std::fmt;

/// The logical order of every tensor at the boundary.
pub const AXES: [&str; 5] = ["B", "C", "T", "H", "W"];

/// Batch, channels, frames, rows, columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    pub batch: u64,
    pub channels: u64,
    pub frames: u64,
    pub height: u64,
    pub width: u64,
}

impl Shape {
    pub const fn new(batch: u64, channels: u64, frames: u64, height: u64, width: u64) -> Shape {
        Shape { batch, channels, frames, height, width }
    }

    pub const fn dims(&self) -> [u64; 5] {
        [self.batch, self.channels, self.frames, self.height, self.width]
    }
}

impl From<[u64; 5]> for Shape {
    fn from([b, c, t, h, w]: [u64; 5]) -> Shape {
        Shape::new(b, c, t, h, w)
    }
}

impl Shape {
    /// `None` for a stream, which has 0 in the shapes of hosts.
    pub fn known_frames(&self) -> Option<u64> {
        (self.frames > 0).then_some(self.frames)
    }

    /// In words. A stream has no number of frames yet, which is 0 here.
    pub fn described(&self) -> String {
        match self.frames {
            0 => format!("a stream of frames {} x {}", self.width, self.height),
            _ => self.to_string(),
        }
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [b, c, t, h, w] = self.dims();
        write!(f, "[{b}, {c}, {t}, {h}, {w}]")
    }
}

/// One frame of activations, channels innermost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FrameShape {
    pub height: u64,
    pub width: u64,
    pub channels: u64,
}

/// One of its frames.
impl From<Shape> for FrameShape {
    fn from(shape: Shape) -> FrameShape {
        FrameShape::new(shape.height, shape.width, shape.channels)
    }
}

impl FrameShape {
    pub const fn new(height: u64, width: u64, channels: u64) -> FrameShape {
        FrameShape { height, width, channels }
    }

    pub const fn pixels(&self) -> u64 {
        self.height * self.width
    }

    pub const fn elements(&self) -> u64 {
        self.pixels() * self.channels
    }

    pub const fn with_channels(self, channels: u64) -> FrameShape {
        FrameShape { channels, ..self }
    }
}
