//! Runs the parts of a job on their members, each on a thread of its own. The calling thread waits, and is the only one
//! that calls the host.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use super::frames::NearCall;
use super::job::FleetJob;
use super::member::{self, Member};
use crate::error::{Error, Result};
use crate::exec::runner::Watch;
use crate::exec::{Call, Control, LogLevel, LogSink, Progress};
use crate::ir::TensorDevice;
use crate::report::Part;
use crate::thread_pool::at_once;

/// How often the calling thread looks up while members are silent.
const PATIENCE: Duration = Duration::from_millis(50);

/// What a member's thread tells the calling one.
enum Message {
    /// So many more frames are done. Fewer where a part failed: another member begins with it again.
    Done(f64),
    Log(LogLevel, String),
}

/// Progress of one frame, as the host is told it.
const FRAME_PROGRESS: u64 = 1000;

/// The progress of a whole job.
pub struct Meter<'a, 'c> {
    pub watch: Watch<'a, 'c>,
    /// Frames of all clips. Fewer than before where a part failed, but the host is told no less.
    frames: f64,
    total: u64,
}

impl<'a, 'c> Meter<'a, 'c> {
    pub fn new(control: &'a mut Control<'c>, job: &FleetJob) -> Meter<'a, 'c> {
        let total = job.whole.all_frames() * FRAME_PROGRESS;
        Meter { watch: Watch::new(control, job.network.direction.name(), total), frames: 0.0, total }
    }

    /// Tells the host, but not of the end: the last frames may have to be copied to its tensors yet.
    fn tell(&mut self) -> Result<()> {
        self.watch.reach(((self.frames * FRAME_PROGRESS as f64) as u64).min(self.total - 1))
    }

    /// Tells the host that everything is done.
    pub fn finish(mut self) -> Result<()> {
        self.watch.reach(self.total)
    }
}

/// One member's side of a run.
struct Worker<'a> {
    member: &'a mut Member,
    work: Work<'a>,
    tell: Sender<Message>,
    /// Whether the others may go on.
    ended_well: bool,
}

/// After a failure that no other member can make good, or a panic.
impl Drop for Worker<'_> {
    fn drop(&mut self) {
        if !self.ended_well {
            self.work.cancel.store(true, Ordering::Relaxed);
        }
    }
}

/// What all members work on.
#[derive(Clone, Copy)]
pub struct Work<'a> {
    pub job: &'a FleetJob,
    pub call: &'a Call,
    pub cancel: &'a AtomicBool,
}

/// Runs everything that is assigned to the members.
pub fn run(members: &mut [Member], work: Work, meter: &mut Meter) -> Result<()> {
    let (tell, told) = mpsc::channel();
    let worker = |member| Worker { member, work, tell: tell.clone(), ended_well: false };
    let workers: Vec<Worker> = members.iter_mut().map(worker).collect();
    drop(tell);
    let mut stopped = Ok(());
    let ended = at_once(workers, |mut worker: Worker| worker.run(), || stopped = watch(&told, meter));
    let ended: Vec<Result<()>> = ended.into_iter().map(Result::flatten).collect();
    // A failure stops the other members, so they are cancelled.
    let failed = ended.iter().find(|ended| !matches!(ended, Ok(()) | Err(Error::Cancelled)));
    failed.cloned().unwrap_or_else(|| stopped.and(ended.into_iter().collect()))
}

/// Passes on what members tell, until all have ended.
fn watch(told: &Receiver<Message>, meter: &mut Meter) -> Result<()> {
    let log = meter.watch.control.log;
    let mut state = Ok(());
    loop {
        let first = match told.recv_timeout(PATIENCE) {
            Ok(message) => Some(message),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => break,
        };
        let mut heard = false;
        for message in first.into_iter().chain(told.try_iter()) {
            match message {
                Message::Done(frames) => (meter.frames, heard) = (meter.frames + frames, true),
                Message::Log(level, text) => log.log(level, format_args!("{text}")),
            }
        }
        // After a stop the host hears no more of this call.
        if state.is_ok() && heard {
            state = meter.tell();
        } else if state.is_ok() && meter.watch.stop() {
            state = Err(Error::Cancelled);
        }
    }
    state
}

/// Hands a member's log to the calling thread.
struct Relay<'a> {
    tell: &'a Sender<Message>,
    place: TensorDevice,
}

impl LogSink for Relay<'_> {
    fn log(&self, level: LogLevel, message: fmt::Arguments) {
        // The calling thread listens until all senders are gone.
        let _ = self.tell.send(Message::Log(level, format!("{}: {message}", self.place)));
    }
}

impl Worker<'_> {
    /// Runs what is assigned to the member. A failure that another member can make good leaves this one out; any other
    /// is an error.
    fn run(&mut self) -> Result<()> {
        let (before, mut seconds) = (self.member.done.len(), 0.0);
        while let Some(part) = self.member.todo.first().map(|planned| planned.part.clone()) {
            match self.run_part(&part) {
                Ok(took) => {
                    seconds += took;
                    self.member.done.push(self.member.todo.remove(0));
                }
                Err(error) if member::is_of_device(&error) => {
                    self.member.leave_out(error);
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        self.ended_well = true;
        self.member.learn(self.work.job.network.direction, before, seconds);
        Ok(())
    }

    /// Seconds from the first operation on.
    fn run_part(&mut self, part: &Part) -> Result<f64> {
        let Worker { member, work: Work { job, call, cancel }, tell, .. } = self;
        let (place, stage, frames) = (member.session.place(), job.network.direction.name(), part.all_frames() as f64);
        let near = NearCall::new(job.call(part, call), place)?;
        let (mut begun, mut told) = (None, 0.0);
        let mut tell_done = |share: f64| {
            let _ = tell.send(Message::Done(frames * (share - told)));
            told = share;
        };
        let mut progress = |progress: Progress| {
            if progress.stage == stage && progress.total > 0 {
                let done = progress.done as f64 / progress.total as f64;
                begun.get_or_insert((Instant::now(), done));
                tell_done(done);
            }
            false
        };
        let mut control = Control { cancel, progress: Some(&mut progress), log: &Relay { tell, place } };
        let ran = member.session.run(&near.call, &mut control);
        let written = ran.and_then(|_| near.write_back());
        tell_done(if written.is_ok() { 1.0 } else { 0.0 });
        written?;
        Ok(begun.map_or(0.0, |(at, done): (Instant, f64)| at.elapsed().as_secs_f64() / (1.0 - done).max(0.5)))
    }
}
