//! Runs the parts of a job on their members, each on a thread of its own. The calling thread waits, and is the only one
//! that calls the host.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::panicking;
use std::time::{Duration, Instant};

use super::assign::Assignment;
use super::divide::Part;
use super::frames::NearTensors;
use super::job::{FleetJob, Tensors};
use super::member::{self, Member};
use crate::error::{Error, Result};
use crate::exec::runner::Watch;
use crate::exec::{Control, LogLevel, LogSink, Progress};
use crate::ir::TensorDevice;

/// How often the calling thread looks up while members are silent.
const PATIENCE: Duration = Duration::from_millis(50);

/// What a member's thread tells the calling one.
enum Message {
    /// The done share of a part, by its number in the meter.
    Done(usize, f64),
    Log(LogLevel, String),
    /// A failure that no other member can make good.
    Stop,
}

/// The progress of a whole job: the weight of each part, and the share of it that is done.
pub struct Meter {
    parts: Vec<(f64, f64)>,
    total: u64,
    told: u64,
}

impl Meter {
    /// `total`: all weights together.
    pub fn new(total: f64) -> Meter {
        Meter { parts: Vec::new(), total: total as u64, told: 0 }
    }

    /// Adds a part. Its number.
    fn add(&mut self, weight: f64) -> usize {
        self.parts.push((weight, 0.0));
        self.parts.len() - 1
    }

    /// What was done since this was asked last. A part that failed takes nothing back.
    fn advance(&mut self) -> u64 {
        let done: f64 = self.parts.iter().map(|(weight, done)| weight * done).sum();
        let since = (done as u64).clamp(self.told, self.total) - self.told;
        self.told += since;
        since
    }

    /// Tells the host that everything is done.
    pub fn finish(self, stage: &'static str, control: &mut Control) -> Result<()> {
        Watch::new(control, stage, self.total).advance(self.total)
    }
}

/// What became of a member's parts.
pub struct Outcome {
    /// From the first operation on.
    pub seconds: f64,
    /// The same, as planned.
    pub estimated: f64,
    /// How many parts are done, and why not more.
    pub done: usize,
    pub failure: Option<Error>,
}

/// One member's side of a run.
struct Worker<'a> {
    member: &'a mut Member,
    assignment: &'a Assignment,
    /// The numbers of its parts in the meter.
    numbers: Vec<usize>,
    tell: Sender<Message>,
}

impl Drop for Worker<'_> {
    fn drop(&mut self) {
        if panicking() {
            let _ = self.tell.send(Message::Stop);
        }
    }
}

/// What all members work on.
#[derive(Clone, Copy)]
pub struct Work<'a> {
    pub job: &'a FleetJob,
    pub tensors: &'a Tensors,
    /// Of a frame's worth of work, in the meter.
    pub weight: f64,
}

/// Runs everything that is assigned, one assignment for each member. A failure that another member can make good is an
/// outcome; any other is an error.
pub fn run(
    members: &mut [Member],
    assignments: &[Assignment],
    work: Work,
    meter: &mut Meter,
    control: &mut Control,
) -> Result<Vec<Outcome>> {
    let (tell, told) = mpsc::channel();
    let workers = members.iter_mut().zip(assignments).map(|(member, assignment)| {
        let weight = |part: &Part| work.weight * part.cost(&|frame| work.job.cut_cost(frame));
        let numbers = assignment.parts.iter().map(|(part, _)| meter.add(weight(part))).collect();
        Worker { member, assignment, numbers, tell: tell.clone() }
    });
    let workers: Vec<_> = workers.collect();
    drop(tell);
    let first = meter.parts.len() - workers.iter().map(|worker| worker.numbers.len()).sum::<usize>();
    let (cancel, listens) = (control.cancel, control.log.is_some());
    let mut stopped = Ok(());
    let outcomes = member::at_once(
        workers,
        |mut worker: Worker| Ok(worker.run(work, cancel, listens)),
        || stopped = watch(&told, work.job.direction().name(), meter, control),
    );
    let outcomes = outcomes.into_iter().collect::<Result<Vec<Outcome>>>()?;
    let mut failures = outcomes.iter().filter_map(|outcome| outcome.failure.as_ref());
    if let Some(error) = failures.find(|error| !member::is_of_device(error) && **error != Error::Cancelled) {
        return Err(error.clone());
    }
    stopped?;
    // Parts that failed are added again, with the members that do them next.
    meter.parts[first..].iter_mut().filter(|(_, done)| *done < 1.0).for_each(|part| *part = (0.0, 0.0));
    Ok(outcomes)
}

/// Passes on what members tell, until all have ended.
fn watch(told: &Receiver<Message>, stage: &'static str, meter: &mut Meter, control: &mut Control) -> Result<()> {
    let (log, cancel) = (control.log, control.cancel);
    let mut watch = Watch::new(control, stage, meter.total);
    let mut state = if meter.told > 0 { watch.advance(meter.told) } else { Ok(()) };
    loop {
        let first = match told.recv_timeout(PATIENCE) {
            Ok(message) => Some(message),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => break,
        };
        let mut heard = false;
        for message in first.into_iter().chain(told.try_iter()) {
            match message {
                Message::Done(number, share) => (meter.parts[number].1, heard) = (share, true),
                Message::Log(level, text) => log.iter().for_each(|log| log.log(level, format_args!("{text}"))),
                Message::Stop => cancel.store(true, Ordering::Relaxed),
            }
        }
        // After a stop the host hears no more of this call.
        if state.is_ok() && heard {
            state = watch.advance(meter.advance());
        } else if state.is_ok() && watch.stop() {
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
    fn run(&mut self, work: Work, cancel: &AtomicBool, listens: bool) -> Outcome {
        let mut outcome = Outcome { seconds: 0.0, estimated: 0.0, done: 0, failure: None };
        for (part, plan) in &self.assignment.parts {
            match self.run_part(part, self.numbers[outcome.done], work, cancel, listens) {
                Ok(seconds) => outcome.seconds += seconds,
                Err(error) => {
                    if !member::is_of_device(&error) {
                        let _ = self.tell.send(Message::Stop);
                    }
                    outcome.failure = Some(error);
                    break;
                }
            }
            outcome.estimated += plan.seconds;
            let _ = self.tell.send(Message::Done(self.numbers[outcome.done], 1.0));
            outcome.done += 1;
        }
        outcome
    }

    /// Seconds from the first operation on.
    fn run_part(&mut self, part: &Part, number: usize, work: Work, cancel: &AtomicBool, listens: bool) -> Result<f64> {
        let (tell, place) = (&self.tell, self.member.session.place());
        let (relay, stage) = (Relay { tell, place }, work.job.direction().name());
        let mut begun = None;
        let mut progress = |progress: Progress| {
            if progress.stage == stage && progress.total > 0 {
                let done = progress.done as f64 / progress.total as f64;
                begun.get_or_insert((Instant::now(), done));
                // 1 is for parts that have been written.
                let _ = tell.send(Message::Done(number, done.min(0.999)));
            }
            false
        };
        let session = &mut self.member.session;
        let near = NearTensors::new(work.job.tensors(part, work.tensors), place)?;
        let log = listens.then_some(&relay as &dyn LogSink);
        let mut control = Control { cancel, progress: Some(&mut progress), log };
        session.run(&work.job.call(part, &near.tensors), &mut control)?;
        near.write_back()?;
        Ok(begun.map_or(0.0, |(at, done): (Instant, f64)| at.elapsed().as_secs_f64() / (1.0 - done).max(0.5)))
    }
}
