//! Clips with and without alpha, as a model has channels.

use super::{Clip, Source};
use crate::Result;
use crate::tensor::{Dtype, FrameKind};

/// The clip with so many channels, if its pixels are interleaved: alpha is left out, or 1 where the clip has none.
pub fn fit_channels(mut clip: Clip, source: Box<dyn Source>, channels: usize) -> (Clip, Box<dyn Source>) {
    let (from, to) = (clip.kind, clip.kind.with_channels(channels));
    if !from.interleaved || from == to {
        return (clip, source);
    }
    if from.channels > channels {
        clip.extras.unkept.push("alpha".into());
    }
    clip.kind = to;
    (clip, Box::new(Fitted { source, from, to, frame: Vec::new() }))
}

struct Fitted {
    source: Box<dyn Source>,
    from: FrameKind,
    to: FrameKind,
    /// As the source has it.
    frame: Vec<u8>,
}

impl Source for Fitted {
    fn read(&mut self, frame: &mut [u8]) -> Result<bool> {
        if self.frame.is_empty() {
            self.frame = self.from.buffer()?;
        }
        if !self.source.read(&mut self.frame)? {
            return Ok(false);
        }
        let bytes = self.from.dtype.bytes();
        let opaque: &[u8] = match self.from.dtype {
            Dtype::F32 => &[0, 0, 128, 63],
            _ => &[u8::MAX; 2],
        };
        let pixels = self.frame.chunks_exact(self.from.channels * bytes);
        for (from, to) in pixels.zip(frame.chunks_exact_mut(self.to.channels * bytes)) {
            let (kept, added) = to.split_at_mut(from.len().min(to.len()));
            kept.copy_from_slice(&from[..kept.len()]);
            added.copy_from_slice(&opaque[..added.len()]);
        }
        Ok(true)
    }
}
