//! From a source through one or two streams of the library into a sink, at constant memory.
//!
//! Three threads: one reads, one computes, one writes, with a few frames between them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};

use crate::files::{Sink, Source};
use crate::progress::Progress;
use crate::tensor::{FrameKind, Frames};
use crate::vae::{Pulled, Stream};
use crate::{Result, interrupt};

/// Frames that may wait between two threads.
const WAITING: usize = 4;

/// A stream, and the kind of frames that come out of it.
pub struct Stage<'a> {
    stream: Stream<'a>,
    out: FrameKind,
}

impl<'a> Stage<'a> {
    pub fn new(stream: Stream<'a>, out: FrameKind) -> Stage<'a> {
        Stage { stream, out }
    }
}

/// Which count is the one of video frames, which the user is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Counting {
    Read,
    Written,
}

pub struct Pipeline<'a> {
    pub source: Box<dyn Source>,
    pub kind: FrameKind,
    pub stages: Vec<Stage<'a>>,
    pub sink: Box<dyn Sink>,
    pub counting: Counting,
    /// Frames read so far; the whole number by the time the sink is finished.
    pub read: &'a AtomicU64,
    /// Whether more frames may come out than were read, which are then padding: video to video.
    pub drop_padding: bool,
    /// Frames to write at most.
    pub most: u64,
}

impl Pipeline<'_> {
    /// Runs to the end and finishes the sink. The number of frames written.
    pub fn run(self, progress: &mut Progress) -> Result<u64> {
        let Pipeline { mut source, kind, mut stages, mut sink, counting, read, drop_padding, most } = self;
        let (give, frames) = sync_channel::<Result<Frames>>(WAITING);
        let (put, results) = sync_channel::<Frames>(WAITING);
        let mut written = 0;
        std::thread::scope(|scope| {
            scope.spawn(move || {
                loop {
                    let read =
                        Frames::new(kind, 1).and_then(|mut frame| Ok(source.read(frame.bytes_mut())?.then_some(frame)));
                    let Some(message) = read.transpose() else { break };
                    // Nobody listens any more when the run has failed or was interrupted.
                    if give.send(message).is_err() {
                        break;
                    }
                }
            });
            let writer = scope.spawn(move || -> Result<Box<dyn Sink>> {
                for frame in results {
                    sink.write(frame.bytes())?;
                }
                Ok(sink)
            });
            let computed = compute(frames, &mut stages, read, |frame| {
                if written < most && !(drop_padding && written == read.load(Ordering::Acquire)) {
                    // A writer that is gone has failed, and says why when joined.
                    put.send(frame).map_err(|_| String::from("the output cannot be written"))?;
                    written += 1;
                }
                progress.show(if counting == Counting::Read { read.load(Ordering::Acquire) } else { written });
                Ok(())
            });
            drop(put);
            let sink = writer.join().map_err(|_| "the writing thread failed; please report this")??;
            computed?;
            sink.finish()
        })?;
        Ok(written)
    }
}

fn compute(
    frames: Receiver<Result<Frames>>,
    stages: &mut [Stage],
    read: &AtomicU64,
    mut deliver: impl FnMut(Frames) -> Result<()>,
) -> Result<()> {
    for frame in &frames {
        let frame = frame?;
        read.fetch_add(1, Ordering::Release);
        feed(stages, Some(frame), &mut deliver)?;
    }
    // A source that ended because it was interrupted along with us is not complete.
    interrupt::check()?;
    if read.load(Ordering::Acquire) == 0 {
        return Err("the input has no frames; name another one".into());
    }
    feed(stages, None, &mut deliver)
}

/// Pushes a frame, or the end of the clip, into the first stage, and what comes out of it into the next.
fn feed(stages: &mut [Stage], frame: Option<Frames>, deliver: &mut dyn FnMut(Frames) -> Result<()>) -> Result<()> {
    let Some((stage, rest)) = stages.split_first_mut() else {
        return frame.map_or(Ok(()), deliver);
    };
    loop {
        interrupt::check()?;
        // One frame is taken or not; if not, there is something to pull first.
        let taken = stage.stream.push(frame.as_ref())? == 1;
        if frame.is_some() && taken {
            return Ok(());
        }
        loop {
            interrupt::check()?;
            let mut room = Frames::new(stage.out, 1)?;
            match stage.stream.pull(&mut room)? {
                Pulled::Frame => feed(rest, Some(room), deliver)?,
                Pulled::Again => break,
                Pulled::End => return feed(rest, None, deliver),
            }
        }
    }
}
